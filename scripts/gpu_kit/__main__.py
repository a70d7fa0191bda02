"""All measurements of a GPU that decide what to do next, in one command of less than ten minutes.

    python -m scripts.gpu_kit FOLDER [--parts machine tests ...] [--seconds 585]

Each part runs in a process of its own within a time box; a part that fails is named with its reason, and the next one
begins. At most forty lines are printed. FOLDER gets `kit.json` with all numbers, `tables.txt` with tables of kernels,
`lines.txt` and `log.txt`. On a simulated GPU (RATEL_SIMULATED_GPU=1) all sizes are tiny: that shows that everything
runs, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.bench.findings import Findings
from scripts.gpu_kit.boxes import PRELOADED, Part, PartRunner
from scripts.gpu_kit.parts import ALL_SECONDS, BY_NAME, PARTS

MOST_LINES = 40
_LINES_OF_PART = 4
_LEAST_SECONDS = 3.0
"""With less time left, nothing is started."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="for the results")
    parser.add_argument("--parts", nargs="+", choices=BY_NAME, default=list(BY_NAME), metavar="PART")
    parser.add_argument("--seconds", type=float, default=585.0, help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that it runs")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that no import touches the GPU before parts do
    options.folder.mkdir(parents=True, exist_ok=True)
    end_on_sigterm()
    is_tiny = options.tiny or os.environ.get("RATEL_SIMULATED_GPU") == "1"
    parts = [part for part in PARTS if part.name in options.parts]
    Kit(options.folder, parts, seconds=options.seconds, is_tiny=is_tiny).run()


def end_on_sigterm() -> None:
    """Let SIGTERM end the part that runs before it ends this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Kit:
    """A run of some parts, whose results are in the folder after each of them."""

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        *,
        seconds: float,
        is_tiny: bool,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        """`preloaded`: as for a PartRunner."""
        self._folder, self._parts, self._is_tiny, self._preloaded = folder, parts, is_tiny, preloaded
        self._start, self._seconds = time.perf_counter(), seconds
        self._found: dict[str, Findings] = {}
        self._lines: list[str] = []

    def run(self) -> None:
        """Run all parts, and print what they found."""
        with tempfile.TemporaryDirectory(prefix="gpu-kit-") as directory:
            runner = PartRunner(Path(directory), is_tiny=self._is_tiny, preloaded=self._preloaded)
            for part in self._parts:
                found = self._run(runner, part)
                self._found[part.name] = found
                for line in _lines_of(found):
                    self._say(f"{part.name:<10} {line}")
                self._keep(runner.log)
        spent = ", ".join(f"{name} {found.seconds:.0f}" for name, found in self._found.items())
        self._say(f"{'seconds':<10} {time.perf_counter() - self._start:.0f}: {spent}", most=MOST_LINES)
        self._write()

    def _run(self, runner: PartRunner, part: Part) -> Findings:
        left = self._start + self._seconds - time.perf_counter()
        if left < _LEAST_SECONDS:
            return Findings(left_out={"the part": "no time left"})
        box = part.seconds * max(1.0, self._seconds / ALL_SECONDS)  # more time makes all boxes larger
        return runner.run(part, seconds=min(box, left), most_seconds=left)

    def _say(self, line: str, *, most: int = MOST_LINES - 1) -> None:
        if len(self._lines) < most:
            self._lines.append(line)
            print(line, flush=True)

    def _keep(self, log: Path) -> None:
        self._write()
        if log.exists():
            shutil.copyfile(log, self._folder / "log.txt")

    def _write(self) -> None:
        """Replace the files, so that they are whole whenever the command ends."""
        parts = {name: asdict(found) for name, found in self._found.items()}
        tables = [
            f"=== {name}: {title}\n{text}\n"
            for name, found in self._found.items()
            for title, text in found.tables.items()
        ]
        for found in parts.values():
            del found["tables"]
        summary = {
            "benchmark": "gpu_kit",
            "is_tiny": self._is_tiny,
            "seconds": time.perf_counter() - self._start,
            "parts": parts,
        }
        for name, text in {
            "kit.json": json.dumps(summary, indent=1),
            "tables.txt": "\n".join(tables),
            "lines.txt": "".join(f"{line}\n" for line in self._lines),
        }.items():
            written = self._folder / f"{name}.new"
            written.write_text(text, encoding="utf-8")
            os.replace(written, self._folder / name)


def _lines_of(found: Findings) -> list[str]:
    """A part's own lines, and one about what is missing, if something is."""
    missing = [f"{name} failed ({reason})" for name, reason in found.failures.items()]
    missing += [f"{name} left out ({reason})" for name, reason in found.left_out.items()]
    if not missing:
        return found.lines[:_LINES_OF_PART]
    more = f"; {len(missing) - 1} more in kit.json" if len(missing) > 1 else ""
    return [*found.lines[: _LINES_OF_PART - 1], f"{missing[0]}{more}"]


if __name__ == "__main__":
    main()
