"""Runs from checkpoints that are quantised already, against runs from the weights that their codes stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from ratel_cli.model.files.skeleton import DTYPES
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, file_hash, save_base, works
from tests.e2e.test_adapters import CHANGES, IN_PEFT, adapter_of
from tests.e2e.trained import assert_trained, in_plain_torch
from tests.engine.architectures import tiny_config
from tests.quantised import dequantised_weights, of_words
from tests.tiers import thinned

WEIGHTS = "model.safetensors"


def copied(base: Path, directory: Path, tensors: dict[str, torch.Tensor], settings: object = None) -> Path:
    """The base model with other weights in it."""
    directory.mkdir(exist_ok=True)
    for path in base.iterdir():
        if path.name != WEIGHTS:
            (directory / path.name).write_bytes(path.read_bytes())
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    if settings is not None:
        config = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def in_fp8(base: Path, directory: Path, dtype: str) -> tuple[Path, Path]:
    """The base model in fp8, and what transformers dequantises it to for a model in `dtype`."""
    tensors = dict[str, torch.Tensor]()
    for name, values in load_file(base / WEIGHTS).items():
        if name.endswith("proj.weight"):
            scale = values.float().abs().amax() / 448
            tensors[name] = (values.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
        else:
            tensors[name] = values
    quantised = copied(base, directory / "fp8", tensors, {"quant_method": "fp8", "weight_block_size": None})
    model = AutoModelForCausalLM.from_pretrained(quantised, dtype=getattr(torch, dtype))
    weights = {
        name: model.get_parameter(name).detach().contiguous() if name.endswith("proj.weight") else values
        for name, values in load_file(base / WEIGHTS).items()
    }
    return quantised, copied(base, directory / "plain", weights)


def in_nf4(base: Path, directory: Path, *, left_out: str = "none") -> Path:
    """The base model as bitsandbytes saves it in NF4, but for a module."""
    tensors = dict[str, torch.Tensor]()
    for name, values in load_file(base / WEIGHTS).items():
        if name.endswith("proj.weight") and left_out not in name:
            packed, state = bnb.functional.quantize_4bit(
                values.bfloat16(), blocksize=64, quant_type="nf4", compress_statistics=True
            )
            tensors[name] = packed
            tensors |= {f"{name}.{part}": each for part, each in state.as_dict(packed=True).items()}
        else:
            tensors[name] = values
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    settings |= {"llm_int8_skip_modules": ["lm_head", left_out]}
    return copied(base, directory / "nf4", tensors, settings)


def assert_same_adapters(runs: list[Config]) -> None:
    """Run both. The first one's adapter is that of the second, and is whole."""
    for each in runs:
        each.succeed()
    found, wanted = map(adapter_of, runs)
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
    assert "bit for bit" in works("verify", runs[0]).stdout


def assert_same_merged(runs: list[Config], folder: Path) -> None:
    """Merge both, into the folder. The first one's model has every tensor of the second's."""
    for name, each in zip(("merged", "merged-plain"), runs, strict=True):
        works("merge", each.output, "-o", folder / name)
    found, wanted = (load_file(folder / name / WEIGHTS) for name in ("merged", "merged-plain"))
    assert all(torch.equal(found[name], values) for name, values in wanted.items())


@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float32"], every=2))
def test_a_full_run_from_fp8_is_that_from_the_dequantised_weights(
    make_config: MakeConfig, base: Path, tmp_path: Path, dtype: str
) -> None:
    quantised, plain = in_fp8(base, tmp_path, dtype)
    before = file_hash(quantised / WEIGHTS)
    runs = [make_config(name, base=each, max_steps=3, dtype=dtype) for name, each in (("a", quantised), ("b", plain))]
    for each in runs:
        each.succeed()
    found, wanted = (each.exported for each in runs)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
    assert "quantization_config" not in json.loads((runs[0].output / "config.json").read_text())
    assert file_hash(quantised / WEIGHTS) == before
    assert "bit for bit" in works("verify", runs[0]).stdout


