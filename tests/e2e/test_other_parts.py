"""A model with more parts than its language model: the language part trains, all else stays to the byte.

The oracle is plain PyTorch on transformers' class of the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import align_special_tokens

from ratel_cli.model.files.skeleton import DTYPES
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import works
from tests.model.tiny import rewrite
from tests.reference import train_in_memory
from tests.tiers import rotating

_TEXT: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
_VISION: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
MODELS: dict[str, dict[str, object]] = {
    "qwen3_5": {
        "text_config": {
            **_TEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "num_position_embeddings": 16,
        },
        "image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313,
    },
    "gemma3": {
        "text_config": {**_TEXT, "sliding_window": 16}, "vision_config": {**_VISION, "hidden_size": 64},
        "mm_tokens_per_image": 4, "image_token_index": 310, "boi_token_index": 311, "eoi_token_index": 312,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": {**_VISION, "model_type": "pixtral"},
        "image_token_index": 310,
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 310,
    },
    "gemma4": {
        "text_config": {
            **_TEXT, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 16, "global_head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
        },
        "vision_config": {
            **_VISION, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16,
        },
        "audio_config": None, "image_token_id": 310, "audio_token_id": 311, "video_token_id": 312,
        "boi_token_id": 313, "eoi_token_id": 314,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "fullatt_block_indexes": [0],
        },
        "image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
            "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        "image_token_id": 310, "video_token_id": 311, "vision_start_token_id": 312, "vision_end_token_id": 313,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_VISION, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 310,
    },
    "llama4": {
        "text_config": {
            **_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1],
            "attention_chunk_size": 16,
        },
        "vision_config": {
            **_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
        "image_token_index": 310, "boi_token_index": 311, "eoi_token_index": 312,
    },
}  # fmt: skip
_WHOLE = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration", "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration", "llava": "LlavaForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration", "internvl": "InternVLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}  # fmt: skip


def save_whole(directory: Path, base: Path, family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Save a small whole model in several files, with the tokenizer of `base`."""
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = AutoConfig.for_model(family, **MODELS[family])
    config.bos_token_id = None
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, _WHOLE[family])._from_config(config, dtype=dtype)
    model.save_pretrained(directory, max_shard_size="60KB")
    if family == "qwen3_5":  # whose checkpoints have layers that predict more tokens, which transformers leaves out
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        file = index["weight_map"]["lm_head.weight"]
        tensors = {"mtp.fc.weight": torch.randn(3, 5, dtype=torch.float16), **load_file(directory / file)}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index["weight_map"]["mtp.fc.weight"] = file
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def load_whole(directory: Path, **options: object) -> tuple[PreTrainedModel, Mapping[str, object]]:
    """By the class that config.json names."""
    [name] = json.loads((directory / "config.json").read_text())["architectures"]
    loaded: tuple[PreTrainedModel, Mapping[str, object]] = getattr(transformers, name).from_pretrained(
        directory, output_loading_info=True, **options
    )
    return loaded


def files_of(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}


