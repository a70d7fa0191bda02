"""Updates: the optimizer's groups, the records that they read and write, weights that are still being written, and the
commit. Rows of the ledger. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.gradients import updated_bytes
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.placement import GroupShape
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.ledger import Holding, Row, Work, held
from ratel_cli.schedule.lifetimes import Lifetime, weight_lifetimes
from ratel_cli.schedule.uses import Stage


def groups(
    step: PlannedStep,
    way: tuple[Stage, ...],
    shape: GroupShape,
    pending: int,
    resident: frozenset[int],
    num_rows: int | None,
) -> Iterator[Holding]:
    """Buffers of the optimizer's groups: from the head on, as it may be speculated that nothing will be clipped, until
    all is written."""
    blocks, lookup = step.own.blocks, step.spec.lookup_block
    num_bytes = shape.buffer_bytes(blocks)
    num_bytes += max(block.host_working_bytes(shape.elements, on_gpu=step.on_gpu) for block in blocks)
    if lookup is not None and updated_bytes(step, num_rows)[0] != step.own.embedding.gradient_bytes:
        # The rows of one group's gradient are spread to all.
        num_bytes += lookup.group_elements(shape.elements) * lookup.gradient_dtype_bytes
    first, last = step.head, step.turn + _written_in_forward(step, way, pending, resident)
    if step.is_separate:
        first, last = step.turn, step.cycle - 1
    yield from held("states", -1, num_bytes, first, last, at_most=True)


def _written_in_forward(step: PlannedStep, way: tuple[Stage, ...], pending: int, resident: frozenset[int]) -> int:
    """How many uses of the next forward have opened when the last group has been written."""
    last = step.handed_over[max(0, len(step.handed_over) - pending) :]
    if "forward" in way or not resident.isdisjoint(last):
        return step.head  # nothing waits for the last groups before the head is open
    return min(step.head, 1 + max(last, default=-1))


def being_written(
    step: PlannedStep, way: tuple[Stage, ...], ahead: int, resident: frozenset[int], shape: GroupShape
) -> Iterator[Holding]:
    """The weights of segments whose update was deferred, when they are not in use any more: until a segment opens
    behind which as many groups have been updated as are written at once."""
    deferred = [segment for segment in step.spec.segments[: step.head] if way[segment.index] == "forward"]
    reads: dict[int, list[Lifetime[BlockSpec]]] = defaultdict(list)
    for each in weight_lifetimes(step.uses, ahead=ahead) if deferred else ():
        if each.of.segment not in resident:
            reads[each.of.index].append(each)
    for segment in deferred:
        left, last = shape.in_flight, segment.index + 1
        for behind in step.spec.segments[segment.index + 1 : step.head]:
            left -= sum(-(-block.num_elements // shape.elements) for block in behind.trained)
            if left < 0:
                break
            last = behind.index + 1
        for block in segment.trained:
            for closed, again in pairwise(reads[block.index][:2]):
                until = min(last, again.issued - 1)
                yield from held("weights", segment.index, block.compute_bytes, closed.last + 1, until)


def records(
    step: PlannedStep, stages: tuple[Stage, ...], resident: frozenset[int], resident_states: frozenset[int]
) -> Iterator[Row]:
    """What updates read and write. Between backward and the next forward, the weights are read once more."""
    for segment, stage in zip(step.own.segments, stages, strict=True):
        index = segment.index
        if stage == "update" and index not in resident:
            yield Work("read", "weights", index, segment.updated_bytes, stage)
        yield Work("first read" if index in resident_states else "read", "states", index, segment.state_bytes, stage)
        if index in resident_states:
            yield from held("resident", index, segment.state_bytes, 0, step.cycle - 1)
        yield Work("write", "states", index, segment.record_bytes, stage)


def commit(step: PlannedStep) -> Iterator[Work]:
    """A step is committed while the next one's forward runs: with the table of checksums."""
    yield Work("write", "states", -1, checksum_bytes(step.own), "forward")


def checksum_bytes(spec: ModelSpec) -> int:
    """The checksum table of one generation."""
    slot = spec.one_generation.slot
    return slot.num_bytes - slot.records.num_bytes
