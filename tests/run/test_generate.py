"""The keys and values that `ratel generate` plans for are those that a model keeps, or a few more; and its batches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton, supported_attention
from ratel_cli.run.ask.generate import cache_bytes
from ratel_cli.run.inputs.streamed_blocks import BlockMemory, largest_batch
from tests import tiers
from tests.engine.architectures import ARCHITECTURES, tiny_config


@pytest.mark.parametrize("architecture", tiers.sample(ARCHITECTURES, every=4))
def test_the_cache_of_every_architecture(architecture: str) -> None:
    config = tiny_config(architecture)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        cache = whole(input_ids=torch.ones(2, 5, dtype=torch.long), use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    kept_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    attention = supported_attention(config, "sdpa")
    model = find_blocks(build_skeleton(config, dtype="float32", attn_implementation=attention), name="t")
    planned_bytes = 2 * 5 * cache_bytes(model, config)
    num_layers = model.spec.num_layers
    assert kept_bytes * (num_layers + 2) // num_layers <= planned_bytes
    assert planned_bytes <= 8 * kept_bytes


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_the_largest_batch_that_fits_is_found(most: int) -> None:
    for fitting in range(most + 2):
        tried = []

        def fit(size: int, fitting: int = fitting, tried: list[int] = tried) -> BlockMemory:
            tried.append(size)
            if size > fitting:
                raise DoesNotFit(f"{size}", shortfall_bytes=1)
            return BlockMemory(reads_ahead=False, left_bytes=size, host_left_bytes=0)

        if not fitting:
            with pytest.raises(DoesNotFit, match="1"):
                largest_batch(most, fit)
            continue
        size, memory = largest_batch(most, fit)
        assert size == memory.left_bytes == min(most, fitting)
        assert tried[0] == most and len(tried) <= 8
