"""The benchmarks of steps and of the optimizer run, and keep their promises on a model of next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--shape", "tiny", "--tokens", "16", "--micro-batches", "2", "--steps", "4", "--rounds", "1")


def run(script: str, *arguments: str) -> tuple[str, dict[str, dict[str, float]]]:
    command = [sys.executable, "-m", f"scripts.{script}", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return output, json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("clip", [(), ("--clip",)], ids=["unclipped", "clipped"])
def test_a_step_beside_plain_pytorch(tmp_path: Path, clip: tuple[str, ...]) -> None:
    output, summary = run("bench_step", *TINY, *clip, "--contestants", "plain", "ratel", "--directory", str(tmp_path))
    assert "ratel against plain:" in output
    assert summary["ratel"]["moved_of_predicted"] == 1
    [ratel], [plain] = summary["ratel"]["runs"], summary["plain"]["runs"]  # type: ignore[misc]
    assert len(plain["losses"]) == len(ratel["losses"]) == 4
    assert len(plain["step_seconds"]) == len(ratel["step_seconds"]) == 2
    assert abs(plain["losses"][0] - ratel["losses"][0]) < 0.1
    assert list(tmp_path.iterdir()) == []


def test_the_overlap_modes_give_the_same_weights(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    output, summary = run("bench_overlap", *TINY, "--directory", str(tmp_path), "--trace", str(trace))
    assert "are the same in all runs" in output
    assert summary["optimized"]["times_optimized"] == 1
    assert json.loads(trace.read_text())["traceEvents"]
    assert list(tmp_path.iterdir()) == [trace]


def test_the_optimizer_alone(tmp_path: Path) -> None:
    _, summary = run("bench_optimizer", "--parameters", "200000", "--rounds", "2", "--directory", str(tmp_path))
    assert all(len(summary[name]["seconds"]) == 2 for name in ("NVMe", "AdamW", "optimized", "naive"))  # type: ignore[arg-type]
    assert summary["optimized"]["of_ceiling"] > 0
    assert list(tmp_path.iterdir()) == []


def test_results_are_kept_with_the_notes_on_them(tmp_path: Path) -> None:
    def run_all() -> str:
        command = [sys.executable, "-m", "scripts.bench_all", "optimizer", "--smoke", "--results", str(tmp_path)]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
        [path] = tmp_path.iterdir()
        assert path.name.startswith("optimizer_")
        return path.read_text()

    first = run_all()
    assert "python -m scripts.bench_optimizer" in first
    assert "of ceiling" in first
    [path] = tmp_path.iterdir()
    path.write_text(first + "The drive was shared.\n")
    assert run_all().endswith("## Notes\nThe drive was shared.\n")


def test_an_unknown_benchmark_is_refused() -> None:
    command = [sys.executable, "-m", "scripts.bench_all", "optimiser"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == 2
    assert "unknown: optimiser; there are io, adamw, optimizer" in refused.stderr
