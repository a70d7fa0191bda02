"""The words of a run: what a person reads before the first step, after each step, and after the last."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.placement import ActivationPolicy, Workload
from ratel_cli.planning.plan import Plan, make_plan
from ratel_cli.planning.problem import Decisions, Problem
from ratel_cli.planning.step_time import RESOURCES, Resource
from ratel_cli.report.run import opening, plan_line, run_summary, step_line
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.units import GIB, MIB, format_bytes, format_seconds
from tests.planning.profiles import estimated
from tests.planning.shapes import BFLOAT16, gpt, machine

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=1000)
IDLE: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
METRICS = StepMetrics(
    step=3,
    loss=2.34567,
    learning_rate=1.5e-5,
    grad_norm=0.98765,
    tokens=1000,
    step_seconds=4.0,
    forward_seconds=1.0,
    backward_seconds=3.0,
    tokens_per_second=250.4,
    tflops_model=0.1,
    tflops_hardware=0.2,
    nvme_read_bytes=14 * 10**9,
    nvme_written_bytes=12 * 10**9,
    swapped_bytes=3 * 10**9,
    gpu_peak_bytes=0,
    host_peak_bytes=1000,
    bottleneck="compute",
    busy_seconds=IDLE | {"compute": 3.84, "nvme read": 2.0, "nvme write": 1.5, "optimizer": 0.0625},
    waited_seconds=IDLE | {"nvme read": 0.12, "optimizer": 0.04},
    predicted_seconds=3.0,
    applied=True,
    clipped=False,
    eval_loss=None,
)


def plan(
    *,
    device_limit_bytes: int | None = None,
    holds_gradients: bool = False,
    num_slots: int = 2,
    num_micro_batches: int = 3,
    limit_bytes: int = GIB,
    activations: ActivationPolicy = "auto",
) -> Plan:
    workload = Workload(micro_batch_size=2, num_micro_batches=num_micro_batches, sequence_len=64)
    return make_plan(
        Problem(
            spec=SPEC,
            state=BFLOAT16,
            workload=workload,
            profile=estimated(SPEC, workload),
            hardware=machine(),
            decisions=Decisions(
                holds_gradients=holds_gradients,
                num_slots=num_slots,
                host_limit_bytes=limit_bytes,
                activations=activations,
                device_limit_bytes=device_limit_bytes,
            ),
            process_bytes=200 * MIB,
        )
    )


def facts(
    made: Plan,
    *,
    spec: ModelSpec = SPEC,
    hardware: HardwareProfile | None = None,
    samples: int = 12,
    num_steps: int = 10,
    first_step: int = 0,
    taken_bytes: int = 0,
) -> dict[str, str]:
    rows = opening(
        spec,
        made,
        hardware or machine(),
        dtype="bfloat16",
        samples=samples,
        data_tokens=12345,
        num_steps=num_steps,
        first_step=first_step,
        engine="threads",
        paths=[Path("/a"), Path("/b")],
        output_dir=Path("out"),
        taken_bytes=taken_bytes,
    )
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_the_opening_statement() -> None:
    made = plan()
    found = facts(made)
    assert list(found) == ["model", "data", "step", "compute", "memory", "NVMe", "predicted", "output"]
    assert found["model"] == (
        "gpt (GPT): 77.6M parameters in 8 blocks; computes in bfloat16, master weights and moments in fp32"
    )
    assert found["data"] == "12 samples, 12.3K tokens"
    assert found["step"] == "3 micro-batches of 2 x 64 = 384 tokens; steps 1 to 10"
    assert found["compute"] == "a device, 1 TFLOP/s; one block at a time"
    assert found["memory"] == (
        f"{format_bytes(made.memory.total)} of 1.00 GiB RAM; all weights, optimizer states (4 of 8 blocks) resident"
    )
    assert found["NVMe"] == "1.73 GiB of 1.00 TiB in /a, /b; threads, 2 GB/s read, 1 GB/s written"
    seconds, written = made.time.total, made.traffic.written_bytes * 10 / 1e12
    assert made.time.bottleneck == "nvme write"
    assert found["predicted"] == (
        f"{format_seconds(seconds)} per step, mostly NVMe write; {format_seconds(10 * seconds)} and {written:.3g} TB "
        "written for 10 steps; estimated from shapes until step 1 is recorded"
    )
    assert found["output"] == "out"


def test_the_opening_statement_has_a_row_for_gpu_memory() -> None:
    made = plan(device_limit_bytes=8 * GIB)
    assert facts(made)["GPU memory"] == f"{format_bytes(made.memory.device)} of 8.00 GiB"
    assert "GPU memory" not in facts(made, hardware=machine(num_cores=2))


def test_one_sample_and_one_micro_batch_are_singular() -> None:
    found = facts(plan(num_micro_batches=1), samples=1)
    assert found["data"] == "1 sample, 12.3K tokens"
    assert found["step"] == "1 micro-batch of 2 x 64 = 128 tokens; steps 1 to 10"


def test_a_resumed_run_reports_the_remaining_steps() -> None:
    made = plan()
    found = facts(made, first_step=6)
    assert found["step"].endswith("steps 7 to 10")
    assert f"{made.traffic.written_bytes * 4 / 1e12:.3g} TB written for 4 steps" in found["predicted"]


def test_a_run_without_remaining_steps_says_so() -> None:
    found = facts(plan(), first_step=10)
    assert found["step"].endswith("all 10 steps are done")
    assert "0 TB written for 0 steps" in found["predicted"]


def test_held_gradients_are_reported_with_their_place() -> None:
    roomy = plan(holds_gradients=True)
    assert facts(roomy)["memory"].endswith("; 148 MiB of gradients held for clipping")
    tight = plan(holds_gradients=True, limit_bytes=500 * MIB)
    assert tight.spilled_bytes
    assert facts(tight)["memory"] == (
        f"{format_bytes(tight.memory.total)} of 500 MiB RAM; {format_bytes(tight.memory.held_gradients)} of gradients "
        f"and {format_bytes(tight.spilled_bytes)} more on NVMe held for clipping"
    )
    in_place = plan(holds_gradients=True, num_slots=1)
    assert facts(in_place)["memory"].endswith("; 148 MiB of gradients held until the step is complete")


def test_everything_may_be_resident() -> None:
    made = plan(limit_bytes=8 * GIB)
    assert facts(made)["memory"].endswith(" of 8.00 GiB RAM; all weights and optimizer states resident")


@pytest.mark.parametrize(
    ("free", "taken", "words"),
    [
        (0, 0, "needs 1.73 GiB, 0 B available (short by 1.73 GiB, see storage.paths) in /a, /b; "),
        (GIB, 0, "needs 1.73 GiB, 1.00 GiB available (short by 751 MiB, see storage.paths) in /a, /b; "),
        (GIB, GIB, "1.73 GiB of 2.00 GiB in /a, /b; "),
    ],
)
def test_too_little_space_is_reported(free: int, taken: int, words: str) -> None:
    assert words in facts(plan(), hardware=machine(free_bytes=free), taken_bytes=taken)["NVMe"]


def test_a_new_plan_is_reported_with_what_it_offloads_and_where() -> None:
    inputs = plan(activations="recompute")
    assert plan_line(inputs) == (
        "plan updated from step 1: only the inputs of layers offloaded (4.50 MiB), 40.5 MiB recomputed; "
        f"{format_seconds(inputs.time.total)} per step, mostly NVMe write"
    )
    everything = plan(activations="swap_all", limit_bytes=8 * GIB)
    assert plan_line(everything) == (
        "plan updated from step 1: 4 operators offloaded (45.0 MiB), none recomputed; "
        f"{format_seconds(everything.time.total)} per step, mostly NVMe write"
    )
    tight = plan(activations="swap_all", limit_bytes=480 * MIB)
    words = (
        f"4 operators offloaded (45.0 MiB, {format_bytes(tight.offloaded.written_bytes)} on NVMe), none recomputed; "
    )
    assert tight.offloaded.written_bytes and words in plan_line(tight)
    on_gpu = replace(everything, offloaded=replace(everything.offloaded, gpu_bytes=15 * MIB))
    assert "(45.0 MiB, 15.0 MiB stay on the GPU), none recomputed; " in plan_line(on_gpu)


def test_the_step_line_ends_with_what_stalled_the_step() -> None:
    assert step_line(METRICS, 20) == (
        "step 3/20  loss 2.3457  lr 1.50e-05  norm 0.988  250 tokens/s  4.00 s  stalled 3 % on NVMe read"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "no stall, compute busy 96 %"),
        (0.039, "no stall, compute busy 96 %"),
        (0.04, "stalled 1 % on upload"),
        (4.0, "stalled 100 % on upload"),
    ],
)
def test_a_stall_below_one_percent_is_none(seconds: float, words: str) -> None:
    assert step_line(replace(METRICS, waited_seconds=IDLE | {"up": seconds}), 20).endswith(f"  4.00 s  {words}")


def test_no_step_is_busier_than_the_clock() -> None:
    """A transfer that began during the previous step counts here completely."""
    metrics = replace(METRICS, bottleneck="nvme read", busy_seconds=IDLE | {"nvme read": 4.2}, waited_seconds=IDLE)
    assert step_line(metrics, 20).endswith("no stall, NVMe read busy 100 %")


def test_the_step_line_reports_evaluations_and_skipped_steps() -> None:
    line = step_line(replace(METRICS, eval_loss=1.5, applied=False, grad_norm=math.inf), 20)
    assert "  norm inf  " in line
    assert "  eval loss 1.5000  skipped: gradients overflowed, loss scale halved  stalled 3 %" in line


def summary(*steps: StepMetrics) -> list[str]:
    totals = RunTotals()
    for metrics in steps:
        totals.add(metrics)
    return [f"{name}: {fact}" for name, fact in run_summary(totals)]


def test_the_summary_of_a_run() -> None:
    warming_up = replace(METRICS, step_seconds=100.0, tokens=1, waited_seconds=IDLE | {"compute": 96.0})
    assert summary(warming_up, METRICS, METRICS) == [
        "mean of: 2 steps, without the first (warm-up)",
        "step:  4.00 s  100 %  250 tokens/s",
        "compute:  3.84 s   96 %",
        "NVMe read:  2.00 s   50 %  14 GB at 7 GB/s while busy",
        "NVMe write:  1.50 s   38 %  12 GB at 8 GB/s while busy",
        "optimizer: 62.5 ms    2 %",
        "stalled:  0.16 s    4 %  on NVMe read 3 %, optimizer 1 %",
    ]


def test_the_summary_of_a_single_step() -> None:
    rows = summary(replace(METRICS, waited_seconds=IDLE))
    assert rows[0] == "mean of: 1 step, the warm-up"
    assert rows[-1] == "stalled: 0.00 ms    0 %"


def test_the_summary_of_a_run_without_nvme_traffic_has_no_rates() -> None:
    rows = summary(replace(METRICS, nvme_read_bytes=0, nvme_written_bytes=0, busy_seconds=IDLE | {"compute": 4.0}))
    assert [row.split(":")[0] for row in rows] == ["mean of", "step", "compute", "stalled"]
    assert not any("GB" in row for row in rows)


def test_a_run_without_steps_has_no_summary() -> None:
    assert summary() == []
