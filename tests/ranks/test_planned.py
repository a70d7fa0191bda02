"""What a rank moves and takes is what its plan has: bytes of drives and of the network exactly, leases at most."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from ratel_cli.engine.ranks.ranks import Channel, Ranks
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED
from ratel_cli.planning.profile.placement import GroupShape, Placement, Workload
from ratel_cli.planning.time.network import NetworkTraffic, computed_by_rank
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.schedule.ledger import Purpose
from ratel_cli.schedule.slices import GATHERED_AHEAD
from ratel_cli.schedule.uses import step_uses
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import RankSlice
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.lease_meter import LeaseMeter
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.mixed import SHARING, mixed_config, mixed_recipe
from tests.engine.test_step import UPDATES, moved_by_last_step
from tests.planning.steps import most_by_use, network_traffic, step_traffic
from tests.ranks.processes import Processes
from tests.reference import Recipe
from tests.tiers import rotating

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2
FAMILIES = ("llama", "llama_tied", SHARING, *random.Random(7).sample(ARCHITECTURES, k=3))
PENDING = (0, 2)
RESIDENT = (frozenset[int](), frozenset({0, 2}))
METERED: tuple[tuple[Purpose, ...], ...] = (
    ("weights",),
    ("gradients", "held", "sums", "exchange"),
    ("partial sums",),
    ("states",),
)


class CountingChannel:
    """Counts what goes through a channel."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self.sent_bytes = self.received_bytes = 0
        self._channel, self._rank = channel, rank

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """See Channel."""
        self.sent_bytes += sum(len(each) for rank, each in enumerate(send) if rank != self._rank)
        self.received_bytes += sum(len(each) for rank, each in enumerate(receive) if rank != self._rank)
        self._channel.swap(send, receive)


def config_of(family: str) -> PretrainedConfig:
    return mixed_config(family) if family == SHARING else tiny_config(family)


def recipe_of(family: str, dtype: DtypeName, limit: float | None) -> Recipe:
    if family == SHARING:
        return mixed_recipe(family, dtype, max_grad_norm=limit)
    return Recipe(dtype=VALUE_DTYPES[dtype], max_grad_norm=limit)


