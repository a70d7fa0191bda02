"""FLOPs of attention: those of the matrix products that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ratel_cli.engine.replay.recording import _flops, attention_flops
from ratel_cli.model.values.operators import TorchOperator


def multiplied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Multiplications and additions of attention, query by query and head by head."""
    group = query.shape[1] // key.shape[1]
    number = 0
    for batch, head, token in product(*map(range, query.shape[:3])):
        scores = []
        for other in key[batch, head // group]:
            scores.append(float(other @ query[batch, head, token]))
            number += 2 * len(other)
        for _, row in zip(scores, value[batch, head // group], strict=True):
            number += 2 * len(row)
    return number


class Counting(TorchDispatchMode):
    """Adds up what a recorded step would count."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: TorchOperator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.flops += _flops(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("num_keys", [1, 5])
@pytest.mark.parametrize("value_dim", [3, 8])
def test_attention_counts_every_product(key_heads: int, num_keys: int, value_dim: int) -> None:
    query, key = torch.ones(2, 4, 3, 8), torch.ones(2, key_heads, num_keys, 8)
    value = torch.ones(2, key_heads, num_keys, value_dim)
    assert attention_flops(query.shape, key.shape, value.shape) == multiplied(query, key, value)


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_cpu_s_kernel_is_counted(key_heads: int, is_causal: bool) -> None:
    query, key = torch.ones(2, 4, 5, 8, dtype=torch.bfloat16), torch.ones(2, key_heads, 5, 8, dtype=torch.bfloat16)
    with Counting() as counting:
        functional.scaled_dot_product_attention(query, key, key, is_causal=is_causal, enable_gqa=key_heads < 4)
    assert counting.flops == multiplied(query, key, key)
