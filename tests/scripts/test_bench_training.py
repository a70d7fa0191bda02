"""The benchmarks of steps and of the optimizer run on a tiny model, and report what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.real_time import in_real_time

ROOT = Path(__file__).parents[2]
HAS_DEEPSPEED = find_spec("deepspeed") is not None
TINY = ("--shape", "tiny", "--tokens", "16", "--micro-batches", "2", "--steps", "4", "--rounds", "1")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    """Where a benchmark puts its files. It must leave none."""
    yield str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def run(script: str, *arguments: str) -> tuple[str, dict[str, dict[str, float]]]:
    command = [sys.executable, "-m", f"scripts.{script}", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return output, json.loads(output.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [(), ("--clip",), ("--lora", "4", "--dtype", "float32", "--wear", "ignore")],
    ids=["unclipped", "clipped", "lora in fp32"],
)
def test_a_step_next_to_plain_pytorch(directory: str, options: tuple[str, ...]) -> None:
    contestants = ("--contestants", "plain", "ratel", "--directory", directory)
    output, summary = run("bench.step", *TINY, *options, *contestants)
    assert "ratel against plain:" in output
    assert summary["ratel"]["moved_of_predicted"] == 1
    [ratel], [plain] = summary["ratel"]["runs"], summary["plain"]["runs"]  # type: ignore[misc]
    assert len(plain["losses"]) == len(ratel["losses"]) == 4
    assert len(plain["step_seconds"]) == len(ratel["step_seconds"]) == 2
    assert abs(plain["losses"][0] - ratel["losses"][0]) < 0.1


@pytest.mark.nightly
def test_a_hooked_module_next_to_plain_pytorch(directory: str) -> None:
    """What `--planned` says without building it is what it moves."""
    tiny = ("--layers", "2", "--width", "64", "--tokens", "8", "--steps", "2", "--limit", "1GiB")
    command = [sys.executable, "-m", "scripts.bench.hooked", *tiny, "--plain", "--vertical", "--storage", directory]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    planned = subprocess.run([*command, "--planned"], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    lines = output.splitlines()
    assert (planned.splitlines()[0], planned.splitlines()[-1]) == (lines[0], lines[4])
    rows = [line.split("  ")[0] for line in lines]
    assert [row.strip() for row in rows if row[0].isalpha()] == [
        "build", "write the state", "step", "open", "vertical step", "plain step",
    ]  # fmt: skip


@pytest.mark.full
def test_the_rok_curve_of_a_stack(directory: str) -> None:
    tiny = ["--blocks", "3", "--width", "64", "--rows", "512", "--turns", "1", "--storage", directory]
    output, summary = run("bench.rok", *tiny)
    points = {point["strategy"]: point for point in summary["points"]}  # type: ignore[index]
    assert list(points) == [line.split()[0] for line in output.splitlines()[1:-1]]
    kept, recomputed, offloaded = (points[name]["held_bytes"] for name in ("keep", "recompute", "offload"))
    assert recomputed == 3 * 4 * 64 * 512  # the blocks' inputs
    assert kept - points["offload"]["written_bytes"] == offloaded < kept
    assert points["host"]["resident_bytes"] == points["offload"]["written_bytes"] > 0 == points["host"]["written_bytes"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@in_real_time
def test_clipping_costs_only_when_it_bites(directory: str) -> None:
    """Drive and processor are slowed down so far that a loaded machine keeps up with them."""
    output, summary = run("bench.clipping", "--steps", "2", "--directory", directory)
    assert summary["deferred"]["median_seconds"] > 1.15 * summary["eager"]["median_seconds"]
    assert all(summary[mode]["ratio"] <= 1.05 for mode in ("never", "always", "half", "late")), output


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # the first time, DeepSpeed compiles its extensions
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_a_step_next_to_deepspeed(directory: str) -> None:
    """`small`, unlike `tiny`, has parameters that are large enough for DeepSpeed to put them on NVMe."""
    names = ("plain", "ratel", "zero", "zero-optimizer")
    shape = ("--shape", "small", "--micro-batches", "1", "--steps", "3", "--directory", directory)
    output, summary = run("bench.step", *TINY, *shape, "--contestants", *names)
    assert "ratel against zero:" in output and "ratel against zero-optimizer:" in output
    [plain], [zero], [by_optimizer] = (summary[name]["runs"] for name in ("plain", "zero", "zero-optimizer"))  # type: ignore[misc]
    assert plain["losses"] == pytest.approx(zero["losses"], rel=1e-3)
    assert plain["losses"] == pytest.approx(by_optimizer["losses"], rel=1e-3)


@pytest.mark.nightly
def test_the_overlap_modes_give_the_same_weights(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    output, summary = run("bench.overlap", *TINY, "--directory", str(tmp_path), "--trace", str(trace))
    assert "are the same in all runs" in output
    assert summary["optimized"]["times_optimized"] == 1
    assert json.loads(trace.read_text())
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.nightly
def test_the_plan_next_to_measured_steps(tmp_path: Path) -> None:
    picture, store = tmp_path / "plan.svg", tmp_path / "store"
    store.mkdir()
    shape = ("--shape", "narrow", "--tokens", "8", "16", "--micro-batches", "4")
    budget = ("--points", "2", "--rounds", "1", "--steps", "1", "--extra-mib", "1")
    output, summary = run("bench.plan", *shape, *budget, "--picture", str(picture), "--directory", str(store))
    assert output.count("prediction, at the planned point") == 2
    for tokens in ("8", "16"):
        assert summary[tokens]["worst_error"] >= summary[tokens]["planned_error"]
        points: list[dict[str, list[float]]] = summary[tokens]["points"]  # type: ignore[assignment]
        assert [len(point["seconds"]) for point in points] == [1] * 3
        assert any(point["spilled_bytes"] for point in points)
    assert picture.read_text().startswith("<?xml")
    assert list(store.iterdir()) == []


@pytest.mark.nightly
def test_the_cost_of_durability(directory: str) -> None:
    output, summary = run("bench.durability", *TINY[:-2], "--turn", "2", "--directory", directory)
    assert "for durability and checksums" in output
    assert len(summary["durable_seconds"]) == len(summary["bare_seconds"]) > 0  # type: ignore[arg-type]


GPU_ON_THE_CPU = (
    "bench.gpu", "--shape", "tiny", "--tokens", "32", "--rows", "2", "--micro-batches", "1", "--yardstick", "0",
    "--device", "cpu", "--host-memory-gib", "3", "--directory",
)  # fmt: skip


@pytest.mark.nightly
def test_the_benchmark_of_a_gpu_runs(directory: str) -> None:
    """On the CPU, which only shows that it runs."""
    output, summary = run(*GPU_ON_THE_CPU, directory, "--steps", "1")
    assert "planned point, slower than the best one measured" in output
    assert [point["name"] for point in summary["steps"]] == ["ratel, 24 GiB", "ratel, 16 GiB"]  # type: ignore[index]
    assert [point["name"] for point in summary["overlap"]] == ["optimized", "naive", "separate"]  # type: ignore[index]
    assert [point["name"] for point in summary["sweep"]] == ["planned", "0%", "25%", "50%", "100%"]  # type: ignore[index]
    assert summary["largest"].keys() == {"24.0", "16.0"}


@pytest.mark.nightly
def test_the_benchmark_of_a_gpu_leaves_out_parts_when_time_is_up(tmp_path: Path) -> None:
    output, summary = run(*GPU_ON_THE_CPU, str(tmp_path), "--minutes", "0")
    assert output.count("left out, for lack of time") == 2 + 2 + 3 + 5
    assert not summary["plain"] and not summary["steps"] and not summary["sweep"]


@pytest.mark.nightly
@in_real_time
def test_what_ranks_exchange_lies_under_computing(directory: str) -> None:
    """Next to one rank, where blocks take long enough to compute."""
    small = ("--layers", "6", "--hidden", "192", "--tokens", "512", "--steps", "4", "--rounds", "1")
    output, summary = run("bench.ranks", *small, "--directory", directory)
    assert "two ranks to one:" in output and len(summary["ratios"]) == 1
    assert 0.5 < summary["hidden"] <= 1  # type: ignore[operator]


@pytest.mark.nightly
def test_the_optimizer_alone(directory: str) -> None:
    _, summary = run("bench.optimizer", "--parameters", "200000", "--rounds", "2", "--directory", directory)
    assert all(len(summary[name]["seconds"]) == 2 for name in ("NVMe", "AdamW", "optimized", "naive"))  # type: ignore[arg-type]
    assert summary["optimized"]["of_ceiling"] > 0


@pytest.mark.nightly
def test_notes_survive_when_results_are_written_again(tmp_path: Path) -> None:
    def run_all() -> str:
        command = [sys.executable, "-m", "scripts.bench.all", "optimizer", "--smoke", "--results", str(tmp_path)]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
        [path] = tmp_path.iterdir()
        assert path.name.startswith("optimizer_")
        return path.read_text()

    first = run_all()
    assert "python -m scripts.bench.optimizer" in first
    assert "of ceiling" in first
    [path] = tmp_path.iterdir()
    path.write_text(first + "The drive was shared.\n")
    assert run_all().endswith("## Notes\nThe drive was shared.\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(
            ("step", *TINY, "--contestants", "zero"),
            1,
            "pip install deepspeed",
            marks=(pytest.mark.nightly, pytest.mark.skipif(HAS_DEEPSPEED, reason="DeepSpeed is installed")),
        ),
        pytest.param(
            ("gpu",),
            1,
            "PyTorch finds no CUDA device",
            marks=(pytest.mark.nightly, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
        ),
        (("all", "optimiser"), 2, "unknown: optimiser; there are io, adamw, optimizer"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[str, ...], code: int, words: str) -> None:
    command = [sys.executable, "-m", f"scripts.bench.{arguments[0]}", *arguments[1:]]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == code
    assert words in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.nightly
def test_what_a_run_predicts_next_to_what_its_steps_take(directory: str) -> None:
    tiny = ("--cases", "tiny:16", "--rounds", "1", "--steps", "5", "--directory", directory)
    output, summary = run("bench.predictions", *tiny)
    [found] = summary["runs"]
    assert len(found["step_seconds"]) == 5  # type: ignore[arg-type, index]
    assert found["seconds"] in found["step_seconds"][2:-1] or found["seconds"] > 0  # type: ignore[index, operator]
    assert "before step 1, the largest error" in output and "after step 1, the largest error" in output


@pytest.mark.nightly
def test_the_curve_of_8_bit_moments_begins_as_that_of_adamw(directory: str) -> None:
    output, _ = run("bench.curves", "--steps", "3", "--optimizers", "adamw_8bit", "--directory", directory)
    assert "adamw_8bit from AdamW: +0.0" in output and output.count("met") == 1
