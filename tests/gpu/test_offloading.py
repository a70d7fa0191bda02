"""Saved tensors that leave a GPU: the gradients that plain PyTorch has there, in less of its memory."""

from __future__ import annotations

import copy
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn

import ratel_cli as ratel
from ratel_cli.sizes import PAGE_BYTES
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.gpu.test_hook import on_gpu
from tests.library.test_hook import built, net_steps
from tests.library.test_offloading import (
    MODES,
    Order,
    all_forwards_first,
    assert_same_gradients,
    check_changed,
    offloading,
    one_forward_one_backward,
)
from tests.real_time import in_real_time, of_this_try
from tests.simulated_gpu import is_simulated
from tests.simulated_gpu.timed import Rates, timed
from tests.tiers import pairwise, thinned

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("name", "dtype", "order", "amount"),
    thinned(
        pairwise(
            ["sequential", "two streams", "gpt2", "llama", "bert", "albert", "t5"],
            [torch.float32, torch.bfloat16],
            [one_forward_one_backward, all_forwards_first],
            ["all", "auto", 3000],
        ),
        every=2,
    ),
)
def test_gradients_have_the_bits_of_memory(
    tmp_path: Path, name: str, dtype: torch.dtype, order: Order, amount: int | str
) -> None:
    plain = built(name, dtype).to(GPU)
    model = copy.deepcopy(plain)
    batches = [on_gpu(batch) for [batch] in net_steps(name, 3, 1)]
    torch.manual_seed(2)
    order(plain, name, batches)
    torch.manual_seed(2)
    with offloading(model, name, tmp_path, amount=amount):
        order(model, name, batches)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize(
    ("name", "order", "host_memory"),
    pairwise(
        ["sequential", "two streams", "gpt2", "llama", "albert"],
        [one_forward_one_backward, all_forwards_first],
        [1, 5 * PAGE_BYTES, "1GiB"],
    ),
)
def test_host_memory_comes_first(tmp_path: Path, name: str, order: Order, host_memory: int | str) -> None:
    plain = built(name).to(GPU)
    model = copy.deepcopy(plain)
    batches = [on_gpu(batch) for [batch] in net_steps(name, 3, 1)]
    torch.manual_seed(2)
    order(plain, name, batches)
    torch.manual_seed(2)
    limits = ratel.Limits(host_memory="8GiB")
    with offloading(model, name, tmp_path, amount="all", host_memory=host_memory, limits=limits) as counts:
        order(model, name, batches)
    assert_same_gradients(model, plain)
    # What is asked for before it has left the GPU is not written either.
    assert (counts.resident > 0) == (host_memory != 1)
    assert counts.written == 0 or host_memory != "1GiB"


@pytest.mark.parametrize(("change", "options"), pairwise(["itself", "a view", "the input, after forward"], MODES))
def test_what_is_changed_after_it_was_saved_is_an_error(
    tmp_path: Path, change: str, options: dict[str, object]
) -> None:
    check_changed(tmp_path, change, options, GPU)


WIDTH, NUM_BLOCKS, NUM_ROWS = 64, 12, 4096
BLOCK_BYTES = 4 * WIDTH * NUM_ROWS
"""What a block saves: its result, which is the next one's input."""


def stack() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)))
    return model.to(GPU), torch.randn(NUM_ROWS, WIDTH, device=GPU)


def peak_bytes(model: nn.Module, rows: torch.Tensor) -> int:
    """The GPU memory of a step beyond what is there before it."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model(rows).square().sum().backward()
    model.zero_grad()
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.parametrize("copies", range(3))
@pytest.mark.parametrize("host_memory", [0, "1GiB"])
def test_it_takes_the_memory_of_two_blocks(tmp_path: Path, host_memory: int | str, copies: int) -> None:
    """Beyond what stays: what the last block saves, and what another one saves while it comes back. On a simulated GPU
    `copies` decides how late copies are."""
    model, rows = stack()
    peak_bytes(model, rows)
    whole = peak_bytes(model, rows)
    assert whole > NUM_BLOCKS * BLOCK_BYTES
    with ratel.offload_activations(
        model,
        storage=[tmp_path],
        amount="all",
        least_bytes=BLOCK_BYTES,
        buffer_bytes=BLOCK_BYTES,
        host_memory=host_memory,
        limits=ratel.Limits(host_memory="8GiB"),
    ) as counts:
        peak_bytes(model, rows)
        found = peak_bytes(model, rows)
    # The first block's input, and all results but the last; one may be asked for before it is in host memory.
    assert counts.written + counts.resident >= 2 * (NUM_BLOCKS - 1) * BLOCK_BYTES
    # Two blocks, each with its input and result; gradients of one; what is computed at the end.
    assert found <= 8 * BLOCK_BYTES


@pytest.mark.skipif(not is_simulated(), reason="a real GPU has its own time")
@pytest.mark.full
@in_real_time
@pytest.mark.parametrize(("link_share", "host_memory"), [(0.1, 0), (0.1, "1GiB"), (8.0, "1GiB"), (8.0, 0)])
def test_the_host_does_not_run_ahead_of_what_it_measures(
    request: pytest.FixtureRequest, tmp_path: Path, link_share: float, host_memory: int | str
) -> None:
    """What a block saves takes this share of its forward on the link: if that is less than one, nearly all goes, though
    the host queues a forward in no time; if it is more, next to nothing does, and no forward waits for it."""
    model, rows = stack()
    forward_seconds = of_this_try(request, (0.05, 0.1, 0.2, 0.4))
    link_seconds = link_share * forward_seconds
    rates = Rates(
        flops_per_second=2 * WIDTH * WIDTH * NUM_ROWS / forward_seconds,
        up_bytes_per_second=BLOCK_BYTES / link_seconds,
        down_bytes_per_second=BLOCK_BYTES / link_seconds,
    )
    num_steps, began = 5, perf_counter()
    with (
        timed(rates),
        ratel.offload_activations(
            model,
            storage=[tmp_path],
            least_bytes=BLOCK_BYTES,
            buffer_bytes=4 * BLOCK_BYTES,
            host_memory=host_memory,
            limits=ratel.Limits(host_memory="8GiB"),
        ) as counts,
    ):
        for _ in range(num_steps):
            before = counts.resident + counts.written
            model(rows).sum().backward()
            moved = counts.resident + counts.written - before
        torch.accelerator.synchronize()
        seconds = perf_counter() - began
    if link_share < 1:
        assert moved >= (NUM_BLOCKS - 3) * BLOCK_BYTES
    else:
        assert moved <= 6 * BLOCK_BYTES
    assert seconds < 1.2 * num_steps * 3 * NUM_BLOCKS * forward_seconds
