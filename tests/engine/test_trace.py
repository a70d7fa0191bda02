"""The trace: tracks in order, slices that do not overlap, arrows with two ends, and disks that are full."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from ratel_cli.engine.measure.telemetry import Span, SpanLabel
from ratel_cli.engine.measure.trace import TraceFile
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.schedule.uses import Stage
from tests.model.tiny import file_size_limit

Event = dict[str, object]


def span(
    resource: Resource, start: float, end: float, *, block: int = 0, stage: Stage = "forward", group: int = 0
) -> Span:
    label = SpanLabel(text=f"{stage} {block}.{group}", block=block, stage=stage, group=group)
    return Span(resource=resource, label=label, start=start, end=end)


def a_step(begin: float, *, num_blocks: int = 3, num_groups: int = 2) -> list[Span]:
    """A step as the engine runs it on the CPU: reads ahead, updates overlapped with backward and after its end."""
    spans: list[Span] = []
    clock = begin
    for stage, blocks in (("forward", range(num_blocks)), ("backward", reversed(range(num_blocks)))):
        for block in blocks:
            spans.append(span("nvme read", clock - 0.5, clock, block=block, stage=stage))
            spans.append(span("compute", clock, clock + 1, block=block, stage=stage))
            clock += 1
            for group in range(num_groups if stage == "backward" else 0):
                at = clock + group / num_groups
                for resource in ("nvme read", "optimizer", "nvme write"):
                    spans.append(span(resource, at, at + 0.5, block=block, stage="update", group=group))
                    at += 0.5
    return spans


def events_of(path: Path) -> list[Event]:
    """The events in the file. As in a viewer, the closing bracket may be missing."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else text + "]", parse_constant=pytest.fail)


