"""The times of a model that the planner takes from the spans of a recorded step."""

from __future__ import annotations

import pytest

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.telemetry import Span, SpanLabel
from ratel_cli.planning.placement import Stage
from ratel_cli.planning.problem import Decisions
from ratel_cli.planning.recorded import UnitRecord
from ratel_cli.planning.step_time import Resource
from ratel_cli.run.planner import Planner
from ratel_cli.units import GIB
from tests.planning.profiles import estimated
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine

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


@pytest.mark.parametrize(("num_cores", "optimizing", "left"), [(None, 99.0, 1.0), (4, 0.0, 1.0), (2, 18.7, 0.5)])
def test_the_slow_first_micro_batch_does_not_count(num_cores: int | None, optimizing: float, left: float) -> None:
    """On the CPU, the share of the optimizer's thread is subtracted from backward: at most a half."""
    planner = Planner(
        spec=SPEC,
        state=BFLOAT16,
        workload=WORKLOAD,
        decisions=Decisions(holds_gradients=False, num_slots=2, host_limit_bytes=GIB),
        hardware=machine(num_cores=num_cores),
        process_bytes=0,
    )
    updating = span("update", NUM_MICRO_BATCHES * optimizing, block=0, stage="update", resource="optimizer")
    found = planner.recorded(NothingRecorded(), [*spans(), updating], estimate=estimated(SPEC))
    [layer] = found.profiles
    assert found.layers == (0, 0)
    assert layer.forward_seconds == pytest.approx(2.0)
    assert layer.backward_seconds == pytest.approx(left * 6.9)
    assert found.head_seconds == pytest.approx(left * 4.9)
    assert found.embedding_seconds == pytest.approx(0.5)
