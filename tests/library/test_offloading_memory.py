"""Saved tensors that host memory has, and reads that a schedule starts: the bits of memory, and no byte too many."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ratel_cli as ratel
from ratel_cli.engine.cache.tensor_cache import TensorCache
from ratel_cli.engine.reading.pass_schedule import PassUnit
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket
from ratel_cli.library import offloading as offloading_module
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import KIB, MIB
from tests.library.test_hook import built, net_steps
from tests.library.test_offloading import (
    Order,
    all_forwards_first,
    assert_same_gradients,
    offloading,
    one_after_another,
    one_forward_one_backward,
)
from tests.tiers import pairwise, thinned

WIDTH, NUM_BLOCKS = 32, 5
ORDERS: dict[Order, list[PassUnit]] = {
    one_after_another: [("forward", 0), ("backward", 0)],
    one_forward_one_backward: [
        ("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("forward", 3),
        ("backward", 2), ("backward", 3),
    ],
    all_forwards_first: [*(("forward", each) for each in range(4)), *(("backward", each) for each in (3, 2, 1, 0))],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "order", "amount", "host_memory", "is_scheduled"),
    thinned(
        pairwise(
            ["sequential", "two streams", "gpt2", "bert", "t5", "dit"],
            list(ORDERS),
            ["all", "auto"],
            [0, 1, 8 * PAGE_BYTES + 1, "1GiB"],
            [False, True],
        ),
        every=2,
        full_every=2,
    ),
)
def test_gradients_have_the_bits_of_memory(
    tmp_path: Path,
    name: str,
    order: Order,
    amount: int | str,
    host_memory: int | str,
    is_scheduled: bool,
) -> None:
    plain = built(name)
    model = copy.deepcopy(plain)
    [batches] = net_steps(name, 1, 4)
    torch.manual_seed(2)
    order(plain, name, batches)
    torch.manual_seed(2)
    schedule = ORDERS[order] if is_scheduled else None
    limits = ratel.Limits(host_memory="4GiB")
    with offloading(
        model, name, tmp_path, amount=amount, host_memory=host_memory, schedule=schedule, limits=limits
    ) as counts:
        order(model, name, batches)
    assert_same_gradients(model, plain)
    assert (counts.resident > 0) == (host_memory not in (0, 1))
    assert counts.written == 0 or host_memory != "1GiB"
    assert counts.written > 0 or host_memory not in (0, 1)
    assert counts.read + counts.forwarded <= counts.written


def stack() -> tuple[nn.Module, torch.Tensor]:
    """Blocks of which each saves its result, and the first one its input: `NUM_BLOCKS` storages of two pages leave."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks), torch.randn(2 * PAGE_BYTES // (4 * WIDTH), WIDTH)


@pytest.mark.parametrize("fitting", range(NUM_BLOCKS + 2))
@pytest.mark.parametrize("rest", [0, 1, 2 * PAGE_BYTES - 1])
def test_what_does_not_fit_is_written_and_nothing_else(tmp_path: Path, fitting: int, rest: int) -> None:
    model, rows = stack()
    num_bytes = rows.nbytes
    with ratel.offload_activations(
        model, storage=[tmp_path], amount="all", least_bytes=1, host_memory=fitting * num_bytes + rest
    ) as counts:
        model(rows).sum().backward()
    resident = min(fitting, NUM_BLOCKS)
    assert (counts.resident, counts.written) == (resident * num_bytes, (NUM_BLOCKS - resident) * num_bytes)
    assert counts.stayed == num_bytes  # the last block's result
    assert resident < NUM_BLOCKS or counts.read == counts.forwarded == 0


@pytest.mark.parametrize("amount", [0, 1, 2, NUM_BLOCKS])
def test_an_amount_counts_what_host_memory_has(tmp_path: Path, amount: int) -> None:
    model, rows = stack()
    with ratel.offload_activations(
        model, storage=[tmp_path], amount=amount * rows.nbytes, least_bytes=1, host_memory=rows.nbytes
    ) as counts:
        model(rows).sum().backward()
    assert counts.resident == min(1, amount) * rows.nbytes
    assert counts.resident + counts.written == amount * rows.nbytes


@contextmanager
def noted_leases() -> Iterator[list[int]]:
    """The sizes of buffers that are made for tensors that stay in host memory."""
    made, lease = [], BufferPool.lease

    def noted(pool: BufferPool, num_bytes: int, purpose: str, **options: object) -> Lease:
        if purpose == "saved tensors that stay in RAM":
            made.append(num_bytes)
        return lease(pool, num_bytes, purpose, **options)  # type: ignore[arg-type]

    with mock.patch.object(BufferPool, "lease", noted):
        yield made


