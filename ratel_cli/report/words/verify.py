"""The results of `ratel verify`: one row for each thing that was checked, as a table or as JSON.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ratel_cli.errors import IntegrityFailure
from ratel_cli.report.words.plan import aligned
from ratel_cli.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result for one thing that was checked."""

    what: str
    """The thing, such as `step 40, current` or `model.safetensors`."""
    num_bytes: int
    checked: str
    """How thoroughly it was checked, such as `every chunk`."""
    verdict: str
    """What the check found."""
    is_wrong: bool = False


def check_lines(checks: Sequence[Check]) -> list[str]:
    """The lines of a table."""
    rows = [
        (check.what, format_bytes(check.num_bytes), check.checked, "WRONG: " * check.is_wrong + check.verdict)
        for check in checks
    ]
    return aligned([("what", "bytes", "checked", "verdict"), *rows])


def checks_to_json(checks: Sequence[Check]) -> dict[str, object]:
    """The content that `ratel verify --json` prints."""
    return {"whole": not any(check.is_wrong for check in checks), "checks": [asdict(check) for check in checks]}


def raise_if_wrong(checks: Sequence[Check]) -> None:
    """Raise IntegrityFailure for the first thing that is wrong, if there is one."""
    wrong = [check for check in checks if check.is_wrong]
    if wrong:
        others = f" (and {len(wrong) - 1} more, see above)" if len(wrong) > 1 else ""
        raise IntegrityFailure(f"{wrong[0].what}: {wrong[0].verdict}{others}")
