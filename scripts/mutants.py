"""Small changes that break a promise of Ratel, and whether the short tier of the tests notices each of them.

    python -m scripts.mutants                    every mutant, one after the other
    python -m scripts.mutants --only draws       those with this in their name
    python -m scripts.mutants --list

Each mutant is tried in a copy of the repository: one piece of text in one file is replaced, then the tests run that are
expected to notice it, and, if they do not, the rest of `make test`. A mutant that survives shows a promise that nothing
holds. The last line sums up; the exit code is 0 if all were caught, and 1 if one survived or could not be tried.

Invariant: a mutant breaks behaviour that is promised (bits, steps, bytes, plans, errors), not a detail; and its old text
stands exactly once in its file, which `tests/scripts/test_mutants.py` holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratel_cli import _native

ROOT = Path(__file__).parents[1]
COPIED_FOLDERS = ("ratel_cli", "tests", "scripts", "configs", "docs", "kernels", ".ci")
GPU_TESTS = ("tests/gpu", "tests/simulated_gpu")
SECONDS = 1800
"""The most that one call of pytest may take; a mutant that hangs is caught."""
Verdict = Literal["caught", "survived", "not tried"]
VERDICTS: tuple[Verdict, ...] = ("caught", "survived", "not tried")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change."""

    name: str
    file: str
    """In `ratel_cli`."""
    old: str
    new: str
    breaks: str
    """The promise."""
    tests: str
    """Files in `tests` that notice it, separated by blanks."""

    @property
    def test_paths(self) -> tuple[str, ...]:
        return tuple(f"tests/{name}" for name in self.tests.split())


# fmt: off
MUTANTS = (
    Mutant("draws without the step", "engine/state.py", "{seed}/{step}/{block}", "{seed}/{block}", "draws differ by step", "engine/test_randomness.py"),
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one mutant."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    note: str
    """The first test that failed, or why there was no verdict."""


def try_mutant(mutant: Mutant, root: Path = ROOT) -> Trial:
    """Run the tests on a copy of `root` with this one change."""
    started = time.monotonic()

    def trial(verdict: Verdict, note: str) -> Trial:
        return Trial(mutant=mutant, verdict=verdict, seconds=time.monotonic() - started, note=note)

    with copy_of(root) as copy:
        apply(mutant, copy)
        for tests in (mutant.test_paths, ()):
            code, output = run_tests(copy, tests)
            if code == 1:
                return trial("caught", first_failure(output))
            if code != 0:
                return trial("not tried", f"pytest ended with {code}: {output[-2000:]}")
        return trial("survived", f"{mutant.file}: {mutant.breaks}")


def apply(mutant: Mutant, root: Path) -> None:
    """Replace the text."""
    path = root / "ratel_cli" / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its old text stands {source.count(mutant.old)} times in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit code and output for these tests, or for the whole short tier; the first failure ends it."""
    for environment, arguments in pytest_calls(tests):
        command = [str(root / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"FAILED: no end after {SECONDS} seconds"
        if done.returncode != 0:
            return done.returncode, done.stdout
    return 0, ""


def pytest_calls(tests: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment and the arguments of each call. Tests of the GPU run on the simulated one, and apart."""
    on_gpu = [name for name in tests if name.startswith(GPU_TESTS)]
    others = [name for name in tests if name not in on_gpu]
    if others or not tests:
        yield {}, [*others, *(f"--ignore={name}" for name in GPU_TESTS)]
    if on_gpu or not tests:
        yield {"RATEL_SIMULATED_GPU": "1"}, on_gpu or list(GPU_TESTS)


def first_failure(output: str) -> str:
    """The line in which pytest names it."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else "no test was named"


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the repository with an environment of its own, in which `ratel_cli` is the copy's.

    Everything else comes from the environment that runs this.
    """
    with tempfile.TemporaryDirectory(prefix="ratel-mutant-") as name:
        copy = Path(name)
        for each in root.iterdir():
            if each.name in COPIED_FOLDERS:
                shutil.copytree(each, copy / each.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif each.is_file():
                shutil.copy2(each, copy)
        venv.create(copy / ".venv", symlinks=True)
        bin_directory = copy / ".venv" / "bin"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(copy / ".venv")}))
        inherited = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "copy.pth").write_text("".join(f"{path}\n" for path in (copy, *inherited)))
        program = bin_directory / "ratel"
        program.write_text(f'#!/bin/sh\nexec {bin_directory}/python -m ratel_cli "$@"\n')
        program.chmod(0o755)
        native = Path(_native.__file__)
        shutil.copy2(native, copy / "ratel_cli" / native.name)
        yield copy


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many are tried at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.file:36} {mutant.breaks}")
        return 0
    tests = sorted({name for mutant in chosen for name in mutant.test_paths})
    with copy_of(ROOT) as copy:
        code, output = run_tests(copy, tests)
    if code != 0 or not chosen:
        print(output or f"no mutant has {options.only!r} in its name", file=sys.stderr)
        print("nothing was tried: without a mutant the tests must pass", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(options.jobs) as executor:
        trials = []
        for trial in executor.map(try_mutant, chosen):
            trials.append(trial)
            print(f"{trial.verdict:8} {trial.mutant.name:32} {trial.seconds:5.0f} s  {trial.note}", flush=True)
    counts = {verdict: sum(trial.verdict == verdict for trial in trials) for verdict in VERDICTS}
    print(f"{len(trials)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if counts["caught"] == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