@pytest.mark.parametrize("fitting", [1, 3, 100])
def test_host_memory_is_taken_in_the_first_step_alone(tmp_path: Path, fitting: int) -> None:
    model, rows = stack()
    sizes, written = [], []
    with (
        noted_leases() as made,
        ratel.offload_activations(
            model, storage=[tmp_path], amount="all", least_bytes=1, host_memory=fitting * rows.nbytes
        ) as counts,
    ):
        for step in range(1, 5):  # the first with two micro-batches at once, later ones with more, and with longer rows
            losses = [model(torch.cat([rows] * (1 + step // 3))).sum() for _ in range(1 + step)]
            for loss in losses:
                loss.backward()
            del losses, loss
            sizes.append(sum(made))
            written.append(counts.written)
    assert sizes == [min(fitting, 2 * NUM_BLOCKS) * rows.nbytes] * 4
    assert written[-1] > written[-2] > written[0] >= 0


@contextmanager
def noted_reads() -> Iterator[list[int]]:
    """The places on the drives that are read."""
    begun, read = [], Scratch.read_sealed

    def noted(scratch: Scratch, offset: int, memory: memoryview, what: str) -> Ticket:
        begun.append(offset)
        return read(scratch, offset, memory, what)

    with mock.patch.object(Scratch, "read_sealed", noted):
        yield begun


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_schedule_starts_the_reads_of_the_backward_that_comes_next(tmp_path: Path, is_scheduled: bool) -> None:
    """By the forward before it, or by the first block of the backward before it; without one, by its own last block."""
    model, rows = stack()
    schedule: list[PassUnit] = [*(("forward", each) for each in range(3)), *(("backward", each) for each in range(3))]
    num_reads = []
    with (
        noted_reads() as reads,
        ratel.offload_activations(
            model,
            storage=[tmp_path],
            amount="all",
            least_bytes=1,
            buffer_bytes=rows.nbytes,  # so that of the first two passes nothing is in a buffer
            schedule=schedule if is_scheduled else None,
        ),
    ):
        first, second, third = (model(rows.clone()).sum() for _ in range(3))
        num_reads.append(len(reads))
        for loss in (first, second):
            loss.backward()
            num_reads.append(len(reads))
        third.backward()
    if is_scheduled:
        assert num_reads[:2] == [1, NUM_BLOCKS + 1]
    else:
        assert num_reads == [0, NUM_BLOCKS, 2 * NUM_BLOCKS]


def test_a_wrong_schedule_costs_time_alone(tmp_path: Path) -> None:
    plain = built("gpt2")
    [batches] = net_steps("gpt2", 1, 4)
    torch.manual_seed(2)
    one_forward_one_backward(plain, "gpt2", batches)
    wrong: list[Sequence[PassUnit]] = [ORDERS[one_after_another], ORDERS[all_forwards_first]]
    for schedule in wrong:
        model = built("gpt2")
        torch.manual_seed(2)
        with offloading(model, "gpt2", tmp_path, amount="all", schedule=schedule, buffer_bytes=4 * PAGE_BYTES):
            one_forward_one_backward(model, "gpt2", batches)
        assert_same_gradients(model, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory": -1}, "host_memory must be"),
        ({"host_memory": True}, "host_memory must be"),
        ({"host_memory": "much"}, "host_memory: 'much' is not a size"),
        ({"host_memory": 65 * MIB, "limits": ratel.Limits(host_memory=64 * MIB)}, "but 64.0 MiB of RAM may be used"),
        ({"schedule": [("forward", 0)]}, "each micro-batch needs one"),
        ({"schedule": []}, "each micro-batch needs one"),
    ],
)
def test_what_makes_no_sense(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ratel.RatelError, match=message), offloading(built("gpt2"), "gpt2", tmp_path, **options):
        pass


def test_what_is_in_host_memory_is_given_back(tmp_path: Path) -> None:
    """Of graphs without a backward, too, so that the next ones find it."""
    model, rows = stack()
    with ratel.offload_activations(
        model, storage=[tmp_path], amount="all", least_bytes=1, host_memory=512 * KIB
    ) as counts:
        for _ in range(20):
            model(rows)
        assert counts.written == 0
        assert counts.resident == 20 * NUM_BLOCKS * rows.nbytes


def test_buffers_have_what_a_block_of_the_first_training_forward_saves(tmp_path: Path) -> None:
    """An evaluation before it, which saves nothing, decides nothing; and later forwards do not either."""
    model, rows = stack()
    begin, caches, sizes = TensorCache.begin_pass, list[TensorCache](), list[int]()
    with (
        mock.patch.object(offloading_module, "_BUFFER_BYTES", 1),
        mock.patch.object(TensorCache, "begin_pass", lambda cache: caches.append(cache) or begin(cache)),
        ratel.offload_activations(model, storage=[tmp_path], amount="all", least_bytes=1),
    ):
        with torch.no_grad():
            model(rows)
        for more in (1, 1, 3):
            model(rows.repeat(more, 1)).sum().backward()
            sizes.append(caches[0]._transfers.buffer_bytes)
    assert sizes == [2 * rows.nbytes] * 3  # the first block's input and its result