@pytest.mark.parametrize(
    "keys",
    thinned([{}, {"load_in_4bit": True}, {"load_in_8bit": True}], every=3, full_every=2),
    ids=["16 bit", "4 bit", "8 bit"],
)
def test_an_adapter_of_a_base_in_fp8(
    make_config: MakeConfig, base: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    quantised, plain = in_fp8(base, tmp_path, "bfloat16")
    keys = {**CHANGES, **keys, "dtype": "bfloat16"}
    runs = [make_config(name, base=each, **keys) for name, each in (("a", quantised), ("b", plain))]
    assert_same_adapters(runs)
    assert_same_merged(runs, tmp_path)


def in_words(
    base: Path,
    directory: Path,
    method: Literal["gptq", "awq"],
    *,
    by_activation: bool = False,
    left_out: str = "none",
    dtype: str | None = None,
) -> tuple[Path, Path]:
    """The base model with the matrices of its layers in GPTQ or AWQ, but for a module, and with their numbers in a
    dtype."""
    tensors, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for index, (name, values) in enumerate(load_file(base / WEIGHTS).items()):
        if name.endswith("proj.weight") and left_out not in name:
            rows, columns = values.shape
            parts, stood_for = of_words((rows, columns), method, size=16, by_activation=by_activation, seed=index)
            numbers[name] = stood_for if dtype is None else stood_for.to(DTYPES[dtype])
            tensors |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            tensors[name] = numbers[name] = values
    settings = {"quant_method": method, "bits": 4, "group_size": 16, "desc_act": by_activation, "version": "gemm"}
    settings["modules_to_not_convert"] = ["lm_head", left_out]
    return copied(base, directory / method, tensors, settings), copied(base, directory / "plain", numbers)


@pytest.mark.parametrize(
    ("method", "dtype", "by_activation", "left_out"),
    [
        pytest.param("gptq", "bfloat16", True, "none", marks=pytest.mark.full),
        pytest.param("gptq", "float32", False, "layers.1.mlp.down_proj", marks=pytest.mark.nightly),
        pytest.param("awq", "bfloat16", False, "layers.0.self_attn.q_proj", marks=pytest.mark.full),
    ],
)
def test_layers_of_gptq_and_awq_stay_packed_beside_an_adapter(
    make_config: MakeConfig,
    tmp_path: Path,
    method: Literal["gptq", "awq"],
    dtype: str,
    by_activation: bool,
    left_out: str,
) -> None:
    """With the bits of the numbers that their codes stand for, and half of the bytes or less, even in groups of 16."""
    quantised, plain = in_words(
        save_base(tmp_path / "wide", hidden_size=128),
        tmp_path,
        method,
        by_activation=by_activation,
        left_out=left_out,
        dtype=dtype,
    )
    runs = [make_config(name, base=each, **CHANGES, dtype=dtype) for name, each in (("a", quantised), ("b", plain))]
    planned = [as_json("plan", each)["memory"]["nvme_bytes"] for each in runs]
    assert_same_adapters(runs)
    sizes = [each.store.stat().st_size for each in runs]
    matrices = sum(values.numel() for name, values in load_file(plain / WEIGHTS).items() if "proj" in name)
    assert sizes[1] - sizes[0] > (1 if dtype == "bfloat16" else 2.9) * matrices
    assert abs((planned[1] - planned[0]) - (sizes[1] - sizes[0])) < 4096
    assert_same_merged(runs, tmp_path)
    works("clean", runs[0].output, "--store", "--yes")
    works("verify", runs[0].output)


@pytest.mark.full
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_plan_without_the_files_takes_config_json_s_word(
    make_config: MakeConfig, base: Path, tmp_path: Path, method: Literal["gptq", "awq"]
) -> None:
    quantised, _ = in_words(base, tmp_path, method, left_out="layers.1.mlp.up_proj")
    config = make_config(base=quantised, **CHANGES)
    with_files = as_json("plan", config)["memory"]
    (quantised / WEIGHTS).unlink()
    without = as_json("plan", config)["memory"]
    assert without["nvme_bytes"] == with_files["nvme_bytes"]


def test_a_base_in_gptq_that_does_not_fit_its_config(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    quantised, _ = in_words(base, tmp_path, "gptq")
    path = quantised / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 64}))
    ended = make_config(base=quantised, **CHANGES).finetune()
    assert_rejected(ended, 2, "has shape", "but the model needs")