@pytest.mark.full
@pytest.mark.parametrize(("family", "dtype"), rotating(list(MODELS), ["bfloat16", "float32"], every=2))
def test_the_language_part_trains_and_all_else_is_kept(
    make_config: MakeConfig, base: Path, rows: Path, tmp_path: Path, family: str, dtype: str
) -> None:
    directory = tmp_path / "whole"
    whole = save_whole(directory, base, family, DTYPES[dtype])  # type: ignore[index]
    config = make_config(base=directory, dtype=dtype, sample_packing=False, max_steps=3)
    stderr = config.succeed()
    out = config.output

    before, after = files_of(directory), files_of(out)
    assert {file: list(each) for file, each in after.items()} == {file: list(each) for file, each in before.items()}
    names = [name for each in before.values() for name in each]
    kept = [name for name in names if any(word in name for word in ("vision", "visual", "projector", "mtp"))]
    assert len(kept) > 10
    assert stderr.count("not trained: ") == 1, stderr
    for file, tensors in before.items():
        for name, values in tensors.items():
            found = after[file][name]
            assert (found.dtype, found.shape) == (values.dtype, values.shape), name
            if name in kept:
                assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)), name
    assert json.loads((out / "config.json").read_text())["architectures"] == [_WHOLE[family]]

    loaded, findings = load_whole(out, dtype=DTYPES[dtype])  # type: ignore[index]
    assert not any(findings[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    data, recipe = config.load_data(), replace(config.recipe, model_class=type(whole))
    weights = dict(whole.named_parameters())
    trained = train_in_memory(whole.config, weights, [data.step(step) for step in range(3)], recipe)
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    found, changed = dict(loaded.named_parameters()), 0
    for name, values in trained.weights.items():
        assert torch.equal(found[name], values.to(recipe.dtype)), name
        changed += not torch.equal(values, weights[name].float())
    assert changed > 10

    original, _ = load_whole(directory, dtype=DTYPES[dtype])  # type: ignore[index]
    losses, targets = 0.0, 0
    for batch in data.step(0):
        with torch.no_grad():
            logits = original.eval()(input_ids=batch.input_ids).logits.float()
        losses += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        )
        targets += batch.num_targets
    assert config.metrics[0]["loss"] == pytest.approx(losses / targets, rel=1e-2 if dtype == "bfloat16" else 1e-6)

    works("verify", out)

    copy = Path(shutil.copytree(out, tmp_path / "copy", ignore=shutil.ignore_patterns("run")))
    commands: tuple[tuple[object, ...], ...] = (
        ("verify", copy),
        ("generate", copy, "What", "--max-new-tokens", "2"),
        ("eval", copy, rows),
    )
    for arguments in commands:
        works(*arguments)


@pytest.mark.full
@pytest.mark.parametrize(
    "modules", [(), r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj"], ids=str
)
@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen3_vl"])
def test_an_adapter_is_of_the_language_part(
    make_config: MakeConfig, base: Path, tmp_path: Path, family: str, modules: str | tuple[str, ...]
) -> None:
    """As axolotl's configs of such models have it, too: a regular expression for the language part."""
    directory = tmp_path / "whole"
    whole = save_whole(directory, base, family, torch.float32)
    keys = {"adapter": "lora", "lora_r": 2, "sample_packing": False, "max_steps": 3, "dtype": "float32"}
    config = make_config(base=directory, **keys, lora_target_modules=modules)
    config.succeed()
    found = load_file(config.output / "adapter_model.safetensors")
    assert found and not any(word in name for name in found for word in ("vision", "visual", "projector"))
    settings = json.loads((config.output / "adapter_config.json").read_text())
    data, recipe = config.load_data(), replace(config.recipe, model_class=type(whole))
    lora = {"r": 2, "lora_alpha": 2, "target_modules": modules or "all-linear"}
    lora["exclude_modules"] = settings["exclude_modules"]
    trained = train_in_memory(
        whole.config,
        dict(whole.named_parameters()),
        [data.step(step) for step in range(3)],
        replace(recipe, lora=(*lora.items(), ("task_type", "CAUSAL_LM"))),
    )
    adapters = {f"base_model.model.{n.replace('.default', '')}": v for n, v in trained.weights.items() if "lora_" in n}
    assert found.keys() == adapters.keys()
    assert [name for name, values in adapters.items() if not torch.equal(found[name], values)] == []
    works("verify", config)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys", [{"unfrozen_parameters": [".*vision.*"]}, {"frozen_parameters": [".*language.*", "lm_head"]}]
)
def test_parts_that_text_does_not_use_are_not_trained(
    make_config: MakeConfig, base: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    save_whole(tmp_path / "whole", base, "llava", torch.float32)
    ended = make_config(base=tmp_path / "whole", **keys).finetune()
    assert ended.code == 2 and "all parameters to train are in parts that text does not use" in ended.stderr, (
        ended.stderr
    )


def test_random_shares_for_a_whole_model(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """The run could draw the language part alone, and the class of config.json would not load that."""
    save_whole(tmp_path / "whole", base, "llava", torch.float32)
    ended = make_config(base=tmp_path / "whole", random_init=True).finetune()
    assert ended.code == 2
    assert "the other parts of LlavaForConditionalGeneration would have no weights" in ended.stderr


def test_a_whole_model_with_a_tensor_that_is_no_part_of_it(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    save_whole(tmp_path / "whole", base, "llava", torch.float32)
    rewrite(tmp_path / "whole", lambda tensors: tensors.update({"stray.weight": torch.ones(2)}))
    ended = make_config(base=tmp_path / "whole").finetune()
    assert ended.code == 2
    assert "stray.weight does not belong to LlavaForConditionalGeneration" in ended.stderr


def test_parts_of_the_configuration(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """They have the run's dtype and its special tokens, as in what transformers' Trainer saves."""
    directory = tmp_path / "whole"
    save_whole(directory, base, "gemma3", torch.float32)
    text = json.loads((directory / "config.json").read_text())
    for part in (text, text["text_config"], text["vision_config"]):
        del part["dtype"]
        part["torch_dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(text))
    special = {"eos_token": "<|user|>"}
    config = make_config(base=directory, dtype="bfloat16", sample_packing=False, max_steps=1, special_tokens=special)
    config.succeed()
    saved = json.loads((config.output / "config.json").read_text())
    model, _ = load_whole(directory, dtype=torch.bfloat16)
    align_special_tokens(model, AutoTokenizer.from_pretrained(directory, **special))
    model.save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert "torch_dtype" not in json.dumps(saved) and saved["dtype"] == "bfloat16"
    for key in ("text_config", "vision_config"):
        assert saved[key]["dtype"] == theirs[key]["dtype"] == "bfloat16"
    for key in ("eos_token_id", "pad_token_id"):
        assert saved["text_config"][key] == theirs["text_config"][key]
        assert saved.get(key) == theirs.get(key)
