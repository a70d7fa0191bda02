"""A model with more parts than its language model: what is found in it, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

from ratel_cli.errors import BadInput
from ratel_cli.model.outer_model import find_outer, outer_class

TEXT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def llava(**changes: object) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model("llava", text_config=TEXT, vision_config=VISION, **changes)
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


@pytest.mark.parametrize("tied", [True, False])
def test_all_of_the_language_model_is_found(tied: bool) -> None:
    """Tied or not is what the outer model says, whatever its language part's configuration says."""
    outer = find_outer(llava(tie_word_embeddings=tied))
    assert outer is not None and outer.language_config.tie_word_embeddings == tied
    state = outer.model.state_dict()
    own = transformers.LlamaForCausalLM(outer.language_config).state_dict()
    assert set(outer.names.values()) == own.keys()
    assert all(state[name].shape == own[name_of].shape for name, name_of in outer.names.items())


def test_a_language_model_has_no_outer_one() -> None:
    assert outer_class(AutoConfig.for_model("llama")) is None
    config = llava()
    config.architectures = ["LlamaForCausalLM"]  # the weights of a language part under the whole configuration
    assert outer_class(config) is None


def test_a_class_that_the_configuration_does_not_name() -> None:
    config = llava()
    config.architectures = None
    assert outer_class(config) is LlavaForConditionalGeneration


def other_logits(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    output = model.plain(**keywords)
    output.logits = output.logits * 1.0001
    return output


def other_positions(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    return model.plain(**keywords, position_ids=torch.arange(1, 7).unsqueeze(0))


def other_mask(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 0] = 0
    return model.plain(**keywords, attention_mask=mask)


def reads_the_tower(model: LlavaForConditionalGeneration, **keywords: object) -> object:
    output = model.plain(**keywords)
    output.logits = output.logits + model.model.multi_modal_projector.linear_1.bias.sum()
    return output


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (other_logits, "does not compute there"),
        (other_positions, "does not compute there"),
        (other_mask, "does not compute there"),
        (reads_the_tower, "on text alone|does not compute there"),
    ],
)
def test_a_whole_that_does_something_else_on_text(
    monkeypatch: pytest.MonkeyPatch, forward: object, reason: str
) -> None:
    monkeypatch.setattr(LlavaForConditionalGeneration, "plain", LlavaForConditionalGeneration.forward, raising=False)
    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", forward)
    with pytest.raises(BadInput, match=reason) as raised:
        find_outer(llava())
    assert (
        "LlavaForConditionalGeneration (llava) has more parts than its language model (llama)" in raised.value.message
    )
