"""Checkpoints compared with `from_pretrained` bit for bit, and tensors that do not fit the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers, persistent_buffers
from ratel_cli.model.files.classes import name_classes
from ratel_cli.model.files.directory import WEIGHTS_NAME
from ratel_cli.model.files.initialise import RandomSource
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.spec import ModelSpec
from tests.library.encoders import encoder_config, saved_encoder
from tests.model.tiny import (
    FAMILIES,
    Tensors,
    assert_same,
    import_all,
    reference,
    rejection,
    rewrite,
    save_tiny,
    skeleton_of,
    tiny_model,
)
from tests.tiers import thinned


@pytest.mark.parametrize("family", thinned(list(FAMILIES), every=3, full_every=2))
def test_files_that_transformers_saved(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(import_all(tmp_path), reference(tmp_path))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_bfloat16_files(tmp_path: Path, family: str) -> None:
    tiny_model(family).bfloat16().save_pretrained(tmp_path)
    assert_same(import_all(tmp_path), reference(tmp_path))


def test_experts_of_mixed_precision(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)

    def mix(tensors: Tensors) -> None:
        for index, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to((torch.float16, torch.bfloat16, torch.float64)[index % 3])

    rewrite(tmp_path, mix)
    assert_same(import_all(tmp_path), reference(tmp_path))


def test_mixtral_as_the_hub_has_it(tmp_path: Path) -> None:
    """One tensor for each expert and projection, under block_sparse_moe."""
    model = tiny_model("mixtral")
    model.config.save_pretrained(tmp_path)
    old: Tensors = {}
    for name, tensor in model.state_dict().items():
        stem = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            gates, ups = tensor.chunk(2, dim=1)
            for expert in range(len(tensor)):
                old[stem.replace("gate_up_proj", f"{expert}.w1.weight")] = gates[expert].contiguous()
                old[stem.replace("gate_up_proj", f"{expert}.w3.weight")] = ups[expert].contiguous()
        elif name.endswith("experts.down_proj"):
            for expert in range(len(tensor)):
                old[stem.replace("down_proj", f"{expert}.w2.weight")] = tensor[expert].contiguous()
        else:
            old[stem] = tensor
    assert sum("block_sparse_moe.experts." in name for name in old) == 3 * 4 * 3
    save_file(old, tmp_path / WEIGHTS_NAME, metadata={"format": "pt"})
    found = import_all(tmp_path)
    assert_same(found, {name: parameter.detach() for name, parameter in model.named_parameters()})
    assert_same(found, reference(tmp_path))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_under_the_names_of_the_modules(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / WEIGHTS_NAME))
    assert_same(import_all(tmp_path), {name: parameter.detach() for name, parameter in model.named_parameters()})


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt", "llama"])
def test_without_the_prefix_of_the_base_model(tmp_path: Path, family: str) -> None:
    model = save_tiny(family, tmp_path)
    prefix = model.base_model_prefix + "."

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    rewrite(tmp_path, strip)
    assert_same(import_all(tmp_path), reference(tmp_path))


def test_head_of_its_own_in_a_family_that_ties(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path, tie_word_embeddings=False)
    found = import_all(tmp_path)
    assert not torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])
    assert_same(found, reference(tmp_path))


@pytest.mark.parametrize("names", [["lm_head.weight"], ["transformer.wte.weight", "lm_head.weight"]])
def test_tied_weight_saved_under_the_name_of_the_head_or_both(tmp_path: Path, names: list[str]) -> None:
    save_tiny("gpt2", tmp_path)

    def rename(tensors: Tensors) -> None:
        weight = tensors.pop("transformer.wte.weight")
        tensors.update({name: weight.clone() for name in names})

    rewrite(tmp_path, rename)
    assert_same(import_all(tmp_path), reference(tmp_path))


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))
    assert "ties lm_head.weight to transformer.wte.weight" in rejection(tmp_path)


def test_constants_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)

    def add(tensors: Tensors) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["transformer.h.0.attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["transformer.some_mask"] = torch.ones(3, dtype=torch.bool)

    rewrite(tmp_path, add)
    assert_same(import_all(tmp_path), reference(tmp_path))


def test_persistent_buffers(tmp_path: Path) -> None:
    model = save_tiny("glm4_moe", tmp_path)
    skeleton, spec = skeleton_of(tmp_path)
    wanted = persistent_buffers(model)
    assert [name.rsplit(".", 1)[-1] for name in wanted] == ["e_score_correction_bias"] * 2
    with CheckpointSource(tmp_path, skeleton, spec) as source:
        found = source.read_buffers()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    install_buffers(skeleton, found)
    installed = dict(skeleton.named_buffers())
    assert all(torch.equal(installed[name], wanted[name].to(installed[name].dtype)) for name in wanted)


def test_at_most_one_conversion_is_in_memory(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    skeleton, spec = skeleton_of(tmp_path)
    with CheckpointSource(tmp_path, skeleton, spec) as source:
        for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
            source.read(parameter.name, 0, 1)
            assert len(source._converted_tensors) <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), ["model.norm.weight is missing"]),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight is missing"]),
        (lambda t: t.update({"score.weight": torch.ones(2, 2)}), ["score.weight does not belong to Mixtral"]),
        (lambda t: t.update({"\x1b[2J": torch.ones(2)}), [r"\x1b[2J does not belong to"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), ["norm.weight has shape (31,)", "needs (32,)"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), ["dtype torch.int8"]),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), ["are the same parameter of the model"]),
        (lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"), ["experts.0.w2.weight", "missing"]),
        (lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight"), ["experts.0.w1.weight", "missing"]),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.0.w2.weight": torch.ones(3, 3)}),
            ["layers.0", "w2.weight", "wrong shape"],
        ),
        (
            lambda t: t.update({"model.layers.0.block_sparse_moe.experts.0.w2.weight": torch.ones(3).to(torch.int8)}),
            ["layers.0", "dtype torch.int8"],
        ),
        (lambda t: t.clear(), ["model.embed_tokens.weight is missing", "30 in all"]),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path: Path, change: Callable[[Tensors], object], words: list[str]) -> None:
    save_tiny("mixtral", tmp_path)
    rewrite(tmp_path, change)
    message = rejection(tmp_path)
    assert str(tmp_path) in message and all(word in message for word in words), message


def classifier_of(directory: Path) -> tuple[PreTrainedModel, ModelSpec]:
    """A skeleton that classifies, for the files of a model of masked tokens."""
    config = encoder_config("bert")
    name_classes(config, ["no", "yes"])
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="sdpa", task="classification")
    return skeleton, find_blocks(skeleton, name="bert", task="classification").spec


def test_a_head_that_the_files_do_not_have_is_drawn(tmp_path: Path) -> None:
    """By the model's own initialiser, the same again from the same seed; the rest is read, and the export has both."""
    saved_encoder(tmp_path, "bert", "masked_lm")
    skeleton, spec = classifier_of(tmp_path)
    found = []
    for seed in (1, 1, 2):
        with CheckpointSource(
            tmp_path, skeleton, spec, new_head=RandomSource(skeleton, seed, "classification")
        ) as source:
            assert set(source.drawn) == {
                "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
            }  # fmt: skip
            found.append(source.read("classifier.weight", 0, 64))
            assert not source.kept_tensors()
            layout = source.layout("float32")
            read = source.read("bert.encoder.layer.0.attention.self.query.weight", 0, 32 * 32)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert 0.01 < float(found[0].std()) < 0.03
    wanted = load_file(tmp_path / WEIGHTS_NAME)["bert.encoder.layer.0.attention.self.query.weight"]
    assert torch.equal(read, wanted.reshape(-1))
    assert {tensor.name for shard in layout.shards for tensor in shard.tensors} == set(spec_names(spec))
    assert layout.settings["id2label"] == {"0": "no", "1": "yes"}


def test_a_layer_that_the_files_do_not_have_is_not_drawn(tmp_path: Path) -> None:
    saved_encoder(tmp_path, "bert", "masked_lm")
    rewrite(tmp_path, lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.weight"))
    skeleton, spec = classifier_of(tmp_path)
    with pytest.raises(BadInput, match=r"tensor .* is missing"):
        CheckpointSource(tmp_path, skeleton, spec, new_head=RandomSource(skeleton, 1, "classification"))


def spec_names(spec: ModelSpec) -> list[str]:
    return [each.name for block in spec.blocks for each in block.parameters]
