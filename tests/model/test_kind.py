"""What a configuration describes, in words, for every model type that transformers has; and the guide's way to save
the language part of a larger model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.kind import class_of, declared_task, reject_other_kinds
from ratel_cli.model.files.skeleton import build_skeleton
from tests.e2e.runs import save_base
from tests.tiers import sample

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


LANGUAGE_PARTS: dict[str, dict[str, object]] = {
    "llava": {"model_type": "llama", **TEXT},
    "mistral3": {"model_type": "mistral", **TEXT},
    "llama4": TEXT,
}


def config_of(model_type: str) -> PretrainedConfig | None:
    """The type's default configuration; None if it has none."""
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type]()
    except Exception:  # noqa: BLE001  packages that are missing, parts that must be given
        return None
    return config


@pytest.mark.nightly
def test_causal_language_models_pass_and_others_are_named() -> None:
    """Every type of transformers: the class of its causal language model passes, and so does a class of unknown name;
    other types are named."""
    num_causal = num_others = 0
    for model_type in CONFIG_MAPPING_NAMES:
        config = config_of(model_type)
        if config is None:
            continue
        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            config.architectures = [str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])]
            reject_other_kinds(config)
            config.architectures = ["OurOwnClass"]
            reject_other_kinds(config)
            num_causal += 1
        elif class_of(config) is not None:
            num_others += 1  # a model with a language model in it: see e2e/test_other_parts.py
        else:
            with pytest.raises(BadInput, match=re.escape(config.model_type)) as raised:
                reject_other_kinds(config)
            assert raised.value.hint
            assert raised.value.message.isprintable()
            num_others += 1
    assert num_causal > 150
    assert num_others > 200


@pytest.mark.parametrize("model_type", sample(LANGUAGE_PARTS, every=3))
def test_the_guide_saves_a_language_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """What its code saves has the logits of the whole model, and can be trained."""
    monkeypatch.chdir(tmp_path)
    save_base(Path("WHOLE"))  # for its tokenizer
    vision = {**VISION, "model_type": "clip_vision_model"} if model_type == "llava" else VISION
    config = AutoConfig.for_model(model_type, text_config=LANGUAGE_PARTS[model_type], vision_config=vision)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    whole.save_pretrained("WHOLE")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    [code] = [block for block in blocks if "get_text_config" in block]
    exec(code, {})  # noqa: S102
    tokens = torch.arange(8).unsqueeze(0)
    saved = AutoModelForCausalLM.from_pretrained("TEXT").eval()
    with torch.no_grad():
        assert torch.equal(saved(tokens).logits, whole.eval()(input_ids=tokens).logits)
    find_blocks(build_skeleton(saved.config, dtype="float32", attn_implementation="eager"), name="text")


@pytest.mark.parametrize(
    ("model_type", "architecture", "task"),
    [
        ("bert", "BertForMaskedLM", "masked_lm"),
        ("bert", "BertForSequenceClassification", "classification"),
        ("t5", "T5ForConditionalGeneration", "seq2seq"),
        ("bart", "BartForConditionalGeneration", "seq2seq"),
        ("llama", "LlamaForCausalLM", "causal_lm"),
        ("llama", "LlamaForSequenceClassification", "classification"),
        ("llama", "OurOwnClass", "causal_lm"),
        ("bert", None, "causal_lm"),
    ],
)
def test_the_task_of_the_class_that_a_configuration_names(model_type: str, architecture: str | None, task: str) -> None:
    config = AutoConfig.for_model(model_type)
    config.architectures = None if architecture is None else [architecture]
    assert declared_task(config) == task
