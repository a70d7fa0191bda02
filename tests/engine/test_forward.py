"""Logits from the store, block by block, are those of the whole model in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.reading.block_reader import BlockReader, FileBlocks, GenerationBlocks, weights_bytes
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.errors import BadInput, DoesNotFit, Interrupted
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.export.reload import load_export
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton, read_model_config
from ratel_cli.schedule.uses import Use
from ratel_cli.sizes import DtypeName
from tests import tiers
from tests.model.tiny import FAMILIES, imported_store, save_tiny

CPU = torch.device("cpu")
POSITIONS = torch.arange(11).unsqueeze(0)
TOKENS = POSITIONS * 7919 % 96
ROW = MicroBatch.of_tokens(TOKENS, POSITIONS)


def decoder(directory: Path, dtype: DtypeName) -> DecoderModel:
    skeleton = build_skeleton(read_model_config(directory), dtype=dtype, attn_implementation="eager")
    return find_blocks(skeleton, name="tiny")


def stored_logits(directory: Path, store: Path, dtype: DtypeName) -> torch.Tensor:
    model = decoder(directory, dtype)
    with CheckpointSource(directory, model.skeleton, model.spec) as source:
        install_buffers(model.skeleton, source.read_buffers())
        with imported_store(store, model.spec, source) as (opened, pool):
            with BlockReader(model, GenerationBlocks(opened.current()), pool, device=CPU) as reader:
                logits = BlockwiseForward(model, reader).outputs(ROW)
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


@pytest.mark.parametrize(("family", "dtype"), tiers.rotating(list(FAMILIES), ["float32", "bfloat16"]))
def test_the_files_of_a_model(tmp_path: Path, family: str, dtype: DtypeName) -> None:
    """Read ahead or not, and with blocks that stay in memory."""
    save_tiny(family, tmp_path / "base")
    model = decoder(tmp_path / "base", dtype)
    wanted = whole_logits(tmp_path / "base", dtype)
    with CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source, BufferPool(None) as pool:
        install_buffers(model.skeleton, source.read_buffers())
        blocks = FileBlocks(source)
        for reads_ahead, resident in ((False, frozenset[int]()), (True, frozenset({0, 2}))):
            with BlockReader(model, blocks, pool, device=CPU, reads_ahead=reads_ahead, resident=resident) as reader:
                for _ in range(2):
                    assert torch.equal(BlockwiseForward(model, reader).outputs(ROW), wanted)
                kept = {block.index for index in resident for block in model.spec.segments[index].bound}
                each_time = [
                    block for segment in model.spec.segments for block in segment.bound if block.index not in kept
                ]
                once = sum(model.spec.blocks[index].compute_bytes for index in kept)
                assert reader.bytes_read == 2 * sum(block.compute_bytes for block in each_time) + once
            assert pool.leased_bytes == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("resident", [frozenset[int](), frozenset({0}), frozenset({1, 2}), frozenset(range(5))])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_memory_is_what_was_planned(tmp_path: Path, tied: bool, resident: frozenset[int], reads_ahead: bool) -> None:
    """The embedding is the largest block, so that it counts that a tied one is there with the head."""
    save_tiny("llama", tmp_path / "base", tie_word_embeddings=tied, vocab_size=2048)
    model = decoder(tmp_path / "base", "float32")
    planned_bytes = weights_bytes(model.spec, resident=resident, reads_ahead=reads_ahead)
    with CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source:
        for limit_bytes in (planned_bytes, planned_bytes - 1):
            with (
                BufferPool(limit_bytes) as pool,
                BlockReader(
                    model, FileBlocks(source), pool, device=CPU, resident=resident,
                    reads_ahead=reads_ahead,
                ) as reader,
            ):  # fmt: skip
                forward = BlockwiseForward(model, reader)
                if limit_bytes == planned_bytes:
                    forward.outputs(ROW)
                    forward.outputs(ROW)
                else:
                    with pytest.raises(DoesNotFit):
                        forward.outputs(ROW)


@pytest.mark.parametrize("tied", [True, False])
def test_blocks_in_another_order_than_that_of_a_pass(tmp_path: Path, tied: bool) -> None:
    """A pass that has not come to its end is given up, with what was read ahead."""
    save_tiny("llama", tmp_path / "base", tie_word_embeddings=tied)
    model = decoder(tmp_path / "base", "float32")
    with (
        CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source,
        BufferPool(None) as pool,
        BlockReader(model, FileBlocks(source), pool, device=CPU, reads_ahead=True) as reader,
    ):
        order = (*reversed(model.spec.segments), *model.spec.segments[::2])
        for until in (2, len(order)):
            reader.expect([Use(segment, "forward") for segment in order])
            for segment in order[:until]:
                with reader.open(segment) as weights:
                    for bound, placed in zip(weights.parameters, segment.parameters, strict=True):
                        wanted = source.read(placed.name, 0, placed.num_elements)
                        assert torch.equal(bound.flatten(), wanted), placed.name
        reader.end_pass()
        assert pool.leased_bytes == 0


def test_damage_that_is_found_while_reading_ahead(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base")
    model = decoder(tmp_path / "base", "float32")
    with (
        CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source,
        BufferPool(None) as pool,
        BlockReader(model, FileBlocks(source), pool, device=CPU, reads_ahead=True) as reader,
    ):
        for path in (tmp_path / "base").glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-8192])
        with pytest.raises(BadInput, match="truncated while it was being read"):
            BlockwiseForward(model, reader).outputs(ROW)
        assert pool.leased_bytes == 0


def micro_batches(lengths: Sequence[int]) -> list[MicroBatch]:
    """A row each, whose every second token has loss."""
    made = []
    for number, length in enumerate(lengths):
        ids = (torch.arange(length) * 31 + number) % 96
        targets = torch.where(torch.arange(length) % 2 == 0, ids.roll(-1), -100)
        targets[-1] = -100
        made.append(
            MicroBatch(
                input_ids=ids.unsqueeze(0),
                targets=targets.unsqueeze(0),
                position_ids=torch.arange(length).unsqueeze(0),
                sample_ids=(number,),
                num_targets=int((targets != -100).sum()),
                num_tokens=length,
            )
        )
    return made


@pytest.mark.parametrize("family", tiers.sample(FAMILIES, every=3))
def test_losses_of_many_micro_batches_in_one_pass_and_in_several(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path / "base")
    model, batches = decoder(tmp_path / "base", "float32"), micro_batches([11, 2, 30, 17, 1])
    whole = load_export(tmp_path / "base", dtype=torch.float32, attention="eager")
    wanted = []
    for batch in batches:
        keywords = {"position_ids": batch.position_ids} if model.layer_runner.takes_positions else {}
        with torch.no_grad():
            logits = whole(input_ids=batch.input_ids, use_cache=False, **keywords).logits[0].float()
        total = torch.nn.functional.cross_entropy(logits, batch.targets[0], ignore_index=-100, reduction="sum")
        wanted.append(float(total))
    with CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source, BufferPool(None) as pool:
        install_buffers(model.skeleton, source.read_buffers())
        reads = []
        for held_bytes in (1 << 30, 20_000):
            passed: list[int] = []
            with BlockReader(model, FileBlocks(source), pool, device=CPU) as reader:
                forward = BlockwiseForward(model, reader)
                losses = forward.evaluated(batches, held_bytes=held_bytes, chunk_tokens=64, progress=passed.append)
                assert [loss.sums.loss for loss in losses] == wanted
                assert sum(passed) == len(batches) * len(model.spec.segments)
                reads.append(reader.bytes_read)
        assert reads[0] < reads[1], "several passes"
        with BlockReader(model, FileBlocks(source), pool, device=CPU) as reader:
            with pytest.raises(DoesNotFit, match="a micro-batch takes"):
                list(BlockwiseForward(model, reader).evaluated(batches, held_bytes=100, chunk_tokens=64))
            assert list(BlockwiseForward(model, reader).evaluated([], held_bytes=100, chunk_tokens=64)) == []
    assert pool.leased_bytes == 0


def test_memory_is_that_of_the_largest_block(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "base")
    model = decoder(tmp_path / "base", "float32")
    largest_bytes = 4 * max(block.num_elements for block in model.spec.blocks)
    with (
        CheckpointSource(tmp_path / "base", model.skeleton, model.spec) as source,
        imported_store(tmp_path / "store", model.spec, source) as (store, _),
    ):
        for limit_bytes in (largest_bytes, largest_bytes - 1):
            with BufferPool(limit_bytes) as pool:
                reader = BlockReader(model, GenerationBlocks(store.current()), pool, device=CPU)
                forward = BlockwiseForward(model, reader)
                if limit_bytes == largest_bytes:
                    forward.outputs(ROW)
                else:
                    with pytest.raises(DoesNotFit):
                        forward.outputs(ROW)
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
        imported_store(tmp_path / "store", model.spec, source) as (store, pool),
    ):
        reader = BlockReader(model, GenerationBlocks(store.current()), pool, device=CPU, check_stop=stop)
        forward = BlockwiseForward(model, reader)
        for call in range(1, len(model.spec.blocks) + 1):
            left[0] = call
            with pytest.raises(Interrupted):
                forward.outputs(ROW)
            assert pool.leased_bytes == 0
        forward.outputs(ROW)
