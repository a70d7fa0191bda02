"""One case of the corpus of malformed inputs: what is done to a healthy run's inputs, and what must be said then.

The modules beside this one generate the cases, one module for each kind of input; `test_corpus.py` runs
each of them through the command line. Invariant: a case touches nothing outside its own directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(slots=True, kw_only=True)
class Inputs:
    """The inputs of one run, healthy until a case damages them."""

    directory: Path
    """Of this case alone."""
    healthy_base: Path
    healthy_hardware: Path
    settings: dict[str, object]
    """The config's keys."""
    text: bytes | None = None
    """The config's bytes, where they are not simply the settings."""
    command: str = "finetune"
    asks_for: Path | None = None
    """The config that is named on the command line, where it is another."""
    arguments: list[str] = field(default_factory=lambda: ["--resume", "no"])
    """Behind the config. Starting over would replace the store: that is what a refusal must come before."""

    @property
    def config(self) -> Path:
        return self.directory / "run.yaml"

    @property
    def base(self) -> Path:
        """The base model, in a copy of the case's own."""
        copy = self.directory / "base"
        if not copy.exists():
            shutil.copytree(self.healthy_base, copy)
            self.settings["base_model"] = str(copy)
        return copy

    def add_lines(self, text: str) -> int:
        """Append to the config; the number of the first line that is new."""
        healthy = self.text or self._dumped()
        self.text = healthy + text.encode() + b"\n"
        return healthy.count(b"\n") + 1

    def data(self, content: bytes, *, name: str = "rows.jsonl", type: str = "completion", **keys: object) -> Path:  # noqa: A002
        """Train on a file with this content."""
        path = self.directory / name
        path.write_bytes(content)
        self.train_on(path, type=type, **keys)
        return path

    def train_on(self, path: Path | str, **keys: object) -> None:
        self.settings["datasets"] = [{"path": str(path), **keys}]

    def plan_for(self, hardware: bytes) -> Path:
        """Ask `ratel plan` about a machine that is described so."""
        path = self.directory / "hardware.yaml"
        path.write_bytes(hardware)
        self.command, self.arguments = "plan", ["--hardware", str(path)]
        return path

    def command_line(self) -> list[str]:
        """Writes the config; what `main` is to be called with."""
        if not self.config.is_dir():
            self.config.write_bytes(self.text if self.text is not None else self._dumped())
        return [self.command, str(self.asks_for or self.config), *self.arguments]

    def _dumped(self) -> bytes:
        return yaml.safe_dump(self.settings, allow_unicode=True).encode()


Damage = Callable[[Inputs], int | None]
"""Does it; the line that an error must name, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something wrong, and the answer to it."""

    name: str
    damage: Damage
    told: str
    """A regular expression that one of the errors must have; the one that names the line, if there is a line."""
    code: int = 2
    seconds: float = 2.0
    """The answer may take so long."""


def quietly(change: Callable[[Inputs], object]) -> Damage:
    """A damage that no line belongs to."""

    def damage(inputs: Inputs) -> None:
        change(inputs)

    return damage
