"""A model that computes as a whole with one block bound at a time generates what the model in memory generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ratel_cli.engine.reading.block_reader import BlockReader, FileBlocks
from ratel_cli.errors import Interrupted
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton, read_model_config, supported_attention
from ratel_cli.run.ask.whole_model import computing_whole
from ratel_cli.sizes import DtypeName
from tests import tiers
from tests.engine.architectures import ARCHITECTURES, tiny_config

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 33, 60, 7], [11], [80, 2, 41]]
SETTINGS = GenerationConfig(
    max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0, output_logits=True, return_dict_in_generate=True
)


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts as a batch, padded on the left: ids and mask."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in PROMPTS])
    return ids, torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in PROMPTS])


def save(architecture: str, directory: Path) -> str:
    """Save a random model. Returns the attention kernel to compare with."""
    config = tiny_config(architecture)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return supported_attention(read_model_config(directory), "sdpa")


def decoder(directory: Path, dtype: DtypeName, attention: str) -> DecoderModel:
    return find_blocks(
        build_skeleton(read_model_config(directory), dtype=dtype, attn_implementation=attention), name="t"
    )


@pytest.mark.parametrize(
    ("architecture", "dtype"), tiers.rotating(list(ARCHITECTURES), ["float32", "bfloat16"], every=3)
)
def test_logits_and_tokens_are_those_of_the_model_in_memory(
    tmp_path: Path, architecture: str, dtype: DtypeName
) -> None:
    """A batch of three with padding: every token's logits, bit for bit."""
    attention = save(architecture, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype], attn_implementation=attention)
    ids, mask = padded()
    wanted = whole.generate(ids, attention_mask=mask, generation_config=SETTINGS)
    model = decoder(tmp_path, dtype, attention)
    with CheckpointSource(tmp_path, model.skeleton, model.spec) as source, BufferPool(None) as pool:
        install_buffers(model.skeleton, source.read_buffers())
        blocks, passes = FileBlocks(source), list[int]()
        with (
            BlockReader(model, blocks, pool, device=CPU, resident=frozenset({1}), reads_ahead=True) as reader,
            computing_whole(model, reader, after_pass=lambda: passes.append(1)) as skeleton,
        ):
            found = skeleton.generate(ids, attention_mask=mask, generation_config=SETTINGS)  # type: ignore[operator]
        assert pool.leased_bytes == 0
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(passes) == len(wanted.logits) == len(found.logits)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert torch.equal(one, other)
    assert model.skeleton.training


def test_it_can_be_stopped_before_every_block(tmp_path: Path) -> None:
    """Afterwards the skeleton runs blocks as before, and nothing is bound."""
    attention = save("llama_tied", tmp_path)
    model, (ids, mask) = decoder(tmp_path, "float32", attention), padded()
    left = [0]

    def stop() -> None:
        left[0] -= 1
        if not left[0]:
            raise Interrupted(2, "stopped")

    with CheckpointSource(tmp_path, model.skeleton, model.spec) as source, BufferPool(None) as pool:
        blocks = FileBlocks(source)
        with BlockReader(model, blocks, pool, device=CPU, check_stop=stop, reads_ahead=True) as reader:
            for call in range(1, 2 * len(model.spec.blocks)):
                left[0] = call
                with pytest.raises(Interrupted), computing_whole(model, reader) as skeleton:
                    skeleton.generate(ids, attention_mask=mask, generation_config=SETTINGS)  # type: ignore[operator]
                assert pool.leased_bytes == 0
                assert all(each.is_meta for layer in model.layer_runner.layers for each in layer.parameters())
    positions = torch.arange(5).unsqueeze(0)
    assert len(model.layer_runner.embed({"input_ids": positions}).calls) == model.spec.num_layers
