"""A model is refused by name if its layers need more than hidden states and what the owner gives them all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from ratel_cli.errors import BadInput
from ratel_cli.model.blocks import find_blocks
from ratel_cli.model.skeleton import build_skeleton, supported_attention
from scripts import family_configs
from tests.engine.architectures import tiny_config


def skeleton_of(family: str, **changes: object) -> PreTrainedModel:
    config = family_configs.tiny_config(family, **changes)
    return build_skeleton(config, dtype="bfloat16", attn_implementation=supported_attention(config, "sdpa"))


SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}


@pytest.mark.parametrize("family", ["hy_v4", "glm_moe_dsa"])
def test_layers_that_share_what_an_indexer_chose_are_refused(family: str) -> None:
    with pytest.raises(BadInput, match=r"layer 1 uses prev_topk_indices, which a layer below returns besides"):
        find_blocks(skeleton_of(family, **SHARED), name="tiny")


def test_what_no_layer_uses_may_be_returned() -> None:
    """Each layer returns its indices, the owner hands them on, and the layers choose their own."""
    assert find_blocks(skeleton_of("glm_moe_dsa", indexer_types=["full"] * 4), name="tiny").layer_runner.returns_extras


def test_a_trained_tensor_beside_hidden_states_is_found_as_in_a_step() -> None:
    """It is one only where gradients are computed."""
    with pytest.raises(BadInput, match=r"Inkling2ForCausalLM: its layers receive a trained tensor in addition"):
        find_blocks(skeleton_of("inkling2_text"), name="tiny")


class Pair(nn.Module):
    """A layer that returns its hidden states and something else, and may use what the layer below returned."""

    def __init__(self, inner: nn.Module, uses: str) -> None:
        super().__init__()
        self.inner = inner
        self.uses = uses

    def forward(
        self, hidden_states: torch.Tensor, below: torch.Tensor | None = None, **keywords: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.uses == "silently" and below is not None:
            hidden_states = hidden_states * below
        if self.uses == "always":
            assert below is not None
            hidden_states = hidden_states + below
        hidden = self.inner(hidden_states, **keywords)
        return hidden, hidden.mean(-1, keepdim=True).detach()


def pairs(*uses: str, handed: bool = True, around: bool = False) -> PreTrainedModel:
    """A Llama whose owner hands each layer what the one below returned. `around`: and the embedding to its norm."""
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")
    owner = skeleton.get_submodule("model")
    for index, use in enumerate(uses):
        owner.layers[index] = Pair(owner.layers[index], use)

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> ModelOutput:
        first = hidden = owner.embed_tokens(input_ids)
        below = None
        rotary = owner.rotary_emb(hidden, position_ids=position_ids)
        for layer in owner.layers:
            hidden, returned = layer(hidden, below=below, position_embeddings=rotary)
            below = None if returned is None or not handed else returned * 2
        return BaseModelOutputWithPast(last_hidden_state=owner.norm(hidden + first if around else hidden))

    owner.forward = forward  # type: ignore[method-assign]
    return skeleton


@pytest.mark.parametrize("uses", [("no", "silently", "no"), ("silently",) * 3, ("no", "no", "silently")])
def test_what_a_layer_takes_from_below_is_named(uses: tuple[str, ...]) -> None:
    with pytest.raises(BadInput, match=r"LlamaForCausalLM: layer \d uses below, which a layer below returns besides"):
        find_blocks(pairs(*uses), name="tiny")


def test_what_is_not_handed_on_or_not_used_does_no_harm() -> None:
    assert find_blocks(pairs("no", "no", "no"), name="tiny").spec.num_layers == 3
    assert find_blocks(pairs("silently", "silently", "silently", handed=False), name="tiny").spec.num_layers == 3


def test_a_path_around_all_layers_is_refused() -> None:
    """In a step, what is before the layers is not there when the head runs."""
    with pytest.raises(BadInput, match="what is behind its layers uses what is before them"):
        find_blocks(pairs("no", "no", "no", around=True), name="tiny")
