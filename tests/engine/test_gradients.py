"""Sums, norms, clipping and spilling of gradients, against torch and brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ratel_cli.engine.device.device import Download, HostDevice
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.accumulators import DeviceSums
from ratel_cli.engine.optimizer.gradient_sums import gradient_sum
from ratel_cli.engine.optimizer.gradients import clip_coefficient, one_part, total_norm
from ratel_cli.engine.optimizer.lookup_sum import LookupSum
from ratel_cli.engine.optimizer.segment_sum import SegmentSum
from ratel_cli.errors import DoesNotFit
from ratel_cli.io.buffers import BufferPool, address_of
from ratel_cli.io.queue import open_queue
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block

HOST = HostDevice(Timeline())
SHAPES = [("a", (3, 5)), ("b", (7,)), ("c", (64, 33)), ("d", (1,))]


class Linked(HostDevice):
    """Like a GPU: gradients are downloaded, and the download is not part of computing."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(Timeline())
        self.is_computing = False
        self.num_downloads = 0
        self.held_bytes: list[int] = []
        """For each download: its bytes, and those that may be on their way meanwhile."""

    @contextmanager
    def computing(self, label: SpanLabel) -> Iterator[None]:
        self.is_computing = True
        yield
        self.is_computing = False

    def download(
        self, pieces: Sequence[tuple[torch.Tensor, memoryview]], label: SpanLabel, *, beside_bytes: int = 0
    ) -> Download:
        assert not self.is_computing
        self.num_downloads += 1
        self.held_bytes.append(beside_bytes + sum(len(memory) for _, memory in pieces))
        return super().download(pieces, label)


@pytest.fixture
def block() -> BlockSpec:
    return lay_out_block(
        dtype="bfloat16",
        index=1,
        name="layer 0",
        parameters=[(name, shape, True) for name, shape in SHAPES],
    )


def with_gradients(block: BlockSpec, dtype: torch.dtype) -> BlockSpec:
    return replace(block, gradient_dtype=NAMES_OF_DTYPES[dtype])


