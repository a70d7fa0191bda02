"""The log of steps: the content of a line, what a resumed run keeps of the file, and full disks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.planning.time.step_time import RESOURCES
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.training.metrics_log import MetricsLog, line_of, step_in
from ratel_cli.training.step_warnings import StepWarnings
from tests.model.tiny import file_size_limit

KEYS = [
    "step", "loss", "learning_rate", "grad_norm", "tokens", "step_seconds", "forward_seconds", "backward_seconds",
    "tokens_per_second", "tflops_model", "tflops_hardware", "swapped_bytes", "nvme_read_bytes", "nvme_written_bytes",
    "gpu_peak_bytes", "host_peak_bytes", "bottleneck", "predicted_seconds", "clipped",
]  # fmt: skip
"""The keys that the README promises."""


def test_figures_of_answers_that_are_compared_come_back() -> None:
    figures = {"rewards/chosen": 0.5, "rewards/margins": math.inf, "kl": 0.0}
    made = replace(metrics(3), preferences=figures, eval_preferences={"rewards/accuracies": 1.0})
    line = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert line["preferences"] == {"rewards/chosen": 0.5, "rewards/margins": None, "kl": 0.0}
    back = StepMetrics.from_json(line)
    assert back.preference("rewards/chosen") == 0.5 and math.isnan(back.preference("rewards/margins"))
    assert math.isnan(back.preference("rewards/rejected")) and math.isnan(metrics(3).preference("kl"))
    assert back.eval_preferences == {"rewards/accuracies": 1.0}
    assert "preferences" not in metrics(3).to_json() and StepMetrics.from_json(metrics(3).to_json()) == metrics(3)
    with pytest.raises(ValueError, match="object"):
        StepMetrics.from_json({**line, "preferences": [1]})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_evaluation_that_is_not_finite_is_not_one_that_was_never_made(value: float) -> None:
    evaluated = replace(metrics(3), eval_loss=value, eval_accuracy=value)
    line = json.loads(json.dumps(evaluated.to_json(), allow_nan=False))
    back = StepMetrics.from_json(line)
    assert back.eval_loss is not None and math.isnan(back.eval_loss)
    assert back.eval_accuracy is not None and math.isnan(back.eval_accuracy)
    assert back.shown_eval_loss is None and evaluated.shown_eval_loss is None
    del line["eval_loss"], line["eval_accuracy"]
    assert StepMetrics.from_json(line) == metrics(3)


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=1 / 3 + step,
        learning_rate=1e-5,
        grad_norm=0.5,
        tokens=100,
        step_seconds=2.0,
        forward_seconds=0.5,
        backward_seconds=1.5,
        tokens_per_second=50.0,
        tflops_model=0.3,
        tflops_hardware=0.4,
        swapped_bytes=1,
        nvme_read_bytes=14,
        nvme_written_bytes=12,
        gpu_peak_bytes=0,
        num_alloc_retries=None,
        host_peak_bytes=1000,
        bottleneck="nvme read",
        busy_seconds=dict.fromkeys(RESOURCES, 0.5) | {"nvme read": 1.0},
        waited_seconds=dict.fromkeys(RESOURCES, 0.0) | {"nvme read": 0.25, "optimizer": 0.125},
        predicted_seconds=1.75,
        applied=True,
        clipped=False,
        eval_loss=None,
    )


def test_memory_that_the_gpu_had_to_look_for_is_a_warning_once() -> None:
    warnings: list[str] = []
    found = StepWarnings(warnings.append)
    for step, number in ((1, None), (2, 0), (3, 2), (4, 2), (5, 7)):
        found.note(replace(metrics(step), num_alloc_retries=number))
    assert len(warnings) == 1
    assert warnings[0].startswith("step 3: GPU memory was full or fragmented, and the GPU paused 2 times")
    assert "limits.gpu_memory" in warnings[0]


def test_steps_without_a_gradient_are_a_warning_once() -> None:
    """A step here and there is none, nor one whose gradients overflowed."""
    warnings: list[str] = []
    found = StepWarnings(warnings.append)
    norms = [*([0.0] * 9 + [1e-30]) * 2, *[0.0, math.nan, math.inf] * 10, *[0.0] * 30]
    for step, norm in enumerate(norms, 1):
        found.note(replace(metrics(step), grad_norm=norm))
    assert [each.partition(", so")[0] for each in warnings] == ["step 60: the gradient norm was 0 in the last 10 steps"]


def test_the_retries_are_in_the_file_of_a_gpu_only() -> None:
    assert "num_alloc_retries" not in metrics(1).to_json()
    assert replace(metrics(1), num_alloc_retries=0).to_json()["num_alloc_retries"] == 0


def write(path: Path, *steps: int, committed_step: int = 0) -> list[str]:
    warnings: list[str] = []
    with MetricsLog(path, committed_step=committed_step, warn=warnings.append) as log:
        for step in steps:
            log.write(metrics(step))
    return warnings


def test_a_line_has_the_promised_keys_in_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    assert write(path, 1) == []
    (line,) = path.read_text().splitlines()
    found = json.loads(line)
    assert [key for key in found if key in KEYS] == KEYS
    assert found["loss"] == 1 / 3 + 1
    assert "eval_loss" not in found


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, committed_step=0, warn=pytest.fail) as log:
        log.write(replace(metrics(1), loss=math.nan, grad_norm=math.inf, applied=False, eval_loss=2.5))
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (found["loss"], found["grad_norm"], found["eval_loss"], found["applied"]) == (None, None, 2.5, False)


@pytest.mark.parametrize("committed_step", range(6))
@pytest.mark.parametrize("written", [0, 3, 5])
def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path, committed_step: int, written: int) -> None:
    """The log may have a step that the store lost, but the store never has a step that the log lost."""
    uninterrupted, resumed = tmp_path / "uninterrupted.jsonl", tmp_path / "resumed.jsonl"
    write(uninterrupted, *range(1, 8))
    write(resumed, *range(1, written + 1))
    write(resumed, *range(min(written, committed_step) + 1, 8), committed_step=committed_step)
    assert resumed.read_bytes() == uninterrupted.read_bytes()


@pytest.mark.parametrize("num_bytes", [0, 1, 200])
def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path, num_bytes: int) -> None:
    uninterrupted, torn = tmp_path / "uninterrupted.jsonl", tmp_path / "torn.jsonl"
    write(uninterrupted, 1, 2, 3)
    lines = uninterrupted.read_bytes().splitlines(keepends=True)
    torn.write_bytes(lines[0] + lines[1] + lines[2][:num_bytes])
    write(torn, 3, committed_step=2)
    assert torn.read_bytes() == uninterrupted.read_bytes()


@pytest.mark.parametrize(
    "noise",
    [b"\n", b"\x00\x00\n", b"\xff\xfe\n", b"[1]\n", b'{"step": "x"}\n', b"{}\n", b"7\n", b"[" * 100_000 + b"\n"],
)
def test_a_line_without_metrics_is_reported_and_stays_among_the_steps_that_are_done(
    tmp_path: Path, noise: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + noise + third)
    (warning,) = write(path, 4, committed_step=3)
    assert warning.startswith(f"{path}:2: 1 damaged line; the metrics of these steps are lost")
    assert path.read_bytes().startswith(first + noise + third) and len(path.read_bytes().splitlines()) == 4
    path.write_bytes(first + second + noise)
    assert write(path, committed_step=2) == []
    assert path.read_bytes() == first + second, "behind the last step that is done, as after a crash"
    path.write_bytes(first + second + noise)
    assert len(write(path, committed_step=3)) == 1
    assert path.read_bytes() == first + second + noise, "it was the line of a step that is done"


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    """Each byte of a line is changed in one of its bits: the step is what it was, or is none."""
    line = line_of(replace(metrics(2), eval_loss=1.25, eval_preferences={"rewards/margins": 0.5}))
    wanted, found = step_in(line), set[bool]()
    assert wanted is not None and wanted.eval_loss == 1.25
    for place in range(len(line) - 1):
        changed = bytearray(line)
        changed[place] ^= 1 << place % 8
        step = step_in(bytes(changed))
        assert step in (None, wanted), changed
        found.add(step is None)
    assert True in found


def test_lines_of_earlier_versions_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(metrics(step).to_json()) + "\n" for step in (1, 2)))
    before = path.read_bytes()
    assert write(path, 3, committed_step=2) == []
    assert path.read_bytes() == before + line_of(metrics(3))
    assert step_in(before.splitlines(keepends=True)[1]) == metrics(2)


def test_each_step_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, committed_step=0, warn=pytest.fail) as log:
        log.write(metrics(1))
        assert len(path.read_text().splitlines()) == 1
        log.write(metrics(2))
        assert len(path.read_text().splitlines()) == 2
    log.close()


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    warnings = write(path, 1, 2, 3)
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{path}: cannot be written (No space left on device)")


def test_a_disk_that_takes_half_a_line_keeps_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files makes the first write short and the next one fail."""
    whole, limited = tmp_path / "whole.jsonl", tmp_path / "limited.jsonl"
    write(whole, 1, 2)
    with file_size_limit(int(whole.stat().st_size * 0.75)):
        warnings = write(limited, 1, 2, 3)
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    assert limited.read_bytes() == whole.read_bytes().splitlines(keepends=True)[0]


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings = write(tmp_path / "file" / "run" / "metrics.jsonl", 1, 2)
    assert len(warnings) == 1
    assert "training continues without it" in warnings[0]


