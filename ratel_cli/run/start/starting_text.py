"""The text of a starting config, key by key. For `ratel init`.

Invariants: what the user gave as `KEY=VALUE` stands in the file and is never chosen otherwise. The text loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.config.describe import describe_value
from ratel_cli.config.json_schema import editor_line
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import Reading, dump, examine_text
from ratel_cli.config.others.aliases import ALIASES
from ratel_cli.config.yaml.yaml_marks import Plain, raise_all

DATA_PLACEHOLDER = "train.jsonl"
MODEL_PLACEHOLDER = "OWNER/NAME"
TEXT_LENGTH = 2048
"""The sequence length for plain texts, which are split, and where there is no data."""
STEP_TOKENS = 1 << 15
"""The most tokens of a step."""
_COMMENT_COLUMN = 36
_GROUPS = (
    ("base_model", "random_init", "adapter", "rl", "datasets", "chat_template"),
    (
        "sequence_len", "tokens_per_step", "micro_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps",
        "learning_rate", "dtype",
    ),
    ("output_dir", "storage", "limits"),
)  # fmt: skip
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "adapter": ("adapter: lora  # trains a LoRA adapter instead of all weights; learning_rate: 2e-4 suits it",),
    "limits": ("limits:", "  host_memory: 48GiB  # default: what is free"),
    "storage": (
        "storage:",
        "  paths: [/mnt/ssd0/ratel, /mnt/ssd1/ratel]  # one on each SSD; default: next to output_dir",
    ),
    "save_steps": ("save_steps: 100  # saves every hundredth step, to go back to or to export",),
    "val_set_size": ("val_set_size: 0.02  # holds out 2 % of the samples; their loss is reported",),
}
"""By key: lines that show how to set it."""


class StartingText:
    """The keys of the new config, each with a comment."""

    def __init__(self, path: Path, overrides: Sequence[str], values: Mapping[str, Plain]) -> None:
        """`path`: of the file that is to be written. Raises BadInput if the overrides are wrong."""
        self._path = path
        self._overrides = tuple(overrides)
        self._values = dict(values)
        self._comments: dict[str, str] = {}
        written = self._read().written
        self.given = frozenset(key for key, value in written.items() if value != self._values.get(key))
        """Keys that the user has set."""

    def choose(self, key: str, value: Plain, comment: str = "") -> None:
        """Set a key, unless the user has; of `datasets`, what he has not set inside."""
        if key not in self.given or key == "datasets":
            self._values[key] = value
            self._comments[key] = comment

    @property
    def config(self) -> RunConfig:
        """The config as it is so far."""
        config = self._read().config
        assert config is not None
        return config

    def copy(self) -> StartingText:
        """Return a copy: its keys can be chosen on without a change of these."""
        other = copy(self)
        other._values, other._comments = dict(self._values), dict(self._comments)
        return other

    def text(self) -> str:
        """The whole file."""
        written = self._read().written
        lines = [
            editor_line(),
            "# A starting config, made by `ratel init`. `ratel explain KEY` says what a key means.",
            f"# {command('check', self._path)} finds all errors in it.",
        ]
        grouped = {key for group in _GROUPS for key in group}
        for group in (*_GROUPS, tuple(key for key in written if key not in grouped)):
            if any(key in written for key in group):
                lines.append("")
            for key in group:
                if key in written:
                    lines += self._entry(key, written[key])
        lines += ["", "# What you may want to set, too:"]
        lines += [f"# {line}" for key, shown in _OPTIONS.items() if key not in written for line in shown]
        return "\n".join(lines) + "\n"

    def _entry(self, key: str, value: Plain) -> list[str]:
        """The lines of a key: its comment stands behind it, or above it if there are several lines."""
        shown = f"{key}: {describe_value(value)}" if isinstance(value, float) else dump({key: value}).rstrip("\n")
        first, *more = (self._as_given(line) for line in shown.split("\n")) if key in self.given else shown.split("\n")
        comment = "" if key in self.given else self._comments.get(key, "")
        if not comment:
            return [first, *more]
        if more:
            return [f"# {comment}", first, *more]
        return [f"{first:<{_COMMENT_COLUMN}}# {comment}" if len(first) < _COMMENT_COLUMN else f"{first}  # {comment}"]

    def _as_given(self, line: str) -> str:
        """The line, with its number as the user has written it: `1e-3` does not become 0.001."""
        start, _, written = line.rpartition(": ")
        name = start.strip(" -")
        for override in self._overrides:
            key, _, given = override.partition("=")
            last = key.strip().rpartition(".")[2]
            if name in (last, *(aliases.get(last) for aliases in ALIASES.values())) and _is_same_number(given, written):
                return f"{start}: {given.strip()}"
        return line

    def _read(self) -> Reading:
        reading = examine_text(dump(self._values), self._path, self._overrides)
        raise_all(list(reading.findings))
        return reading


def starting_text(model: str | None, data: Sequence[str], output: Path, overrides: Sequence[str]) -> StartingText:
    """The first keys of the config that is written to `output`. Raises BadInput if the overrides are wrong."""
    datasets: list[Plain] = [{"path": path} for path in data or [DATA_PLACEHOLDER]]
    return StartingText(output, overrides, {"base_model": model or MODEL_PLACEHOLDER, "datasets": datasets})


def _is_same_number(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return False
