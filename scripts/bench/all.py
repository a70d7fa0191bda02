"""Runs the benchmarks one after another, and saves what they print under `scripts/bench/results`.

Each benchmark has a file, named after benchmark, machine and month, with the command, the load before and after, and
the table; and a picture next to it if the benchmark draws one. When a file is written again, everything from its line
"## Notes" on is preserved.

    python -m scripts.bench.all [NAME ...] [--smoke] [--results DIR]

All of them together take hours on a small machine, most of it for whole steps; name those you want.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from ratel_cli.hardware.host import memory_bytes, processor_name
from ratel_cli.units import GIB

ROOT = Path(__file__).parents[2]
NOTES = "## Notes"
_SAID_BY_ALL = ("processor", "cpu", "core", "gen", "with", "graphics")
PICTURE = "PICTURE"
"""As an argument, this stands for the SVG next to the file."""

_FEW_TOKENS = ("--shape", "1b", "--tokens", "128", "--micro-batches", "1")
_TINY = ("--shape", "tiny", "--tokens", "16", "--micro-batches", "1", "--steps", "3", "--rounds", "1")
BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "io": (("bench.io",), ("--smoke",)),
    "adamw": (("bench.adamw",), ("--smoke",)),
    "optimizer": (("bench.optimizer",), ("--parameters", "200000", "--rounds", "1")),
    "many_drives": (("bench.many_drives",), ("--groups", "2", "--rounds", "1")),
    "group_python": (("bench.group_python",), ("--elements", "2048", "--rounds", "1")),
    "unit_python": (("bench.unit_python",), ("--rounds", "2")),
    "overlap": (("bench.overlap",), _TINY),
    "clipping": (("bench.clipping",), ("--rounds", "1", "--steps", "2")),
    "transitions": (("bench.transitions",), ("--shape", "tiny", "--tokens", "16", "--steps", "4", "--rounds", "1")),
    "step": (("bench.step", "--host-memory-gib", "2.2"), _TINY),
    "resident": (("bench.step", "--contestants", "plain-resident", "ratel"), _TINY),
    "nvme": (("bench.step", *_FEW_TOKENS, "--contestants", "ratel", "--host-memory-gib", "2.2"), _TINY),
    "python": (("bench.step", "--shape", "narrow", "--tokens", "16", "--micro-batches", "16"), _TINY),
    "predictions": (("bench.predictions",), ("--cases", "tiny:16", "--rounds", "1", "--steps", "4")),
    "padded": (("bench.padded",), ("--kinds", "text", "--steps", "4")),
    "busy": (("bench.busy",), ("--rounds", "1", "--steps", "4")),
    "plan_questions": (("bench.plan_questions",), ("1",)),
    "durability": (("bench.durability",), ("--shape", "tiny", "--tokens", "16", "--steps", "5")),
    "ranks": (("bench.ranks",), ("--layers", "2", "--hidden", "48", "--tokens", "16", "--steps", "4", "--rounds", "1")),
    "plan": (
        ("bench.plan", "--picture", PICTURE),
        ("--shape", "tiny", "--tokens", "16", "--points", "2", "--rounds", "1", "--steps", "1"),
    ),
}
"""By name: the module with its arguments, and the arguments that a smoke test adds."""


def main() -> None:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only to see that they run")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "bench" / "results")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in arguments.names or BENCHMARKS:
        (script, *given), smoke = BENCHMARKS[name]
        path = arguments.results / f"{name}_{machine_name(processor_name())}_{datetime.now(tz=UTC):%Y%m}.md"
        write(path, name, [script, *given, *(smoke if arguments.smoke else ())])
        print(f"{name}: {path}", flush=True)


def machine_name(processor: str) -> str:
    """A short name for files: the number of cores, and the words that identify the processor."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\(\w+\)|@.*", "", processor.lower()))
    return "-".join([f"{os.cpu_count()}core", *(word for word in words if word not in _SAID_BY_ALL)])


def write(path: Path, name: str, command: list[str]) -> None:
    """Run one benchmark, and write what it prints, except the JSON, to `path`."""
    picture = path.with_suffix(".svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    script, *given = [str(picture) if argument == PICTURE else argument for argument in command]
    before = os.getloadavg()[0]
    output = subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", *given], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout
    *table, _json = output.splitlines()
    after = os.getloadavg()[0]
    notes = path.read_text(encoding="utf-8").partition(NOTES)[2] if path.exists() else "\n"
    cores, gib = os.cpu_count(), memory_bytes() / GIB
    title = f"# {name}: {processor_name()}, {cores} cores, {gib:.0f} GiB, {datetime.now(tz=UTC):%Y-%m}"
    words = [picture.name if argument == PICTURE else argument for argument in command]
    how = f"`python -m scripts.{' '.join(words)}`, load average {before:.1f} before and {after:.1f} after."
    drawn = [f"![{name}]({picture.name})", ""] if PICTURE in command else []
    lines = [title, "", how, "", "```", *table, "```", "", *drawn, NOTES + notes]
    path.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