@pytest.mark.parametrize("final_seconds", [2.0, 1.23456789, 1 / 3])
def test_a_second_line_of_the_last_step_replaces_the_first(tmp_path: Path, final_seconds: float) -> None:
    """It may be shorter, longer or as long: the file never has a part of the earlier line."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, committed_step=0, warn=pytest.fail) as log:
        for step in (1, 2):
            for seconds in (1.234567, 1.5, final_seconds):
                log.write(replace(metrics(step), step_seconds=seconds))
                assert path.read_bytes().count(b"\n") == step
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["step_seconds"]) for line in lines] == [(1, final_seconds), (2, final_seconds)]


def test_an_evaluation_is_written_into_the_line_of_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, committed_step=0, warn=pytest.fail) as log:
        log.write(metrics(1))
        log.write(metrics(2))
        log.write(replace(metrics(2), eval_loss=1.25))
        log.write(metrics(3))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line.get("eval_loss")) for line in lines] == [(1, None), (2, 1.25), (3, None)]


@pytest.mark.parametrize(("committed_step", "steps"), [(1, [1]), (2, [1, 2])])
def test_a_step_counts_if_its_commit_succeeded(tmp_path: Path, committed_step: int, steps: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    assert write(path, committed_step=committed_step) == []
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps


def test_a_line_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    """Its step may be committed."""
    path = tmp_path / "metrics.jsonl"
    warnings: list[str] = []
    with MetricsLog(path, committed_step=0, warn=warnings.append) as log:
        log.write(metrics(1))
        log.write(metrics(2))
        before = path.read_bytes()
        with file_size_limit(len(before) + 5):
            log.write(replace(metrics(2), eval_loss=1.25))
            log.write(metrics(3))
    assert len(warnings) == 1
    assert path.read_bytes() == before


def total(*steps: StepMetrics) -> RunTotals:
    totals = RunTotals()
    for step in steps:
        totals.add(step)
    return totals


def test_the_totals_of_no_steps_are_zero() -> None:
    totals = total()
    assert (totals.num_steps, totals.seconds, totals.tokens, totals.leaves_out_first) == (0, 0.0, 0, False)


def test_a_single_step_counts() -> None:
    totals = total(metrics(1))
    assert (totals.num_steps, totals.seconds, totals.tokens, totals.leaves_out_first) == (1, 2.0, 100, False)
    assert totals.moved_bytes == {"nvme read": 14, "nvme write": 12}


@pytest.mark.parametrize("num_steps", [2, 3, 10])
def test_the_first_of_several_steps_is_left_out(num_steps: int) -> None:
    """In a resumed run, that is the first step after the resume."""
    first = replace(metrics(5), step_seconds=100.0, tokens=7, nvme_read_bytes=99)
    totals = total(first, *(metrics(6 + index) for index in range(num_steps - 1)))
    left = num_steps - 1
    assert totals.leaves_out_first
    assert (totals.num_steps, totals.seconds, totals.tokens) == (left, 2.0 * left, 100 * left)
    assert totals.moved_bytes == {"nvme read": 14 * left, "nvme write": 12 * left}
    assert totals.busy_seconds == {name: left * (1.0 if name == "nvme read" else 0.5) for name in RESOURCES}
    assert sum(totals.waited_seconds.values()) == 0.375 * left
