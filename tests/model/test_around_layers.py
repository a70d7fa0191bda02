"""What goes from layer to layer besides hidden states, or past all of them, and what a model does around the module
that has its layers: what is found, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration
from transformers.utils.generic import ModelOutput

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks, find_stack
from ratel_cli.model.files.skeleton import build_skeleton, supported_attention
from scripts import family_configs
from tests.engine.architectures import tiny_config


def skeleton_of(family: str, **changes: object) -> PreTrainedModel:
    config = family_configs.tiny_config(family, **changes)
    return build_skeleton(config, dtype="bfloat16", attn_implementation=supported_attention(config, "sdpa"))


SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}


@pytest.mark.parametrize("family", ["hy_v4", "glm_moe_dsa"])
def test_what_an_indexer_chose_is_handed_on(family: str) -> None:
    model = find_blocks(skeleton_of(family, **SHARED), name="tiny")
    assert model.spec.carried_bytes > 0


@pytest.mark.parametrize(
    ("family", "message"),
    [
        # Chooses among the first hidden states and those of each stack of layers.
        ("inkling2_text", "Inkling2ForCausalLM: the code after its layers uses results from before them"),
        # Puts a prompt before them.
        ("cpmant", "CpmAntForCausalLM: its layers get other tokens than the model"),
    ],
)
def test_families_that_do_something_around_their_layers_are_refused(family: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_blocks(skeleton_of(family), name="tiny")


def test_products_that_round_by_their_number_of_rows_refuse_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for a few rows and for many add in another order: wide models of bf16 did so on a processor with AMX."""

    def forward(linear: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = inputs.shape[:-1].numel()
        return nn.functional.linear(inputs, linear.weight, linear.bias) * (1 + num_rows / 64)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    model = find_blocks(skeleton_of("llama"), name="tiny")
    assert (model.packs, model.looks_ahead, model.row_multiple) == (True, False, 1)


def test_a_head_that_mixes_tokens_is_refused() -> None:
    """A step computes chunks of tokens, across rows."""

    class Centred(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden - hidden.mean(dim=1, keepdim=True))

    skeleton = skeleton_of("llama")
    skeleton.lm_head.__class__ = Centred  # type: ignore[assignment]
    with pytest.raises(BadInput, match=r"LlamaForCausalLM: its head computes the logits of a token from other tokens"):
        find_blocks(skeleton, name="tiny")


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
        hidden = self.inner(hidden_states, **keywords)
        return hidden, hidden.mean(-1, keepdim=True).detach()


Between: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"


def pairs(
    *uses: str, handed: bool = True, factor: int = 1, around: bool = False, between: Between | None = None
) -> PreTrainedModel:
    """A Llama whose owner hands each layer what the one below returned. `around`: and the first hidden states to its
    norm. `between`: and to every layer what this makes of the first and its own hidden states."""
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="sdpa")
    owner = skeleton.get_submodule("model")
    for index, use in enumerate(uses):
        owner.layers[index] = Pair(owner.layers[index], use)

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> ModelOutput:
        first = hidden = owner.embed_tokens(input_ids)
        below = None
        rotary = owner.rotary_emb(hidden, position_ids=position_ids)
        for layer in owner.layers:
            more = {} if between is None else {"more": between(first, hidden)}
            hidden, returned = layer(hidden, below=below, position_embeddings=rotary, **more)
            below = (returned if factor == 1 else returned * factor) if handed and returned is not None else None
        return BaseModelOutputWithPast(last_hidden_state=owner.norm(hidden + first if around else hidden))

    owner.forward = forward  # type: ignore[method-assign]
    return skeleton


