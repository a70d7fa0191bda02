"""Logits from the store, block by block, are those of the whole model in memory, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.engine.forward import GenerationForward
from ratel_cli.errors import DoesNotFit, Interrupted
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.blocks import DecoderModel, find_blocks
from ratel_cli.model.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.reload import load_export
from ratel_cli.model.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.sizes import DtypeName
from tests.model.tiny import FAMILIES, imported_store, save_tiny

POSITIONS = torch.arange(11).unsqueeze(0)
TOKENS = POSITIONS * 7919 % 96


def decoder(directory: Path, dtype: DtypeName) -> DecoderModel:
    skeleton = build_skeleton(read_model_config(directory), dtype=dtype, attn_implementation="eager")
    return find_blocks(skeleton, name="tiny")


def stored_logits(directory: Path, store: Path, dtype: DtypeName) -> torch.Tensor:
    model = decoder(directory, dtype)
    with CheckpointSource(directory, model.skeleton, model.spec) as source:
        install_buffers(model.skeleton, source.read_buffers())
        with imported_store(store, model.spec, source, dtype) as (opened, pool):
            forward = GenerationForward(model, opened.current(), pool, device=torch.device("cpu"))
            logits = forward.logits(TOKENS, POSITIONS)
            assert pool.leased_bytes == 0
    assert model.skeleton.training
    return logits


def whole_logits(directory: Path, dtype: DtypeName) -> torch.Tensor:
    model = load_export(directory, dtype=DTYPES[dtype], attention="eager")
    keywords = {"position_ids": POSITIONS} if decoder(directory, dtype).layer_runner.takes_positions else {}
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False, **keywords).logits
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path / "base")
    found = stored_logits(tmp_path / "base", tmp_path / "store", "float32")
    assert found.shape == (1, 11, 96)
    assert torch.equal(found, whole_logits(tmp_path / "base", "float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_dtype_and_tied_embeddings(tmp_path: Path, dtype: DtypeName, tied: bool) -> None:
    save_tiny("llama", tmp_path / "base", tie_word_embeddings=tied)
    found = stored_logits(tmp_path / "base", tmp_path / "store", dtype)
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(found, whole_logits(tmp_path / "base", dtype))


def test_memory_is_that_of_the_largest_block(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base")
    model = decoder(tmp_path / "base", "float32")
    largest_bytes = 4 * max(block.num_elements for block in model.spec.blocks)
    with (
        CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source,
        imported_store(tmp_path / "store", model.spec, source, "float32") as (store, _),
    ):
        for limit_bytes in (largest_bytes, largest_bytes - 1):
            with BufferPool(limit_bytes) as pool:
                forward = GenerationForward(model, store.current(), pool, device=torch.device("cpu"))
                if limit_bytes == largest_bytes:
                    forward.logits(TOKENS, POSITIONS)
                else:
                    with pytest.raises(DoesNotFit):
                        forward.logits(TOKENS, POSITIONS)
                assert pool.leased_bytes == 0


def test_check_stop_may_raise_before_every_block(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base")
    model = decoder(tmp_path / "base", "float32")
    left = [0]

    def stop() -> None:
        left[0] -= 1
        if not left[0]:
            raise Interrupted(2, "stopped")

    with (
        CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source,
        imported_store(tmp_path / "store", model.spec, source, "float32") as (store, pool),
    ):
        forward = GenerationForward(model, store.current(), pool, device=torch.device("cpu"), check_stop=stop)
        for call in range(1, len(model.spec.blocks) + 1):
            left[0] = call
            with pytest.raises(Interrupted):
                forward.logits(TOKENS, POSITIONS)
            assert pool.leased_bytes == 0
        forward.logits(TOKENS, POSITIONS)
