"""A failed read is an error for every user of the weights, whoever waited or gave up first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.groups import BlockUpdate, Group, GroupWork
from ratel_cli.engine.reading.host_weights import HostWeights
from ratel_cli.errors import IntegrityFailure, Interrupted
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import Ticket
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.store.lock import DATA_FILE_NAME
from tests.engine.architectures import tiny_config
from tests.engine.machine import initial_weights, machine, random_steps
from tests.reference import Recipe

BLOCK = lay_out_block(dtype="bfloat16", index=1, name="layer 0", parameters=[("w", (4096,), False)])
SECONDS = 20.0


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as pool:
        yield pool
        assert pool.leased_bytes == 0


@pytest.fixture
def ticket() -> Ticket:
    return Ticket(num_parts=1)


@pytest.fixture
def weights(pool: BufferPool, ticket: Ticket) -> HostWeights:
    return HostWeights(BLOCK, pool.lease(8192, "w"), ticket)


def wait(weights: HostWeights) -> None:
    weights.wait(Timeline(), "forward")


def test_a_read_that_failed_is_an_error_for_each_user(weights: HostWeights, ticket: Ticket) -> None:
    other = weights.share()
    ticket.finish_part(IntegrityFailure("a flipped bit"))
    for user in (weights, other, other):
        with pytest.raises(IntegrityFailure, match="a flipped bit"):
            wait(user)
        assert user.is_read
    weights.release()
    other.release()


def test_a_user_that_gives_up_does_not_hide_the_error_from_another(weights: HostWeights, ticket: Ticket) -> None:
    other = weights.share()
    ticket.finish_part(IntegrityFailure("a flipped bit"))
    weights.release()
    with pytest.raises(IntegrityFailure, match="a flipped bit"):
        wait(other)
    other.release()


def test_a_user_waits_for_a_read_that_another_is_giving_up(weights: HostWeights, ticket: Ticket) -> None:
    other = weights.share()
    gives_up = threading.Thread(target=weights.release)
    waits = threading.Thread(target=wait, args=[other])
    gives_up.start()
    waits.start()
    waits.join(0.1)
    assert waits.is_alive() and not other.is_read
    ticket.finish_part()
    for thread in (gives_up, waits):
        thread.join(SECONDS)
        assert not thread.is_alive()
    other.release()


def test_the_last_user_gives_the_memory_back_when_the_read_has_ended(
    pool: BufferPool, weights: HostWeights, ticket: Ticket
) -> None:
    gives_up = threading.Thread(target=weights.release)
    gives_up.start()
    gives_up.join(0.1)
    assert pool.leased_bytes == 8192
    ticket.finish_part()
    gives_up.join(SECONDS)
    assert pool.leased_bytes == 0


def flip_a_bit_of(content: bytes, path: Path) -> None:
    """`content` stands in the file once."""
    everything = path.read_bytes()
    assert everything.count(content) == 1
    with path.open("r+b") as file:
        file.seek(everything.index(content) + 1)
        file.write(bytes([content[1] ^ 0x40]))


def test_an_interrupted_step_does_not_commit_weights_that_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is clipped, so its updates run beneath the second forward, with the weights that were read for it.
    That forward is interrupted while block 1 is updated and block 2, damaged on the drive, has been read ahead."""
    config, recipe = tiny_config("llama"), Recipe(dtype=torch.bfloat16, max_grad_norm=1e-3)
    stops, is_interrupted = threading.Event(), threading.Event()
    compute = GroupWork.compute

    def compute_when_interrupted(work: GroupWork, group: Group, update: BlockUpdate) -> None:
        assert group.block.index != 1 or is_interrupted.wait(SECONDS)
        compute(work, group, update)

    def check_stop() -> None:
        if stops.is_set():
            raise Interrupted(2, "stopped")

    monkeypatch.setattr(GroupWork, "compute", compute_when_interrupted)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        placement=Placement(prefetch_blocks=2),
    ) as ratel:
        ratel.engine = ratel.make_engine(check_stop)
        first, second = random_steps(2, 1)
        ratel.engine.run(first, step=0, update=1, learning_rate=recipe.learning_rate, commit_previous=ratel.commit)
        ratel.decided = 1
        block = ratel.model.spec.blocks[2]
        with ratel.pool.lease(2 * block.num_elements, "test") as lease:
            ratel.store.current().read(2, "hi16", 0, block.num_elements, lease.memory).wait()
            flip_a_bit_of(bytes(lease.memory), tmp_path / "drive0" / DATA_FILE_NAME)
        stops.set()
        with pytest.raises(Interrupted):
            ratel.engine.run(second, step=1, update=2, learning_rate=recipe.learning_rate, commit_previous=ratel.commit)
        is_interrupted.set()
        with pytest.raises(IntegrityFailure):
            ratel.settle()
        assert ratel.store.progress.step == 0