NONE_USES, ALL_USE = ("no",) * 3, ("silently",) * 3


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [
        (lambda: pairs("no", "silently", "no"), 2 * 4),
        (lambda: pairs(*ALL_USE), 2 * 4),
        (lambda: pairs(*NONE_USES), 2 * 4),
        (lambda: pairs(*ALL_USE, handed=False), 0),
        (lambda: pairs(*NONE_USES, handed=False, between=lambda first, hidden: first * 2), 3 * 32 * 4),
    ],
)
def test_what_is_handed_on_is_carried(model: Callable[[], PreTrainedModel], num_bytes: int) -> None:
    """A number of each token, of each layer but the last: no layer gets what that one returns. And what is made before
    the layers, by each of them."""
    assert find_blocks(model(), name="tiny").spec.carried_bytes == num_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"between": lambda first, hidden: first}, "its layers receive the first hidden states besides their own"),
        ({"between": lambda first, hidden: hidden * 2}, "its code does something between its layers"),
        ({"between": lambda first, hidden: hidden.detach() * 2}, "its code does something between its layers"),
        ({"factor": 2}, "its code does something between its layers"),
        # In a step, what is before the layers is not there when the head runs.
        ({"around": True}, "the code after its layers uses results from before them"),
    ],
    ids=["first", "made of its own", "computed from its own", "not what was returned", "around all layers"],
)
def test_what_depends_on_layers_below_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"LlamaForCausalLM: {message}"):
        find_blocks(pairs(*NONE_USES, **options), name="tiny")


def llava(**changes: object) -> PretrainedConfig:
    text = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config: PretrainedConfig = AutoConfig.for_model("llava", text_config=text, vision_config=vision, **changes)
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def whole_skeleton(**changes: object) -> PreTrainedModel:
    return build_skeleton(llava(**changes), dtype="float32", attn_implementation="sdpa")


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_that_text_uses_are_found(tied: bool) -> None:
    skeleton = whole_skeleton(tie_word_embeddings=tied)
    own = {name for name, _ in skeleton.named_parameters() if name.startswith(("model.language_model", "lm_head"))}
    model = find_blocks(skeleton, name="tiny")
    assert {parameter.name for block in model.spec.blocks for parameter in block.parameters} == own
    assert model.spec.tied == tied and model.has_other_parts
    others = [parameter for name, parameter in skeleton.named_parameters() if name not in own]
    assert len(others) > 20 and all(parameter.device.type == "meta" for parameter in others), "reading one fails"


def test_a_language_model_has_no_other_parts() -> None:
    assert not find_blocks(skeleton_of("llama"), name="tiny").has_other_parts


@pytest.mark.parametrize(("family", "owner"), [("llama", "model"), ("opt", "model.decoder"), ("mpt", "transformer")])
def test_the_owner_is_what_the_model_calls_with_tokens(family: str, owner: str) -> None:
    """OPT calls its decoder directly, past the module around it."""
    skeleton = skeleton_of(family)
    assert find_stack(skeleton)[0] is skeleton.get_submodule(owner)


def other_positions(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    return model.plain(**{**keywords, "position_ids": torch.arange(1, 5).unsqueeze(0)})


def other_mask(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, 0] = 0
    return model.plain(**{**keywords, "attention_mask": mask})


def other_keyword(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    return model.plain(**keywords, scaling=0.5)


def cannot(model: LlavaForConditionalGeneration, pixel_values: torch.Tensor, **keywords: object) -> object:
    raise AssertionError


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (other_positions, "for text it computes something else"),
        (other_mask, "for text it computes something else"),
        (other_keyword, "for text it computes something else"),
        (cannot, "cannot run on text alone"),
    ],
)
def test_a_model_that_does_something_else_on_text(
    monkeypatch: pytest.MonkeyPatch, forward: object, reason: str
) -> None:
    monkeypatch.setattr(LlavaForConditionalGeneration, "plain", LlavaForConditionalGeneration.forward, raising=False)
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", forward)
    with pytest.raises(BadInput, match=f"LlavaForConditionalGeneration: .*{reason}"):
        find_blocks(whole_skeleton(), name="tiny")


def test_a_part_that_text_uses_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlavaForConditionalGeneration.forward

    def forward(model: LlavaForConditionalGeneration, **keywords: object) -> object:
        output = plain(model, **keywords)
        output.logits = output.logits + model.model.multi_modal_projector.linear_1.bias.sum()
        return output

    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", forward)
    spec = find_blocks(whole_skeleton(), name="tiny").spec
    assert "model.multi_modal_projector.linear_1.bias" in {each.name for each in spec.head.parameters}