def tracks_of(events: Sequence[Event]) -> dict[object, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def slices_of(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def around(events: Sequence[Event], arrow_end: Event) -> Event:
    (found,) = [
        each
        for each in slices_of(events)
        if each["tid"] == arrow_end["tid"] and each["ts"] <= arrow_end["ts"] < each["ts"] + each["dur"]
    ]
    return found


def arrows_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Every arrow as (from, to), in the order of the file. Checks that each arrow is valid."""
    tails = [event for event in events if event["ph"] == "s"]
    tips = [event for event in events if event["ph"] == "f"]
    assert [tail["id"] for tail in tails] == [tip["id"] for tip in tips] == list(range(1, len(tails) + 1))
    found = []
    for tail, tip in zip(tails, tips, strict=True):
        assert (tail["name"], tail["cat"], tip["bp"]) == (tip["name"], tip["cat"], "e")
        assert tail["ts"] <= tip["ts"]
        source, target = around(events, tail), around(events, tip)
        # Viewers read in order of time and, where that is equal, of the file: slices first.
        assert events.index(source) < events.index(tail)
        assert events.index(target) < events.index(tip)
        found.append((f"{source['cat']} {source['name']}", f"{target['cat']} {target['name']}"))
    return found


def check(events: Sequence[Event]) -> None:
    """What holds for every trace."""
    assert list(tracks_of(events).values()) == ["step", *RESOURCES]
    for track in tracks_of(events):
        drawn = sorted((each["ts"], each["dur"]) for each in slices_of(events) if each["tid"] == track)
        assert all(isinstance(start, int) and start >= 0 and length >= 1 for start, length in drawn)
        for (start, length), (following, _) in itertools.pairwise(drawn):
            assert start + length <= following
    arrows_of(events)


def draw(path: Path, *steps: Sequence[Span]) -> list[Event]:
    """Steps of ten seconds, one after another."""
    with TraceFile(path, warn=pytest.fail) as trace:
        for index, spans in enumerate(steps):
            trace.write_step(index + 1, spans, start=10.0 * index, end=10.0 * index + 10)
    events = events_of(path)
    check(events)
    return events


def test_the_tracks_are_named_and_ordered(tmp_path: Path) -> None:
    events = draw(tmp_path / "run" / "trace.json")
    assert [event["args"] for event in events if event["name"] == "process_name"] == [{"name": "ratel"}]
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert [tracks_of(events)[tid] for tid in sorted(order, key=lambda tid: order[tid])] == ["step", *RESOURCES]
    assert slices_of(events) == []


def test_a_slice_names_its_work(tmp_path: Path) -> None:
    events = draw(tmp_path / "trace.json", [span("optimizer", 1.5, 1.75, block=4, stage="update", group=2)])
    step, work = slices_of(events)
    assert (step["name"], step["ts"], step["dur"], step["args"]) == ("step 1", 0, 10_000_000, {"step": 1})
    assert (work["name"], work["ts"], work["dur"]) == ("update 4.2", 1_500_000, 250_000)
    assert work["args"] == {"block": 4, "stage": "update", "group": 2, "step": 1}
    assert tracks_of(events)[work["tid"]] == work["cat"] == "optimizer"


def test_the_trace_begins_with_the_first_span(tmp_path: Path) -> None:
    events = draw(tmp_path / "trace.json", [span("nvme read", -2.0, 1.0)])
    step, work = slices_of(events)
    assert (step["ts"], work["ts"]) == (2_000_000, 0)


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 5])
@pytest.mark.parametrize("num_groups", [0, 1, 3])
def test_arrows_show_what_waited_for_what(tmp_path: Path, num_blocks: int, num_groups: int) -> None:
    events = draw(tmp_path / "trace.json", a_step(0.5, num_blocks=num_blocks, num_groups=num_groups))
    expected = []
    for block in range(num_blocks):
        stages = [f"{stage} {block}.0" for stage in ("forward", "backward")]
        expected += [(f"nvme read {stage}", f"compute {stage}") for stage in stages]
        for group in range(num_groups):
            name = f"update {block}.{group}"
            expected += [(f"nvme read {name}", f"optimizer {name}"), (f"optimizer {name}", f"nvme write {name}")]
        if num_groups:
            expected.append((f"compute backward {block}.0", f"optimizer update {block}.0"))
    assert sorted(arrows_of(events)) == sorted(expected)


def test_arrows_over_the_link_to_a_gpu(tmp_path: Path) -> None:
    events = draw(
        tmp_path / "trace.json",
        [
            span("nvme read", 0, 1, stage="backward"),
            span("up", 1, 2, stage="backward"),
            span("compute", 2, 3, stage="backward"),
            span("down", 3, 4, stage="backward"),
            span("optimizer", 4, 5, stage="update"),
        ],
    )
    assert arrows_of(events) == [
        ("nvme read backward 0.0", "up backward 0.0"),
        ("up backward 0.0", "compute backward 0.0"),
        ("compute backward 0.0", "down backward 0.0"),
        ("down backward 0.0", "optimizer update 0.0"),
    ]


def test_activations_downloaded_in_forward_have_no_arrow(tmp_path: Path) -> None:
    assert arrows_of(draw(tmp_path / "trace.json", [span("compute", 0, 1), span("down", 1, 2)])) == []


def test_arrows_reach_from_step_to_step(tmp_path: Path) -> None:
    """The update of a step may be overlapped with the forward of the next."""
    events = draw(
        tmp_path / "trace.json",
        [span("compute", 8, 9, stage="backward"), span("nvme read", 9, 9.9, stage="update")],
        [span("optimizer", 9.95, 11, stage="update")],
        [span("nvme write", 19, 21, stage="update")],
    )
    assert arrows_of(events) == [
        ("compute backward 0.0", "optimizer update 0.0"),
        ("nvme read update 0.0", "optimizer update 0.0"),
        ("optimizer update 0.0", "nvme write update 0.0"),
    ]


def test_only_the_first_that_waited_has_an_arrow(tmp_path: Path) -> None:
    """The weights are read once for all micro-batches, and a gradient is complete once for all groups."""
    events = draw(
        tmp_path / "trace.json",
        [
            span("nvme read", 0, 1, stage="backward"),
            *(span("compute", at, at + 1, stage="backward") for at in (1, 2)),
            *(span("optimizer", 3 + group, 4 + group, stage="update", group=group) for group in range(3)),
        ],
    )
    assert arrows_of(events) == [
        ("nvme read backward 0.0", "compute backward 0.0"),
        ("compute backward 0.0", "optimizer update 0.0"),
    ]


def test_an_arrow_without_a_source_is_left_out(tmp_path: Path) -> None:
    events = draw(
        tmp_path / "trace.json",
        [
            span("nvme read", 0, 1, block=1),
            span("compute", 1, 2, block=2),
            span("compute", 2, 3, block=1, stage="backward"),
            span("nvme write", 3, 4, block=1, stage="backward"),
            span("up", 4, 5, block=3),
            span("down", 5, 6, block=1),
        ],
    )
    assert arrows_of(events) == []
    assert len(slices_of(events)) == 7


def test_work_that_begins_before_its_weights_are_read_has_an_arrow(tmp_path: Path) -> None:
    events = draw(tmp_path / "trace.json", [span("nvme read", 0, 3), span("compute", 1, 4)])
    assert len(arrows_of(events)) == 1


def test_an_arrow_into_the_past_is_left_out(tmp_path: Path) -> None:
    """Reads that are recorded late are drawn after those of the step before, and so maybe after their use."""
    late = [span("nvme read", 8, 8.5, block=1), span("compute", 8.5, 8.9, block=1)]
    events = draw(tmp_path / "trace.json", [span("nvme read", 0, 9)], late)
    assert arrows_of(events) == []
    assert len(slices_of(events)) == 5


def test_transfers_that_overlap_are_drawn_one_after_another(tmp_path: Path) -> None:
    spans = [span("nvme read", *times) for times in ((1, 4), (1, 2), (1.5, 3), (3, 3), (5, 6))]
    events = draw(tmp_path / "trace.json", spans)
    drawn = [(each["ts"], each["ts"] + each["dur"]) for each in slices_of(events) if each["cat"] == "nvme read"]
    assert drawn == [
        (1_000_000, 2_000_000),
        (2_000_000, 3_000_000),
        (3_000_000, 3_000_001),
        (3_000_001, 4_000_000),
        (5_000_000, 6_000_000),
    ]


def test_what_took_no_time_is_drawn_and_keeps_its_arrows(tmp_path: Path) -> None:
    instant: Sequence[Resource] = ("nvme read", "optimizer", "nvme write")
    events = draw(tmp_path / "trace.json", [span(resource, 1, 1, stage="update") for resource in instant])
    assert [each["dur"] for each in slices_of(events)[1:]] == [1, 1, 1]
    assert len(arrows_of(events)) == 2


def test_any_spans_make_a_valid_trace(tmp_path: Path) -> None:
    chance = random.Random(11)
    stages: tuple[Stage, ...] = ("forward", "backward", "update")
    for _ in range(20):
        steps = []
        for index in range(3):
            starts = [10 * index + chance.uniform(-3, 10) for _ in range(chance.randrange(60))]
            steps.append(
                [
                    span(
                        chance.choice(RESOURCES),
                        start,
                        start + chance.choice([0, 1e-7, 0.3, 4]),
                        block=chance.randrange(2),
                        stage=chance.choice(stages),
                        group=chance.randrange(2),
                    )
                    for start in starts
                ]
            )
        events = draw(tmp_path / "trace.json", *steps)
        assert len(slices_of(events)) == 3 + sum(map(len, steps))


def test_the_file_holds_whole_events_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path, warn=pytest.fail) as trace:
        assert slices_of(events_of(path)) == []
        for step in range(1, 4):
            trace.write_step(step, a_step(10.0 * step), start=10.0 * step, end=10.0 * step + 9)
            events = events_of(path)
            check(events)
            assert [each["name"] for each in slices_of(events) if each["cat"] == "step"] == [
                f"step {number}" for number in range(1, step + 1)
            ]
    trace.close()
    assert events_of(path) == events == json.loads(path.read_text())


def test_the_trace_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    longer = draw(path, a_step(0.5), a_step(10.5))
    shorter = draw(path, a_step(0.5))
    assert len(shorter) < len(longer)


@pytest.mark.parametrize(("limits", "drawn"), [({"max_steps": 2}, 2), ({"max_steps": 0}, 0), ({"max_bytes": 2000}, 1)])
def test_a_long_run_is_drawn_in_part(tmp_path: Path, limits: dict[str, int], drawn: int) -> None:
    path = tmp_path / "trace.json"
    warnings: list[str] = []
    with TraceFile(path, warn=warnings.append, **limits) as trace:
        for step in range(1, 6):
            trace.write_step(step, a_step(10.0 * step), start=10.0 * step, end=10.0 * step + 10)
    assert warnings == [f"{path}: ends before step {drawn + 1}; a longer trace would be too large for a viewer"]
    events = events_of(path)
    check(events)
    assert len([each for each in slices_of(events) if each["cat"] == "step"]) == drawn


def test_a_run_of_max_steps_is_drawn_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceFile(path, warn=pytest.fail, max_steps=1) as trace:
        trace.write_step(1, [], start=0.0, end=1.0)
    assert [each["cat"] for each in slices_of(events_of(path))] == ["step"]


def test_a_full_disk_is_one_warning() -> None:
    path = Path("/dev/full")
    warnings: list[str] = []
    with TraceFile(path, warn=warnings.append) as trace:
        for step in (1, 2):
            trace.write_step(step, [], start=0.0, end=1.0)
    assert warnings == [f"{path}: cannot be written (No space left on device); training continues without it"]


def test_a_disk_that_takes_half_a_step_keeps_whole_steps(tmp_path: Path) -> None:
    """A limit on the size of files: the first write is short, the next fails."""
    whole, limited = tmp_path / "whole.json", tmp_path / "limited.json"
    warnings: list[str] = []
    expected = draw(whole, a_step(0.5))
    with TraceFile(limited, warn=warnings.append) as trace:
        trace.write_step(1, a_step(0.5), start=0.0, end=10.0)
        with file_size_limit(int(whole.stat().st_size * 1.5)):
            trace.write_step(2, a_step(10.5), start=10.0, end=20.0)
            trace.write_step(3, a_step(20.5), start=20.0, end=30.0)
    assert warnings == [f"{limited}: cannot be written (File too large); training continues without it"]
    assert events_of(limited) == expected


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    with TraceFile(tmp_path / "file" / "run" / "trace.json", warn=warnings.append) as trace:
        trace.write_step(1, [], start=0.0, end=1.0)
    assert len(warnings) == 1
    assert "training continues without it" in warnings[0]
