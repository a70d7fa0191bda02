"""What the kernel says about this machine in /proc and /sys, read below one root.

Tests make a root of their own, and so machines that are broken in any way. Invariant: nothing is written, and a file
that is missing or cannot be read says nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFiles:
    """The files below `root`. All paths are relative to it: `proc/swaps`."""

    root: Path = Path("/")

    @property
    def proc(self) -> Path:
        """The directory of processes and of the kernel's own values."""
        return self.root / "proc"

    @property
    def control_groups(self) -> Path:
        """The directory of the control groups."""
        return self.root / "sys" / "fs" / "cgroup"

    def text(self, path: str | Path) -> str | None:
        """The content of a file, without white space around it; None if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, path: str | Path) -> int | None:
        """The whole number that a file begins with; None if there is none."""
        words = (self.text(path) or "").split()
        try:
            return int(words[0]) if words else None
        except ValueError:
            return None

    def names(self, directory: str | Path) -> tuple[str, ...]:
        """The names in a directory, in order; empty if it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self.root / directory)))
        except OSError:
            return ()

    def real(self, path: str | Path) -> Path | None:
        """The place that a path leads to through links, absolute; None if there is nothing."""
        try:
            return (self.root / path).resolve(strict=True)
        except (OSError, RuntimeError):
            return None