def random_gradients(seed: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for _, shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contributions", [1, 2, 5])
def test_sum_in_fp32_rounded_once(block: BlockSpec, dtype: torch.dtype, contributions: int) -> None:
    parts = [random_gradients(seed, dtype) for seed in range(contributions)]
    with BufferPool(None) as pool:
        total = gradient_sum(with_gradients(block, dtype), pool, HOST, single=contributions == 1)
        for part in parts:
            total.add(part)
        gradient = total.finish()
        for index, parameter in enumerate(block.parameters):
            wanted = torch.zeros(parameter.shape)
            for part in parts:
                value = part[index]
                assert value is not None
                wanted = wanted + value.float()
            found = gradient.flat[parameter.start : parameter.stop].view(parameter.shape)
            assert torch.equal(found, wanted.to(dtype))
        gradient.release()
        assert pool.leased_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_download_is_not_part_of_computing(block: BlockSpec, dtype: torch.dtype) -> None:
    device = Linked()
    with BufferPool(None) as pool:
        total = gradient_sum(with_gradients(block, dtype), pool, device, single=False)
        total.add(random_gradients(1, dtype))
        gradient = total.finish()
        assert device.num_downloads == len(SHAPES)
        gradient.release()


@pytest.mark.parametrize("device", [HOST, Linked()], ids=["host", "linked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contributions", [1, 3])
def test_what_leaves_early_is_the_same(
    block: BlockSpec, device: HostDevice, dtype: torch.dtype, contributions: int
) -> None:
    """Parameters leave in any order, before others have all their contributions; the last one leaves at the end."""
    parts = [random_gradients(seed, dtype) for seed in range(contributions)]
    with BufferPool(None) as pool:
        found = []
        for order in ([], [2, 0, 3]):
            single = contributions == 1
            total = gradient_sum(with_gradients(block, dtype), pool, device, single=single, scale=0.5)
            for part in parts[:-1]:
                total.add(part)
            for index in [*order, *({0, 1, 2, 3} - {*order})]:
                part = parts[-1][index]
                assert part is not None
                total.add_one(index, part, is_last=index in order)
            found.append(total.finish())
        whole, early = found
        whole.fetch(pool)
        early.fetch(pool)
        assert torch.equal(early.flat, whole.flat)
        assert early.norms == whole.norms
        assert early.present == whole.present == (True,) * 4
        whole.release()
        early.release()
        assert pool.leased_bytes == 0


@pytest.mark.parametrize("leaving_bytes", [0, 100, 1 << 20])
def test_what_is_on_its_way_has_a_limit(block: BlockSpec, leaving_bytes: int) -> None:
    device = Linked()
    with BufferPool(None) as pool:
        total = gradient_sum(
            with_gradients(block, torch.float32), pool, device, single=True, leaving_bytes=leaving_bytes
        )
        total.add(random_gradients(1, torch.float32))
        total.finish().release()
    sizes = [4 * parameter.num_elements for parameter in block.parameters]
    assert device.held_bytes == [max(size, leaving_bytes) for size in sizes]


def test_nothing_is_added_to_what_has_left(block: BlockSpec) -> None:
    with (
        BufferPool(None) as pool,
        gradient_sum(with_gradients(block, torch.float32), pool, HOST, single=False) as total,
    ):
        total.add_one(1, torch.ones(7), is_last=True)
        with pytest.raises(AssertionError, match="after the last one"):
            total.add_one(1, torch.ones(7))


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("device", [HOST, Linked()], ids=["host", "linked"])
def test_a_sum_that_is_given_up_gives_its_memory_back(block: BlockSpec, device: HostDevice, leaves: bool) -> None:
    with BufferPool(None) as pool:
        for single in (False, True):
            total = gradient_sum(block, pool, device, single=single)
            total.add(random_gradients(1, torch.bfloat16)[:2])
            total.add_one(2, torch.ones(64, 33), is_last=leaves)
            total.close()
            total.close()
            assert pool.leased_bytes == 0


def test_the_last_user_gives_a_gradients_memory_back(block: BlockSpec) -> None:
    with BufferPool(None) as pool:
        total = gradient_sum(block, pool, HOST, single=True)
        total.add(random_gradients(1, torch.bfloat16))
        gradient = total.finish()
        gradient.share().release()
        assert len(gradient.memory) == gradient.num_bytes
        gradient.release()
        assert pool.leased_bytes == 0
        gradient.release()


def test_none_stays_none(block: BlockSpec) -> None:
    with BufferPool(None) as pool:
        total = gradient_sum(with_gradients(block, torch.float32), pool, HOST, single=False)
        total.add([None, torch.ones(7), None, None])
        total.add([None, torch.ones(7), torch.ones(64, 33), None])
        gradient = total.finish()
        assert gradient.present == (False, True, True, False)
        assert set(gradient.norms) == {"b", "c"}
        gradient.release()


@pytest.mark.parametrize("scale", [1.0, 1 / 1024])
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_coefficient_are_torchs(block: BlockSpec, dtype: torch.dtype, max_norm: float, scale: float) -> None:
    parts = random_gradients(3, dtype)
    parameters = []
    for part in parts:
        assert part is not None
        parameter = nn.Parameter(torch.zeros(part.shape))
        parameter.grad = part.float() * scale
        parameters.append(parameter)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    wanted = nn.utils.clip_grad_norm_(parameters, max_norm)
    with BufferPool(None) as pool:
        total = gradient_sum(with_gradients(block, dtype), pool, HOST, single=True, scale=scale)
        total.add(parts)
        gradient = total.finish()
        norm = total_norm(one_part(gradient.norms), ["a", "b", "c", "d"])
        gradient.release()
    assert torch.equal(norm, wanted)
    coefficient = clip_coefficient(norm, max_norm)
    for parameter, value in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, value * coefficient)


def test_norms_are_stacked_in_the_given_order() -> None:
    norms = {str(index): float(index) ** 7 + 0.1 for index in range(50)}
    order = sorted(norms)
    wanted = torch.linalg.vector_norm(torch.tensor([norms[name] for name in order]))
    assert torch.equal(total_norm(one_part(norms), order), wanted)
    assert not torch.equal(total_norm(one_part(norms), order[::-1]), wanted)
    assert torch.equal(total_norm({}, ["a"]), torch.zeros(()))
    assert torch.equal(total_norm(one_part({"b": 2.0}), ["a", "b"]), torch.tensor(2.0))


def test_spilled_and_fetched_is_unchanged(block: BlockSpec, tmp_path: Path) -> None:
    """And what is fetched need not be pinned: only the update reads it."""
    pinned: list[int] = []

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        pinned.append(address)
        return lambda: pinned.remove(address)

    with (
        BufferPool(None, pin=pin) as pool,
        open_queue("threads", notice=print) as queue,
        Scratch([tmp_path], 1 << 20, queue) as scratch,
    ):
        total = gradient_sum(with_gradients(block, torch.float32), pool, HOST, single=True)
        total.add(random_gradients(5, torch.float32))
        gradient = total.finish()
        wanted = gradient.flat.clone()
        gradient.spill(scratch, 4096)
        assert pool.leased_bytes == 0
        with pytest.raises(AssertionError, match="in the scratch file"):
            _ = gradient.flat
        gradient.fetch(pool)
        assert torch.equal(gradient.flat, wanted)
        assert address_of(gradient.memory) not in pinned and len(pinned) == 1
        gradient.fetch(pool)
        gradient.release()
        gradient.release()
        assert pool.leased_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("is_held", [False, True])
def test_tied_sum_adds_in_the_order_of_plain_pytorch(dtype: torch.dtype, num_micro_batches: int, is_held: bool) -> None:
    """On the device, or in host memory from the head to the embedding."""
    torch.manual_seed(0)
    vocab, width, tokens = 50, 8, 6
    block = lay_out_block(dtype="bfloat16", index=0, name="embedding", parameters=[("e", (vocab, width), True)])
    ids = [torch.randint(0, vocab, (2, tokens)) for _ in range(num_micro_batches)]
    heads = [torch.randn(vocab, width).to(dtype) for _ in ids]
    embeddings = []
    for token_ids in ids:
        part = torch.zeros(vocab, width).to(dtype)
        part[token_ids.reshape(-1)] = torch.randn(2 * tokens, width).to(dtype)
        embeddings.append(part)
    wanted = torch.zeros(vocab, width)
    for head, embedding in zip(heads, embeddings, strict=True):
        wanted = wanted + (head + embedding).float()
    with BufferPool(None) as pool:
        total = gradient_sum(with_gradients(block, torch.float32), pool, HOST, single=False)
        assert isinstance(total.sums, DeviceSums)
        tokens = torch.unique(torch.cat(ids))
        with LookupSum(total, tokens, device=HOST, pool=pool, is_held=is_held, most_rows=None) as rows:
            for head in heads:
                rows.add_head(head)
                rows.end_micro_batch()
            rows.end_head()
            held_bytes = 4 * vocab * width + num_micro_batches * len(tokens) * width * dtype.itemsize
            assert pool.leased_bytes >= (0 if is_held else held_bytes)
            rows.fetch()
            for embedding in embeddings:
                rows.add_embedding(embedding[tokens])
            assert torch.equal(total.sums.values(0).view(vocab, width), wanted)
            total.finish().release()
        assert pool.leased_bytes == 0


def test_sums_that_were_opened_are_closed_if_one_cannot_be(block: BlockSpec) -> None:
    with BufferPool(block.compute_bytes) as pool:
        sums = (gradient_sum(each, pool, HOST, single=True) for each in (block, block))
        with pytest.raises(DoesNotFit):
            SegmentSum.of(sums)
        assert pool.leased_bytes == 0
