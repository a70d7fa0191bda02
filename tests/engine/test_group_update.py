"""One group of parameters: torch's bits where there is a gradient, and nothing changes where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.settings import UpdateNumbers, adamw_settings
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import view
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.sizes import BLOCK_ALIGNMENT
from tests.kernels.oracle import needs_fused_torch

BLOCK = lay_out_block(
    dtype="float32",
    index=3,
    name="layer 2",
    parameters=[("matrix", (70, 40), True), ("idle", (50, 50), True), ("vector", (90,), False), ("last", (7, 9), True)],
)
PRESENT = (True, False, True, True)
"""`idle` gets no gradient."""
SETTINGS = adamw_settings(beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=0.3)
LEARNING_RATE = 1e-2


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as pool:
        yield pool


def torch_adamw(weights: list[nn.Parameter]) -> torch.optim.AdamW:
    """The oracle, with weight decay where the block says so."""
    groups = [
        {"params": [weight], "weight_decay": SETTINGS.weight_decay if parameter.decay else 0.0}
        for weight, parameter in zip(weights, BLOCK.parameters, strict=True)
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=1e-8, foreach=False)


@needs_fused_torch
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("group_elements", [BLOCK_ALIGNMENT, BLOCK.num_elements])
def test_a_block_in_groups_has_the_bits_of_torch(pool: BufferPool, group_elements: int, num_threads: int) -> None:
    torch.manual_seed(5)
    fields = {name: torch.zeros(BLOCK.num_elements) for name in ("w32", "m32", "v32")}
    weights = [nn.Parameter(torch.randn(parameter.shape)) for parameter in BLOCK.parameters]
    for weight, parameter in zip(weights, BLOCK.parameters, strict=True):
        fields["w32"][parameter.start : parameter.stop] = weight.detach().flatten()
    idle = weights[1].detach().clone()
    oracle = torch_adamw(weights)
    lease = pool.lease(4 * BLOCK.num_elements, "gradient")
    flat = view(lease.memory, torch.float32).fill_(1e9)  # what is nobody's gradient is anything
    gradient = BlockGradient(BLOCK, lease, torch.float32, PRESENT, {}, None)
    with GroupUpdater(SETTINGS, seed=0, num_threads=num_threads) as adamw:
        for number in (1, 2, 3):
            for weight, parameter, has_gradient in zip(weights, BLOCK.parameters, PRESENT, strict=True):
                weight.grad = torch.randn(parameter.shape) if has_gradient else None
                if weight.grad is not None:
                    flat[parameter.start : parameter.stop] = weight.grad.flatten()
            oracle.step()
            update = UpdateNumbers(number=number, learning_rate=LEARNING_RATE, gradient_scale=1.0)
            for start in range(0, BLOCK.num_elements, group_elements):
                stop = start + group_elements
                memories = {name: memoryview(values.numpy()[start:stop]).cast("B") for name, values in fields.items()}
                with gradient.elements(start, stop, pool) as part:
                    adamw.update(memories, gradient, update, values=part, start=start, stop=stop)
    gradient.release()
    in_gaps = torch.ones(BLOCK.num_elements, dtype=torch.bool)
    for weight, parameter in zip(weights, BLOCK.parameters, strict=True):
        found = fields["w32"][parameter.start : parameter.stop].view(parameter.shape)
        assert torch.equal(found, weight), parameter.name
        in_gaps[parameter.start : parameter.stop] = False
    assert torch.equal(weights[1], idle)
    assert all(not bool(values[in_gaps].any()) for values in fields.values())
