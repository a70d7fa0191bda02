"""Saved tensors that leave a GPU: the gradients that plain PyTorch has there, in less of its memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import ratel_cli as ratel
from ratel_cli.sizes import PAGE_BYTES
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.gpu.test_hook import on_gpu
from tests.library.test_hook import built, net_steps
from tests.library.test_offloading import (
    Order,
    all_forwards_first,
    assert_same_gradients,
    offloading,
    one_forward_one_backward,
)
from tests.tiers import pairwise

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(
    ("name", "dtype", "order", "amount"),
    pairwise(
        ["sequential", "two streams", "gpt2", "llama", "bert", "albert", "t5"],
        [torch.float32, torch.bfloat16],
        [one_forward_one_backward, all_forwards_first],
        ["all", "auto", 3000],
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


@pytest.mark.parametrize("copies", range(3))
def test_it_takes_the_memory_of_two_blocks(tmp_path: Path, copies: int) -> None:
    """Beyond what stays: what the last block saves, and what another one saves while it comes back. On a simulated GPU
    `copies` decides how late copies are."""
    width, num_blocks, num_rows = 64, 12, 4096
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))).to(GPU)
    saved_bytes = 4 * width * num_rows  # of a block: its result, which is the next one's input
    rows = torch.randn(num_rows, width, device=GPU)

    def peak() -> int:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        model(rows).square().sum().backward()
        model.zero_grad()
        return torch.accelerator.max_memory_allocated() - before

    peak()
    whole = peak()
    assert whole > num_blocks * saved_bytes
    with ratel.offload_activations(
        model, storage=[tmp_path], amount="all", least_bytes=saved_bytes, buffer_bytes=saved_bytes
    ) as counts:
        peak()
        found = peak()
    # The first block's input, and all results but the last; one may be asked for before it is in host memory.
    assert counts.written >= 2 * (num_blocks - 1) * saved_bytes
    # Two blocks, each with its input and result; gradients of one; what is computed at the end.
    assert found <= 8 * saved_bytes