@pytest.mark.full
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_gptq_and_awq_leave_as_it_is_may_stay_in_the_files(
    make_config: MakeConfig, base: Path, tmp_path: Path, method: Literal["gptq", "awq"]
) -> None:
    """Embedding, norms and head; the layers are in words there, and copied as bytes."""
    quantised, plain = in_words(base, tmp_path, method)
    keys = {**CHANGES, "dtype": "float32"}
    runs = [
        make_config("a", base=quantised, **keys),
        make_config("b", base=plain, **keys),
    ]
    said = runs[0].succeed("base_storage=in_place")
    assert "stay in the files of" in said and "are copied, as the files have them otherwise" in said
    runs[1].succeed()
    found, wanted = map(adapter_of, runs)
    assert all(torch.equal(found[name], values) for name, values in wanted.items())


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"peft_use_dora": True},
        {"load_in_4bit": True},
        pytest.param({"load_in_8bit": True}, marks=pytest.mark.nightly),
        # What is trained begins with the numbers in `dtype`, as those of any quantised file.
        {"lora_modules_to_save": ["up_proj"], "dtype": "float32"},
    ],
    ids=["dora", "4 bit", "8 bit", "trained whole"],
)
def test_what_needs_the_numbers_of_gptq_gets_them(
    make_config: MakeConfig, base: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    quantised, plain = in_words(base, tmp_path, "gptq")
    keys = {**CHANGES, "dtype": "bfloat16", **keys}
    assert_same_adapters([make_config(name, base=each, **keys) for name, each in (("a", quantised), ("b", plain))])


def in_mxfp4(base: Path, directory: Path) -> tuple[Path, Path]:
    """A gpt-oss whose experts are in MXFP4, with the tokenizer of the base model, and what transformers makes of it."""
    config = tiny_config("gpt_oss", vocab_size=400, intermediate_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "own")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, directory / "own")
    tensors, generator = load_file(directory / "own" / WEIGHTS), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(116, 122, shape, generator=generator, dtype=torch.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    quantised = copied(directory / "own", directory / "mxfp4", tensors, settings)
    model = AutoModelForCausalLM.from_pretrained(
        quantised, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    values = {name: each for name, each in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    values |= {name: each.contiguous() for name, each in model.state_dict().items() if f"{name}_blocks" in tensors}
    return quantised, copied(directory / "own", directory / "plain", values)


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "stays_packed"),
    [
        ({}, True),
        ({"load_in_4bit": True}, True),
        ({"lora_target_parameters": ["mlp.experts.down_proj"]}, False),
        ({"lora_modules_to_save": ["mlp.experts"]}, False),
    ],
    ids=["experts as they are", "and layers in NF4", "an adapter of experts", "experts trained whole"],
)
def test_experts_in_mxfp4_stay_packed_beside_an_adapter(
    make_config: MakeConfig, base: Path, tmp_path: Path, keys: dict[str, object], stays_packed: bool
) -> None:
    """With the bits of the numbers that they stand for: on the drives and on the link they take a quarter."""
    quantised, plain = in_mxfp4(base, tmp_path)
    keys = {**CHANGES, "lora_target_modules": ["q_proj", "v_proj"], **keys, "dtype": "bfloat16", "sequence_len": 16}
    runs = [make_config(name, base=each, **keys) for name, each in (("a", quantised), ("b", plain))]
    assert_same_adapters(runs)
    sizes = [each.store.stat().st_size for each in runs]
    assert (sizes[0] < sizes[1] - 40_000) is stays_packed
    assert_same_merged(runs, tmp_path)
    works("clean", runs[0].output, "--store", "--yes")
    works("verify", runs[0].output)


def test_a_base_in_nf4_keeps_its_codes(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """What bitsandbytes has quantised is not quantised again: the run is that from the model before."""
    quantised = in_nf4(base, tmp_path)
    runs = [
        make_config(name, base=each, **CHANGES, load_in_4bit=True, dtype="bfloat16")
        for name, each in (("a", quantised), ("b", base))
    ]
    assert_same_adapters(runs)


def test_layers_that_a_base_in_nf4_leaves_out_stay_as_they_are(
    make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    left_out = "layers.1.mlp.down_proj"
    config = make_config(base=in_nf4(base, tmp_path, left_out=left_out), **CHANGES, load_in_4bit=True, dtype="bfloat16")
    config.succeed()
    whole = load_file(base / WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    weights = dequantised_weights(model, whole, "nf4 double", torch.bfloat16)
    weights[f"model.{left_out}.weight"] = whole[f"model.{left_out}.weight"]
    assert_trained(config, in_plain_torch(config, base, weights=weights, lora=tuple(IN_PEFT.items())))
    works("verify", config)
