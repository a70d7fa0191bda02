"""The times of a model that the planner takes from the spans of a recorded step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.engine.measure.telemetry import Span, SpanLabel
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.recorded import UnitRecord
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.run.train.planner import Planner
from ratel_cli.schedule.uses import Stage
from ratel_cli.units import GIB
from tests.planning.profiles import estimated
from tests.planning.shapes import WORKLOAD, gpt, machine

SPEC = gpt(num_layers=2)
NUM_MICRO_BATCHES = WORKLOAD.num_micro_batches


class NothingRecorded(StepRecording):
    def __init__(self) -> None:
        super().__init__()
        self.num_micro_batches = NUM_MICRO_BATCHES

    def units(self) -> dict[tuple[int, int], UnitRecord]:
        nothing = UnitRecord(operators=(), saved=frozenset(), saved_bytes=0, replay_bytes=0, replay_held_bytes=0)
        return {(block, number): nothing for block in (1, 2) for number in range(NUM_MICRO_BATCHES)}


def span(label: str, seconds: float, *, block: int, stage: Stage, resource: Resource = "compute") -> Span:
    of = SpanLabel(text=label, block=block, stage=stage)
    start = 7.0 if stage == "forward" else 1007.0
    return Span(resource=resource, label=of, start=start, end=start + seconds)


def spans() -> list[Span]:
    """A step whose first micro-batch takes ten times longer than the others, in every block."""
    found = []
    for number in range(NUM_MICRO_BATCHES):
        times = 10 if number == 0 else 1
        for block in (1, 2):
            found += [
                span(f"forward of {block}", 2.0 * times, block=block, stage="forward"),
                span(f"backward of {block}", 6.0 * times, block=block, stage="backward"),
            ]
        found.append(span("backward of head", 4.0 * times, block=3, stage="backward"))
    found.append(span("forward of embedding", 0.5 * NUM_MICRO_BATCHES, block=0, stage="forward"))
    return [*found, *(span("gradient", 0.9 * NUM_MICRO_BATCHES, block=block, stage="backward") for block in (1, 2, 3))]


BACKWARD_SECONDS = NUM_MICRO_BATCHES * (2 * 6.9 + 4.9)
"""Of the step that `spans` gives: two layers and the head."""


def updating_in(seconds: float, num_cores: int | None) -> HardwareProfile:
    """A machine on which AdamW alone takes this time for the whole model."""
    return machine(num_cores=num_cores, adam_parameters_per_second=sum(SPEC.block_elements) / seconds)


@pytest.mark.parametrize(
    ("num_cores", "share", "alone", "beside", "left"),
    [
        (None, None, 99.0, 1.0, 1.0),  # a GPU computes
        (4, None, 99.0, 0.0, 1.0),  # nothing was next to it
        (4, None, 0.4, 1.0, 0.9),
        (4, None, 0.4, 0.5, 0.95),  # half of the updates were after backward
        (4, 1.0, 0.4, 1.0, 0.6),
        (2, None, 99.0, 1.0, 0.5),
    ],
)
def test_the_slow_first_micro_batch_does_not_count(
    num_cores: int | None, share: float | None, alone: float, beside: float, left: float
) -> None:
    """On the CPU, what AdamW takes of backward is subtracted from it: at most a half.

    `share`: as measured, of what AdamW takes `alone`, in shares of backward. `beside`: how much of it is next to it.
    """
    planner = Planner(
        spec=SPEC,
        workload=WORKLOAD,
        decisions=Decisions(holds_gradients=False, num_slots=2, host_limit_bytes=GIB),
        hardware=updating_in(alone * BACKWARD_SECONDS, num_cores),
        process_bytes=0,
    )
    during, after = span("update", 10.0, block=0, stage="backward", resource="optimizer"), 1e6
    updates = [
        during._replace(end=during.start + 10.0 * beside),
        during._replace(start=after, end=after + 10.0 * (1 - beside)),
    ]
    profile = replace(estimated(SPEC), adamw_share=share)
    found = planner.recorded(NothingRecorded(), [*spans(), *updates], estimate=profile)
    [layer] = found.profiles
    assert found.layers == (0, 0)
    assert layer.forward_seconds == pytest.approx(2.0)
    assert layer.backward_seconds == pytest.approx(left * 6.9)
    assert found.head_seconds == pytest.approx(left * 4.9)
    assert found.embedding_seconds == pytest.approx(0.5)