def moved(
    ranks: Ranks, family: str, recipe: Recipe, held_bytes: int | None, placement: Placement
) -> tuple[ModelSpec, tuple[int, int], tuple[int, int]]:
    """The model, and what the last of three steps reads and writes; and what a step sends and receives."""
    config = config_of(family)
    weights, gradients = (CountingChannel(channel, ranks.rank) for channel in (ranks.weights, ranks.gradients))
    with (
        tempfile.TemporaryDirectory() as directory,
        machine(
            Path(directory),
            config,
            recipe,
            dtype=NAMES_OF_DTYPES[recipe.dtype],
            weights=initial_weights(config),
            placement=placement,
            held_in_memory_bytes=held_bytes,
            ranks=replace(ranks, weights=weights, gradients=gradients),
        ) as ratel,
    ):
        of_drives = moved_by_last_step(ratel, recipe, random_steps(NUM_STEPS, NUM_MICRO_BATCHES, packed=False))
        sent = weights.sent_bytes + gradients.sent_bytes
        received = weights.received_bytes + gradients.received_bytes
        assert sent % NUM_STEPS == received % NUM_STEPS == 0
        return ratel.model.spec, of_drives, (sent // NUM_STEPS, received // NUM_STEPS)


def spilled_segments(own: ModelSpec, held_bytes: int | None) -> int:
    """By brute force: gradients arrive last block first; the first that does not fit is spilled, and all after it."""
    held = 0
    for position, segment in enumerate(reversed(own.segments)):
        held += segment.gradient_bytes
        if held_bytes is not None and held > held_bytes:
            return len(own.segments) - position
    return 0


@pytest.mark.parametrize(
    ("family", "size", "update", "pending", "resident"),
    rotating(FAMILIES, (2, 3, 4, 1), tuple(UPDATES), PENDING, RESIDENT, full_rotation=True),
)
def test_a_rank_moves_what_is_planned_to_the_byte(
    processes: Processes, family: str, size: int, update: str, pending: int, resident: frozenset[int]
) -> None:
    """All of them together read and write what one rank does, but for tables of checksums, and receive what they
    send."""
    dtype, limit, held_bytes = UPDATES[update]
    held_bytes = held_bytes and held_bytes // size
    recipe = recipe_of(family, dtype, limit)
    placement = Placement(prefetch_blocks=GATHERED_AHEAD, pending_updates=pending, resident_states=resident)
    found = processes.run(size, moved, family, recipe, held_bytes, placement)
    traffics = list[Traffic]()
    network = list[NetworkTraffic]()
    for rank, (spec, of_drives, of_network) in enumerate(found):
        own = spec.sliced(RankSlice(rank, size))
        traffic = step_traffic(
            own,
            placement,
            NOTHING_OFFLOADED,
            holds_gradients=limit is not None,
            spilled_segments=spilled_segments(own, held_bytes),
        )
        assert of_drives == (traffic.read_bytes, traffic.written_bytes), rank
        traffics.append(traffic)
        network.append(network_traffic(spec, RankSlice(rank, size)))
        assert of_network == network[-1].total, rank
    assert sum(each.total.sent_bytes for each in network) == sum(each.total.received_bytes for each in network)
    if limit is None:
        alone = step_traffic(found[0][0], placement, NOTHING_OFFLOADED, holds_gradients=False)
        tables = sum(each.written_bytes for each in traffics) - alone.written_bytes
        assert sum(each.read_bytes for each in traffics) == alone.read_bytes
        assert 0 <= tables <= (size - 1) * 8192


def leased(
    ranks: Ranks, family: str, recipe: Recipe, placement: Placement
) -> tuple[ModelSpec, list[list[dict[Purpose, int]]]]:
    """The model, and what each use of each step leases."""
    config = config_of(family)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory() as directory,
        machine(
            Path(directory),
            config,
            recipe,
            dtype="bfloat16",
            weights=initial_weights(config),
            placement=placement,
            group_elements=placement.groups.elements,
            groups_in_flight=placement.groups.in_flight,
            ranks=ranks,
        ) as ratel,
    ):
        spec = ratel.model.spec
        meter = LeaseMeter(ratel.pool, monkeypatch, num_uses=len(step_uses(spec.segments)), staying=frozenset())
        ratel.train(random_steps(NUM_STEPS, NUM_MICRO_BATCHES, packed=False), recipe)
        return spec, [list(map(dict, meter.of_step(number))) for number in range(NUM_STEPS)]


def planned(
    spec: ModelSpec, placement: Placement, rank_slice: RankSlice, *, holds_gradients: bool
) -> dict[tuple[Purpose, ...], list[int]]:
    step = PlannedStep(
        spec=computed_by_rank(spec, rank_slice),
        own=spec.sliced(rank_slice),
        num_ranks=rank_slice.size,
        workload=Workload(micro_batch_size=2, num_micro_batches=NUM_MICRO_BATCHES, sequence_len=12),
        holds_gradients=holds_gradients,
    )
    return most_by_use(PlacedStep(step, placement), METERED)


@pytest.mark.parametrize(
    ("family", "size", "limit", "pending", "defers"),
    rotating(("llama", "gpt2", SHARING), (2, 3, 4), (None, 1e9, 1e-3), (0, 1, 3), (False, True), full_pairs=True),
)
def test_a_rank_leases_no_more_than_is_planned(
    processes: Processes, family: str, size: int, limit: float | None, pending: int, defers: bool
) -> None:
    placement = Placement(
        prefetch_blocks=GATHERED_AHEAD, pending_updates=pending, groups=GroupShape(elements=4096), deferred=frozenset()
    )
    if defers and limit is None:
        last = config_of(family).num_hidden_layers + 1
        placement = replace(placement, deferred=frozenset(range(last - 2, last + 1)))
    recipe = recipe_of(family, "bfloat16", limit)
    for rank, (spec, steps) in enumerate(processes.run(size, leased, family, recipe, placement)):
        wanted = planned(spec, placement, RankSlice(rank, size), holds_gradients=limit is not None)
        for number, uses in enumerate(steps):
            for purposes, most in wanted.items():
                taken = [sum(use.get(purpose, 0) for purpose in purposes) for use in uses]
                pairs = enumerate(zip(taken, most, strict=True))
                over = {position: (took, has) for position, (took, has) in pairs if took > has}
                assert not over, (rank, number, purposes)
