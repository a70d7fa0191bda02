"""Encoder-decoders whose own code does more than their two stacks do are rejected before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from tests.library.encoders import PAIRS, encoder_config

Change = Callable[[dict[str, object]], None]


def skeleton_of(name: str) -> PreTrainedModel:
    return build_skeleton(encoder_config(name), dtype="float32", attn_implementation="eager", task="seq2seq")


def scaled_states(keywords: dict[str, object]) -> None:
    finished = keywords["encoder_outputs"]
    assert isinstance(finished, ModelOutput)
    keywords["encoder_outputs"] = BaseModelOutput(last_hidden_state=finished["last_hidden_state"] * 2)


def other_tokens(keywords: dict[str, object]) -> None:
    tokens = keywords["decoder_input_ids"]
    assert isinstance(tokens, torch.Tensor)
    keywords["decoder_input_ids"] = (tokens + 1) % 9


def doing(skeleton: PreTrainedModel, change: Change) -> PreTrainedModel:
    """The model with code between its stacks, where it computes both."""
    forward = skeleton.forward

    def changed(**keywords: object) -> object:
        if keywords.get("encoder_outputs") is None and "decoder_input_ids" in keywords:
            of_encoder = {"input_ids": keywords["input_ids"], "attention_mask": keywords["attention_mask"]}
            keywords["encoder_outputs"] = skeleton.get_encoder()(**of_encoder)
            change(keywords)
        return forward(**keywords)

    skeleton.forward = changed  # type: ignore[method-assign]
    return skeleton


@pytest.mark.parametrize("name", PAIRS)
def test_segments_and_parameters(name: str) -> None:
    """Every parameter is in one block, and each stack has its layers."""
    skeleton = skeleton_of(name)
    names = {each for each, _ in skeleton.named_parameters()}
    spec = find_blocks(skeleton, name=name, task="seq2seq").spec
    assert {each.name for block in spec.blocks for each in block.parameters} == names
    assert [segment.name for segment in spec.segments][2:6] == [
        "encoder layer 1", "end of the encoder", "decoder layer 0", "decoder layer 1",
    ]  # fmt: skip
    assert spec.num_layers == (6 if "t5" in name else 5)


@pytest.mark.parametrize("change", [scaled_states, other_tokens])
def test_code_between_the_stacks_is_rejected(change: Change) -> None:
    find_blocks(doing(skeleton_of("t5"), lambda keywords: None), name="t5", task="seq2seq")
    with pytest.raises(BadInput, match="for two texts it computes something else than its encoder and its decoder"):
        find_blocks(doing(skeleton_of("t5"), change), name="t5", task="seq2seq")


def test_layers_that_are_left_out_at_random_are_rejected() -> None:
    config = encoder_config("bart")
    config.encoder_layerdrop = 0.1
    with pytest.raises(BadInput, match="encoder_layerdrop"):
        build_skeleton(config, dtype="float32", attn_implementation="eager", task="seq2seq")
