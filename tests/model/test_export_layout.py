"""Exports have the names, shapes, dtypes and files of the base model; the oracle is transformers' `save_pretrained`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.model.export.card import plain_card
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.export.export_contents import ContentReader
from ratel_cli.model.export.export_layout import (
    ExportLayout,
    LaidOutTensor,
    Shard,
    TrainedContent,
    layout_of_model,
)
from ratel_cli.model.export.export_weights import ExportFiles, export_model
from ratel_cli.model.export.sidecars import BaseSidecars
from ratel_cli.model.export.staging import Destination
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.sizes import DtypeName
from scripts import family_configs
from tests.model.tiny import Tensors, imported_store, rewrite, tiny_model
from tests.tiers import sample

RENAMED = [
    "mixtral", "qwen2_moe", "granitemoe", "hrm_text", "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam",
    "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "granitemoehybrid",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_text", "jamba", "kolibri1", "laguna", "lfm3",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "solar_open",
]  # fmt: skip
"""Families whose tensors have other names, or other shapes, in files than in modules."""


EMBEDDING = "model.embed_tokens.weight"


class Given:
    """Weights that a store begins with, by name."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[name].detach().reshape(-1)[start:stop].to(torch.float32)


def small_model(family: str) -> PreTrainedModel:
    config = family_configs.tiny_config(family)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Other values in every parameter, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(generator=generator))


def one_block(model: PreTrainedModel) -> ModelSpec:
    """All parameters in one block, so that families which cannot be streamed are tested too."""
    parameters = [(name, tuple(each.shape), True) for name, each in model.named_parameters()]
    block = lay_out_block(dtype="bfloat16", index=0, name="all", parameters=parameters)
    name = type(model).__name__
    return ModelSpec(
        name="m",
        architecture=name,
        blocks=(block,),
        segment_names=("all",),
        dtype="bfloat16",
        hidden_size=32,
        vocab_size=96,
    )


def files_of(directory: Path) -> dict[str, Tensors]:
    return {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}


def export(directory: Path, base: Path, trained: PreTrainedModel, dtype: DtypeName) -> ExportLayout:
    """Export the weights of `trained`, with the layout of `base`, to `directory/out`."""
    skeleton = build_skeleton(trained.config, dtype=dtype, attn_implementation="eager")
    spec = one_block(skeleton)
    with CheckpointSource(base, skeleton, spec) as source:
        layout = source.layout(dtype)
        write(directory, base, trained, spec, layout, dtype)
    return layout


def write(
    directory: Path, base: Path, trained: PreTrainedModel, spec: ModelSpec, layout: ExportLayout, dtype: DtypeName
) -> None:
    given = Given(dict(trained.named_parameters()))
    with imported_store(directory / "store", spec, given) as (store, pool):
        export_model(
            spec,
            store.current(),
            pool,
            ExportFiles(layout, BaseSidecars(base_dir=base)),
            Destination(directory=directory / "out", run="/runs/a"),
            dtype=dtype,
            card=plain_card(spec),
            group_elements=4096,
        )


def names_of(directory: Path) -> dict[str, list[str]]:
    return {name: list(tensors) for name, tensors in files_of(directory).items()}


