"""A plan's figures: what is read back is what was written, and a new figure is one field."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from ratel_cli.json_fields import read_as
from ratel_cli.planning.search.recorded_plan import RecordedPlan, figure, plan_json
from tests.report.test_run import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WithFigure(RecordedPlan):
    """A recorded plan with a figure more."""

    largest_bytes: int | None = figure(
        "activations.largest_unit_bytes",
        lambda made: made.offloaded.largest_unit.num_bytes,
        row="largest",
        words=lambda size: f"{size} bytes at once",
        default=None,
    )


@pytest.mark.parametrize("holds_gradients", [True, False])
def test_what_is_read_is_what_was_written(holds_gradients: bool) -> None:
    made = plan(holds_gradients=holds_gradients)
    assert read_as(RecordedPlan, json.loads(json.dumps(plan_json(made)))) == RecordedPlan.of(made)


def test_a_new_figure_is_written_read_and_shown() -> None:
    """Files of before have no such key, and the report no such row then."""
    made = plan()
    largest_bytes, content = made.offloaded.largest_unit.num_bytes, json.loads(json.dumps(plan_json(made)))
    recorded = WithFigure.of(made)
    assert recorded.section("activations")["largest_unit_bytes"] == largest_bytes > 0
    before = read_as(WithFigure, content)
    assert before.largest_bytes is None
    assert before.rows == [("costs", "estimated from shapes")]
    content["activations"]["largest_unit_bytes"] = largest_bytes
    found = read_as(WithFigure, content)
    assert found == recorded
    assert found.rows == [*before.rows, ("largest", f"{largest_bytes} bytes at once")]


@pytest.mark.parametrize("stage", ["forward", "backward", "update"])
def test_a_plan_without_a_resource_is_none(stage: str) -> None:
    content = json.loads(json.dumps(plan_json(plan())))
    del content["time"][stage]["nvme"]
    with pytest.raises(ValueError, match="a resource is missing"):
        read_as(RecordedPlan, content)
    del content["time"][stage]
    with pytest.raises(ValueError, match=f"{stage} is missing"):
        read_as(RecordedPlan, content)
