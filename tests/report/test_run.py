"""The words of a run: what a person reads before the first step, after each step, and after the last."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.hardware.load import OtherLoad
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.analytic import spec_from_shape
from ratel_cli.planning.profile.placement import ActivationPolicy, Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.planning.time.wear import WearTrade
from ratel_cli.report.words.plan import split_words, wear_rows
from ratel_cli.report.words.run import (
    StoreDrives,
    adapted_line,
    evaluation_line,
    opening,
    plan_line,
    run_summary,
    saved_line,
    snapshot_line,
    step_line,
)
from ratel_cli.schedule.rules import rules_of
from ratel_cli.sizes import Filling
from ratel_cli.training.facts import RunFacts
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.units import GIB, MIB, format_bytes, format_seconds, format_traffic
from tests.planning.profiles import estimated
from tests.planning.shapes import gpt, machine

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
    num_alloc_retries=None,
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
    loss_share: float | None = None,
    num_steps: int = 10,
    first_step: int = 0,
    taken_bytes: int = 0,
    endurance_tb: float | None = None,
) -> dict[str, str]:
    rows = opening(
        spec,
        made,
        hardware or machine(),
        RunFacts(
            num_steps=num_steps,
            first_step=first_step,
            num_samples=samples,
            num_tokens=12345,
            software="ratel 1",
            started="2026-11-30 12:00:00",
            pid=1,
        ),
        StoreDrives(
            engine="threads", paths=[Path("/a"), Path("/b")], taken_bytes=taken_bytes, endurance_tb=endurance_tb
        ),
        dtype="bfloat16",
        loss_share=loss_share,
        split=split_words(made.workload, is_planned=False),
        output_dir=Path("out"),
    )
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_steps_of_samples_that_are_not_packed() -> None:
    """What a step of the data has stands beside what a full one may have."""
    made = plan()
    workload = made.workload
    assert "average" not in facts(made)["step"]
    short = replace(made, workload=replace(workload, filling=Filling(micro_batches=1.0, computed=0.25, tokens=0.125)))
    found = facts(short)
    assert (
        f"at most {workload.micro_batch_size} x {workload.sequence_len} = {workload.tokens} tokens; " in found["step"]
    )
    average = f"{workload.tokens // 8} on average in this data, {workload.tokens // 4} with padding"
    assert average in found["step"] and "padding" not in found


def test_the_opening_statement() -> None:
    made = plan()
    found = facts(made)
    assert list(found) == ["model", "data", "step", "compute", "memory", "NVMe", "predicted", "output"]
    assert found["model"] == (
        "gpt (GPT): 77.6M parameters in 8 blocks; computes in bfloat16, master weights and moments in fp32"
    )
    assert found["data"] == "12 samples, 12.3K tokens"
    assert found["step"] == "3 micro-batches of 2 x 64 = 384 tokens; steps 1 to 10"
    assert found["compute"] == "a device, 1.00 TFLOP/s; one block at a time"
    assert found["memory"] == (
        f"{format_bytes(made.memory.total)} of 1.00 GiB RAM; all weights, optimizer states (4 of 8 blocks) resident"
    )
    assert found["NVMe"] == "1.73 GiB of 1.00 TiB in /a, /b; threads, 2.00 GB/s read, 1.00 GB/s written"
    seconds, written = made.time.total, format_traffic(made.traffic.written_bytes * 10)
    assert made.time.bottleneck == "nvme write"
    assert found["predicted"] == (
        f"{format_seconds(seconds)} per step, mostly NVMe write; {format_seconds(10 * seconds)} and {written} "
        "written for 10 steps; estimated from shapes until step 1 is recorded"
    )
    assert found["output"] == "out"


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adamw", "moments in fp32"), ("adamw_8bit", "by AdamW and 8-bit AdamW")]
)
def test_weights_without_a_master_are_said_to_have_none(optimizer: str, moments: str) -> None:
    rules = rules_of(optimizer, bf16_master="stochastic")
    spec = spec_from_shape(name="gpt", num_layers=6, hidden_size=1024, vocab_size=1000, rules=rules)
    found = facts(plan(), spec=spec)["model"]
    assert found.endswith(f"computes in bfloat16, without fp32 master weights (stochastic rounding), {moments}")


def test_the_opening_statement_has_a_row_for_gpu_memory() -> None:
    made = plan(device_limit_bytes=8 * GIB)
    assert facts(made)["GPU memory"] == f"{format_bytes(made.memory.device)} of 8.00 GiB"
    assert "GPU memory" not in facts(made, hardware=machine(num_cores=2))


def test_the_tokens_that_carry_loss() -> None:
    assert facts(plan(), loss_share=0.2468)["data"] == "12 samples, 12.3K tokens, 25 % of them with loss"
    assert facts(plan(), loss_share=1.0)["data"] == "12 samples, 12.3K tokens, 100 % of them with loss"


def test_one_sample_and_one_micro_batch_are_singular() -> None:
    found = facts(plan(num_micro_batches=1), samples=1)
    assert found["data"] == "1 sample, 12.3K tokens"
    assert found["step"] == "1 micro-batch of 2 x 64 = 128 tokens; steps 1 to 10"


def test_a_resumed_run_reports_the_remaining_steps() -> None:
    made = plan()
    found = facts(made, first_step=6)
    assert found["step"].endswith("steps 7 to 10")
    assert found["predicted"].endswith("; estimated from shapes until step 7 is recorded")
    assert facts(made, first_step=9)["step"].endswith("; step 10")
    assert f"{format_traffic(made.traffic.written_bytes * 4)} written for 4 steps" in found["predicted"]


def test_a_run_without_remaining_steps_says_so() -> None:
    found = facts(plan(), first_step=10)
    assert found["step"].endswith("all 10 steps are done")
    assert found["predicted"] == f"{format_seconds(plan().time.total)} per step, mostly NVMe write"


def test_held_gradients_are_reported_with_their_place() -> None:
    roomy = plan(holds_gradients=True)
    assert facts(roomy)["memory"].endswith("; 147 MiB of gradients held for clipping")
    tight = plan(holds_gradients=True, limit_bytes=500 * MIB)
    assert tight.spilled_bytes
    assert facts(tight)["memory"] == (
        f"{format_bytes(tight.memory.total)} of 500 MiB RAM; {format_bytes(tight.memory.held_gradients)} of gradients "
        f"and {format_bytes(tight.spilled_bytes)} more on NVMe held for clipping"
    )
    in_place = plan(holds_gradients=True, num_slots=1)
    assert facts(in_place)["memory"].endswith("; 147 MiB of gradients held until the step is complete")


def test_the_share_of_the_drives_life_is_reported_if_their_endurance_is_known() -> None:
    made = plan()
    written_tb = made.traffic.written_bytes * 10 / 1e12
    words = "12 % of the drives' rated endurance; estimated from shapes"
    assert words in facts(made, endurance_tb=written_tb / 0.12)["predicted"]
    assert "endurance" not in facts(made)["predicted"]


def trade(
    *, seconds: tuple[float, float, float], written: tuple[int, int, int], state_written_bytes: int = GIB
) -> list[tuple[str, str]]:
    """The rows for a plan with `save`, one that was chosen, and one with `ignore`."""
    made = replace(
        plan(),
        wear=WearTrade(
            policy="balanced",
            state_written_bytes=state_written_bytes,
            save_seconds=seconds[0],
            seconds=seconds[1],
            ignore_seconds=seconds[2],
            save_written_bytes=written[0],
            written_bytes=written[1],
            ignore_written_bytes=written[2],
        ),
    )
    assert facts(made).get("wear") == dict(wear_rows(made)).get("wear")
    return wear_rows(made)


def test_what_is_written_to_save_time_has_a_row() -> None:
    more = GIB + 19 * GIB // 100
    assert wear_rows(plan()) == []
    assert "wear" not in facts(plan())
    assert trade(seconds=(105.0, 105.0, 100.0), written=(GIB, GIB, more)) == [
        (
            "wear",
            (
                "nothing is written but the model's state; "
                "storage.wear: ignore would write 19 % more per step, and be 5 % faster"
            ),
        )
    ]
    assert trade(seconds=(105.0, 100.0, 100.0), written=(GIB, more, more)) == [
        ("wear", "writes 19 % more per step than with storage.wear: save, and is 5 % faster")
    ]
    assert trade(seconds=(100.0, 100.0, 100.0), written=(GIB, GIB, more)) == []
    words = (
        "writes 19 % more per step than with storage.wear: save, and is 7.8 % faster; "
        "storage.wear: ignore would write 68 % more per step, and be 2 % faster"
    )
    assert trade(seconds=(110.0, 102.0, 100.0), written=(GIB, more, 2 * GIB)) == [("wear", words)]
    words = "writes 2.50 GiB more per step than with storage.wear: save, and is 5 % faster"
    written = (GIB, 7 * GIB // 2, 7 * GIB // 2)
    assert trade(seconds=(105.0, 100.0, 100.0), written=written) == [("wear", words)], "more than twice the state"


def test_what_must_be_written_is_said_to_be_forced() -> None:
    forced = GIB + 64 * MIB
    words = "64.0 MiB of activations and gradients are written because RAM is too small"
    assert trade(seconds=(2.0, 2.0, 2.0), written=(forced, forced, forced)) == [("wear", words)]
    assert trade(seconds=(3.0, 2.0, 2.0), written=(forced, 2 * forced, 2 * forced)) == [
        ("wear", f"{words}; writes 100 % more per step than with storage.wear: save, and is 50 % faster")
    ]


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
    assert plan_line(inputs, step=3) == (
        "plan updated from step 3: only the inputs of layers offloaded (4.50 MiB), 40.5 MiB recomputed; "
        f"{format_seconds(inputs.time.total)} per step, mostly NVMe write"
    )
    everything = plan(activations="swap_all", limit_bytes=8 * GIB)
    assert plan_line(everything, step=3) == (
        "plan updated from step 3: 4 operators offloaded (45.0 MiB), none recomputed; "
        f"{format_seconds(everything.time.total)} per step, mostly NVMe write"
    )
    tight = plan(activations="swap_all", limit_bytes=480 * MIB)
    words = (
        f"4 operators offloaded (45.0 MiB, {format_bytes(tight.offloaded.written_bytes)} on NVMe), none recomputed; "
    )
    assert tight.offloaded.written_bytes and words in plan_line(tight, step=3)
    on_gpu = replace(everything, offloaded=replace(everything.offloaded, gpu_bytes=15 * MIB))
    assert "(45.0 MiB, 15.0 MiB stay on the GPU), none recomputed; " in plan_line(on_gpu, step=3)


def test_steps_that_took_other_than_predicted_are_reported_with_what_follows() -> None:
    made = plan(activations="recompute")
    kept, changed = (
        adapted_line(made, step=9, num_steps=3, is_changed=is_changed, seconds=11.9, predicted_seconds=15.9)
        for is_changed in (False, True)
    )
    time = f"{format_seconds(made.time.total)} per step, mostly NVMe write"
    assert kept == (f"steps take 11.9 s instead of 15.9 s; the plan is kept; new estimate: {time}")
    assert changed == (
        "steps take 11.9 s instead of 15.9 s; new plan from the 3 steps up to 9: "
        f"only the inputs of layers offloaded (4.50 MiB), 40.5 MiB recomputed; {time}"
    )


def test_other_work_that_made_steps_slow_is_named() -> None:
    load = OtherLoad(cores=1.25, num_cores=2)
    line = adapted_line(
        plan(activations="recompute"),
        step=9,
        num_steps=3,
        is_changed=False,
        seconds=7.16,
        predicted_seconds=2.5,
        other_load=load,
    )
    assert line.startswith("steps take 7.16 s instead of 2.50 s (other processes use 1.2 of 2 cores); ")


def test_a_step_line_has_as_much_as_fits() -> None:
    """The same step in lines that are ever narrower: the most important parts stay, in their order."""
    assert {width: step_line(METRICS, 20, width=width) for width in (100, 97, 83, 71, 60, 43, 24, 0)} == {
        100: "step 3/20  loss 2.3457  lr 1.50e-05  norm 0.988  250 tokens/s  4.00 s  stalled 3 % on NVMe read",
        97: "step 3/20  loss 2.3457  lr 1.50e-05  norm 0.988  250 tokens/s  4.00 s  stalled 3 % on NVMe read",
        83: "step 3/20  loss 2.3457  norm 0.988  250 tokens/s  4.00 s  stalled 3 % on NVMe read",
        71: "step 3/20  loss 2.3457  250 tokens/s  4.00 s  stalled 3 % on NVMe read",
        60: "step 3/20  loss 2.3457  250 tokens/s  stall read 3 %",
        43: "step 3/20  loss 2.3457  250 tokens/s",
        24: "step 3/20  loss 2.3457",
        0: "step 3/20",
    }


@pytest.mark.parametrize(
    ("step", "num_steps", "steps_per_epoch", "words"),
    [
        (1, 20, 8, "epoch 1/3"),
        (8, 20, 8, "epoch 1/3"),
        (9, 20, 8, "epoch 2/3"),
        (20, 20, 8, "epoch 3/3"),
        (3, 8, 8, ""),
        (3, 8, None, ""),
    ],
)
def test_a_run_of_several_epochs_says_which_one_it_is_in(
    step: int, num_steps: int, steps_per_epoch: int | None, words: str
) -> None:
    line = step_line(replace(METRICS, step=step), num_steps, steps_per_epoch=steps_per_epoch)
    assert line.startswith("  ".join(filter(None, [f"step {step}/{num_steps}", words, "loss 2.3457  lr "])))
    narrow = step_line(replace(METRICS, step=step), num_steps, steps_per_epoch=steps_per_epoch, width=60)
    assert "epoch" not in narrow and "tokens/s" in narrow, "what has always been there comes first"


@given(
    step=st.integers(1, 10**9),
    loss=st.floats(0, 1e6),
    rate=st.floats(0, 1e9),
    width=st.integers(20, 200),
    seconds=st.floats(1e-3, 1e6),
    stalled=st.floats(0, 1),
)
def test_no_step_line_is_wider_than_it_may_be(
    step: int, loss: float, rate: float, width: int, seconds: float, stalled: float
) -> None:
    metrics = replace(
        METRICS,
        step=step,
        loss=loss,
        tokens_per_second=rate,
        step_seconds=seconds,
        waited_seconds=IDLE | {"optimizer": stalled * seconds},
        clipped=True,
    )
    assert len(step_line(metrics, 10**9, width=width)) <= max(width, len(f"step {step}/{10**9}"))


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
    metrics = replace(METRICS, waited_seconds=IDLE | {"up": seconds})
    assert step_line(metrics, 20, width=120).endswith(f"  4.00 s  {words}")


def test_the_parts_of_a_line_do_not_depend_on_what_stalled() -> None:
    causes = {"no stall": IDLE, "stall upload 10 %": IDLE | {"up": 0.4}, "stall write 1 %": IDLE | {"nvme write": 0.04}}
    for words, waited in causes.items():
        metrics = replace(METRICS, step=42, waited_seconds=waited)
        line = step_line(metrics, 60, width=60)
        assert line == f"step 42/60  loss 2.3457  250 tokens/s  {words}"
        fast = replace(metrics, tokens_per_second=8.0, step_seconds=4.0)
        of_log = [step_line(each, 60) for each in (metrics, replace(fast, clipped=True))]
        start = "step 42/60  loss 2.3457  lr 1.50e-05  norm 0.988"
        assert of_log == [f"{start}  250 tokens/s  4.00 s  {words}", f"{start} clipped  8 tokens/s  4.00 s  {words}"]


def test_no_step_is_busier_than_the_clock() -> None:
    """A transfer that began during the previous step counts here completely."""
    metrics = replace(METRICS, bottleneck="nvme read", busy_seconds=IDLE | {"nvme read": 4.2}, waited_seconds=IDLE)
    assert step_line(metrics, 20, width=120).endswith("no stall, NVMe read busy 100 %")
    assert step_line(metrics, 20).endswith("  no stall")


def test_the_step_line_reports_skipped_and_clipped_steps() -> None:
    skipped = replace(METRICS, applied=False, grad_norm=math.inf)
    assert "  norm inf  " in step_line(skipped, 20, width=140)
    assert step_line(skipped, 20, width=60) == "step 3/20  loss 2.3457  skipped: gradients overflowed"
    assert step_line(skipped, 20).endswith("  skipped: gradients overflowed")
    assert "  norm 0.988 clipped  " in step_line(replace(METRICS, clipped=True), 20, width=140)


def test_the_step_line_of_answers_that_are_compared_has_their_margin() -> None:
    compared = replace(METRICS, preferences={"rewards/margins": 0.25, "rewards/accuracies": 1.0})
    assert step_line(compared, 20).startswith("step 3/20  loss 2.3457  lr 1.50e-05  margin 0.2500  ")
    assert "margin nan" in step_line(replace(METRICS, preferences={}), 20), "of a step with good answers alone"


def test_the_lines_about_what_happens_between_steps_fit() -> None:
    lines = [
        evaluation_line(10**6, 123.45678),
        evaluation_line(7, 0.61, preferences={"rewards/margins": 0.125, "rewards/accuracies": 0.75}),
        evaluation_line(7, 0.61, preferences={"rewards/margins": -0.5}),
        saved_line(10**6, ()),
        saved_line(300, (100,)),
        saved_line(300, (100, 200)),
        snapshot_line(10**6),
    ]
    assert lines == [
        "eval loss 123.4568 after step 1000000",
        "eval loss 0.6100, accuracy 75.00 % after step 7",
        "eval loss 0.6100, margin -0.5000 after step 7",
        "saved step 1000000",
        "saved step 300 in place of step 100",
        "saved step 300 in place of step 100, 200",
        "copied step 1000000 to the snapshot",
    ]
    assert max(map(len, lines)) <= 60


def summary(*steps: StepMetrics, endurance_tb: float | None = None) -> list[str]:
    totals = RunTotals()
    for metrics in steps:
        totals.add(metrics)
    return [f"{name}: {fact}" for name, fact in run_summary(totals, endurance_tb=endurance_tb)]


def test_the_summary_of_a_run() -> None:
    warming_up = replace(METRICS, step_seconds=100.0, tokens=1, waited_seconds=IDLE | {"compute": 96.0})
    assert summary(warming_up, METRICS, METRICS) == [
        "mean of: 2 steps, without the first, which includes start-up",
        "step:  4.00 s  100 %  250 tokens/s",
        "compute:  3.84 s   96 %",
        "NVMe read:  2.00 s   50 %  14.0 GB at 7.00 GB/s while busy",
        "NVMe write:  1.50 s   38 %  12.0 GB at 8.00 GB/s while busy",
        "optimizer: 62.5 ms    2 %",
        "stalled:  0.16 s    4 %  on NVMe read 3 %, optimizer 1 %",
    ]


def test_the_summary_of_a_single_step() -> None:
    rows = summary(replace(METRICS, waited_seconds=IDLE))
    assert rows[0] == "mean of: 1 step, which includes start-up"
    assert rows[-1] == "stalled: 0.00 ms    0 %"


def test_the_summary_of_a_run_without_nvme_traffic_has_no_rates() -> None:
    rows = summary(replace(METRICS, nvme_read_bytes=0, nvme_written_bytes=0, busy_seconds=IDLE | {"compute": 4.0}))
    assert [row.split(":")[0] for row in rows] == ["mean of", "step", "compute", "stalled"]
    assert not any("GB" in row for row in rows)


def test_the_summary_counts_what_all_steps_wrote_against_the_drives_endurance() -> None:
    assert summary(METRICS, METRICS, METRICS, endurance_tb=1.2)[-1] == (
        "wear: 36.0 GB written by all steps, 3 % of the drives' rated endurance"
    )


def test_the_rank_that_the_others_waited_for() -> None:
    """The one that they waited for most often; why, as often as not; in the line of a step if they are waiting now."""
    of = [(1, "nvme read"), (1, "compute"), (0, "up"), (0, "compute"), (1, "nvme read")]
    steps = [replace(METRICS, slowest_rank=rank, slowest_bottleneck=cause) for rank, cause in of]
    assert summary(METRICS, *steps)[-1] == "slowest: rank 1 in 3 of 5 steps; NVMe read was busy longest there"
    waiting = IDLE | {"network": 2.0}
    line = step_line(replace(steps[0], waited_seconds=waiting), 20, width=200)
    assert line.endswith("stalled 50 % on network, for rank 1")
    line = step_line(replace(steps[2], waited_seconds=waiting), 20, width=200)
    assert line.endswith("stalled 50 % on network, for rank 0")


def test_a_run_without_steps_has_no_summary() -> None:
    assert summary() == []