def assert_same_tensors(found: Path, wanted: Path) -> None:
    ours, theirs = ({k: v for each in files_of(path).values() for k, v in each.items()} for path in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype and torch.equal(ours[name], values), name


@pytest.mark.parametrize("family", sample(RENAMED, every=12))
def test_the_files_are_those_that_transformers_saves(tmp_path: Path, family: str) -> None:
    """After training: what `save_pretrained` writes of a model that was loaded from the base and trained."""
    small_model(family).save_pretrained(tmp_path / "base", max_shard_size="60KB")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    redraw(trained, 1)
    trained.save_pretrained(tmp_path / "wanted", max_shard_size="60KB")
    export(tmp_path, tmp_path / "base", trained, "float32")
    assert_same_tensors(tmp_path / "out", tmp_path / "wanted")
    assert names_of(tmp_path / "out") == names_of(tmp_path / "base")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_base_under_the_names_of_the_modules_keeps_them(tmp_path: Path, family: str) -> None:
    trained = tiny_model(family)
    trained.save_pretrained(tmp_path / "base", save_original_format=False)
    redraw(trained, 1)
    trained.save_pretrained(tmp_path / "wanted", save_original_format=False)
    export(tmp_path, tmp_path / "base", trained, "float32")
    assert_same_tensors(tmp_path / "out", tmp_path / "wanted")
    assert any(name.endswith("experts.gate_up_proj") for name in names_of(tmp_path / "out")["model.safetensors"])


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_model_without_files_is_laid_out_as_transformers_would(tmp_path: Path, family: str) -> None:
    trained = tiny_model(family)
    trained.save_pretrained(tmp_path / "base")
    skeleton = build_skeleton(trained.config, dtype="bfloat16", attn_implementation="eager")
    spec = one_block(skeleton)
    layout = layout_of_model(skeleton, spec, "float32")
    write(tmp_path, tmp_path / "base", trained, spec, layout, "float32")
    assert_same_tensors(tmp_path / "out", tmp_path / "base")


@pytest.mark.parametrize(("stored", "run"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")])
def test_trained_tensors_have_the_dtype_of_the_run_and_all_others_that_of_their_file(
    tmp_path: Path, stored: DtypeName, run: DtypeName
) -> None:
    """GLM's correction of scores is a buffer, which no step changes."""
    trained = tiny_model("glm4_moe")
    trained.to(DTYPES[stored]).save_pretrained(tmp_path / "base", max_shard_size="60KB")  # type: ignore[no-untyped-call]
    export(tmp_path, tmp_path / "base", trained, run)
    base, out = files_of(tmp_path / "base"), files_of(tmp_path / "out")
    assert names_of(tmp_path / "out") == names_of(tmp_path / "base")
    for file, tensors in base.items():
        for name, values in tensors.items():
            dtype = values.dtype if name.endswith("e_score_correction_bias") else DTYPES[run]
            assert out[file][name].dtype == dtype and torch.equal(out[file][name], values.to(dtype)), name


def test_what_is_stored_twice_is_written_twice(tmp_path: Path) -> None:
    """A base that has a tied matrix under both names."""
    trained = tiny_model("llama", tie_word_embeddings=True)
    trained.save_pretrained(tmp_path / "base")
    rewrite(tmp_path / "base", lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    redraw(trained, 1)
    export(tmp_path, tmp_path / "base", trained, "float32")
    out = files_of(tmp_path / "out")["model.safetensors"]
    assert torch.equal(out["lm_head.weight"], out[EMBEDDING])
    assert torch.equal(out[EMBEDDING], trained.get_input_embeddings().weight)  # type: ignore[no-untyped-call]


def test_no_expert_is_held_while_others_are_written(tmp_path: Path) -> None:
    """The experts of a base are views of one parameter, so that memory is one group whatever their number."""
    trained = tiny_model("mixtral")
    trained.save_pretrained(tmp_path / "base")
    layout = export(tmp_path, tmp_path / "base", trained, "float32")
    contents = [tensor.content for shard in layout.shards for tensor in shard.tensors]
    assert all(isinstance(content, TrainedContent) for content in contents)


def test_elements_in_another_order(tmp_path: Path) -> None:
    """Views whose elements are not one after another, in rows and at once; sizes 0, 1, a group, a group and more."""
    trained = tiny_model("llama")
    name, parameter = next((name, each) for name, each in trained.named_parameters() if each.shape == (96, 32))
    trained.save_pretrained(tmp_path / "base")
    spec, flat = one_block(trained), parameter.detach().reshape(-1)
    views = [
        flat.as_strided(shape, strides, offset)
        for shape, strides, offset in [
            ((32, 96), (1, 32), 0), ((3, 32, 32), (1024, 1, 32), 0), ((0, 4), (1, 4), 0), ((1,), (1,), 3071),
            ((), (), 5), ((4, 7), (700, 100), 11), ((2, 3, 4), (1, 2, 6), 1), ((96, 31), (32, 1), 1),
        ]
    ]  # fmt: skip
    tensors = [
        LaidOutTensor(
            name=str(number),
            dtype=torch.float32,
            shape=tuple(view.shape),
            content=TrainedContent(parameter=name, offset=int(view.storage_offset()), strides=view.stride()),
        )
        for number, view in enumerate(views)
    ]
    layout = ExportLayout(
        shards=(Shard(file_name="model.safetensors", tensors=tuple(tensors)),), architecture="X", dtype="float32"
    )
    given = Given(dict(trained.named_parameters()))
    with imported_store(tmp_path / "store", spec, given) as (store, pool):
        for group_elements in (2048, 4096, 1 << 20):
            with StoredWeights(spec, store.current(), pool, "float32", group_elements=group_elements) as weights:
                contents = ContentReader(weights, group_elements=group_elements)
                for tensor, view in zip(layout.shards[0].tensors, views, strict=True):
                    parts = [part.clone() for part in contents.read(tensor)]
                    found = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
                    assert torch.equal(found, view.reshape(-1)), (tensor.name, group_elements)
