"""What `ratel check` finds, as values, and as JSON. Invariant: nothing heavy is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedError:
    """One thing that is wrong."""

    place: str | None
    """File, line and column in the config, or the argument; None if it is nowhere in the config."""
    key: str | None
    """The dotted key of the config that it is about, if there is one."""
    message: str
    hint: str | None

    @property
    def text(self) -> str:
        """The message, with the place before it."""
        return self.message if self.place is None else f"{self.place}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Everything that is wrong about a run, and what would run if nothing is."""

    errors: tuple[ReportedError, ...]
    exit_code: int
    """0 if nothing is wrong; otherwise that of the errors."""
    notices: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    """The opening statement of the run: a name and a fact each."""

    def to_json(self) -> dict[str, object]:
        """The content that `ratel check --json` prints."""
        return {
            "ok": not self.errors,
            "errors": [asdict(error) for error in self.errors],
            "notices": list(self.notices),
            "run": dict(self.rows),
        }
