"""What a malformed input is: the damage to a healthy run's files, and the message that must follow.

The modules in this folder generate the cases, one module for each kind of input. `test_corpus.py` runs each case
through the command line. Invariant: a case changes nothing outside its own directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(slots=True, kw_only=True)
class RunFiles:
    """The inputs of one run. They are healthy until a case damages them."""

    directory: Path
    """The case's own directory."""
    healthy_base: Path
    settings: dict[str, object]
    """The keys of the config."""
    text: bytes | None = None
    """The bytes of the config file. None: the settings, written as YAML."""
    command: str = "finetune"
    asks_for: Path | None = None
    """The config that the command line names. None: the case's own."""
    arguments: list[str] = field(default_factory=lambda: ["--resume", "no"])
    """Arguments after the config. `--resume no` would replace the store: a bad input must be rejected before."""

    @property
    def config(self) -> Path:
        return self.directory / "run.yaml"

    @property
    def base(self) -> Path:
        """The case's own copy of the base model."""
        copy = self.directory / "base"
        if not copy.exists():
            shutil.copytree(self.healthy_base, copy)
            self.settings["base_model"] = str(copy)
        return copy

    def add_lines(self, text: str) -> int:
        """Append to the config. Returns the number of the first new line."""
        healthy = self.text or self._dumped()
        self.text = healthy + text.encode() + b"\n"
        return healthy.count(b"\n") + 1

    def data(self, content: bytes, *, name: str = "rows.jsonl", type: str = "completion", **keys: object) -> Path:  # noqa: A002
        """Write a data file with this content and train on it."""
        path = self.directory / name
        path.write_bytes(content)
        self.train_on(path, type=type, **keys)
        return path

    def train_on(self, path: Path | str, **keys: object) -> None:
        self.settings["datasets"] = [{"path": str(path), **keys}]

    def plan_for(self, hardware: bytes) -> Path:
        """Run `ratel plan` with a hardware file of this content."""
        path = self.directory / "hardware.yaml"
        path.write_bytes(hardware)
        self.command, self.arguments = "plan", ["--hardware", str(path)]
        return path

    def command_line(self) -> list[str]:
        """Write the config. Returns the arguments for `main`."""
        if not self.config.is_dir():
            self.config.write_bytes(self.text if self.text is not None else self._dumped())
        return [self.command, str(self.asks_for or self.config), *self.arguments]

    def _dumped(self) -> bytes:
        return yaml.safe_dump(self.settings, allow_unicode=True).encode()


DAMAGED_JSON = {
    "empty": b"",
    "cut": b'{"model": {"type": ',
    "not UTF-8": b'{"version": "\xff"}',
    "nested deeply": b"[" * 50_000,
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "zeros": bytes(1000),
}
"""Contents of a JSON file of the base model, by what is wrong with them."""
Damage = Callable[[RunFiles], int | None]
"""Damages the inputs. Returns the line that the error must name, or None if no line belongs to the damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedInput:
    """One damage, and the error that must follow."""

    name: str
    damage: Damage
    message: str
    """A regular expression that must match one of the errors: the one with the line, if the damage has a line."""
    code: int = 2
    seconds: float = 10.0
    """The most time that the command may take."""


def no_line(change: Callable[[RunFiles], object]) -> Damage:
    """A damage that belongs to no line."""

    def damage(inputs: RunFiles) -> None:
        change(inputs)

    return damage
