"""Quantised checkpoints: what is read of them is what the format's own library makes of them, bit for bit.

The oracles are transformers' dequantisation (fp8, MXFP4), compressed-tensors' compressors, bitsandbytes' kernels, and
for GPTQ and AWQ the definition of the format, element by element.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast
from unittest import mock

import bitsandbytes as bnb
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ratel_cli.errors import BadInput
from ratel_cli.model.export.reload import load_language_model
from ratel_cli.model.files import quantised
from ratel_cli.model.files.directory import WEIGHTS_NAME
from ratel_cli.model.files.quantised import QuantisedLayout, dequantised
from ratel_cli.model.files.quantised_files import dequantised_files
from ratel_cli.model.files.shards import ShardReader, TensorFile
from tests.model.tiny import Tensors, gather, import_all, rejection, save_tiny
from tests.quantised import of_words

Change = Callable[[str, torch.Tensor], Tensors]
"""What the files have instead of a matrix of a layer."""
SHAPES = ((1, 64), (3, 65), (64, 128), (129, 192), (1030, 1056))
"""Of matrices: a row, odd sizes, aligned, aligned + 1, more than one part."""


def quantise_layers(directory: Path, settings: dict[str, object], change: Change) -> None:
    """Let `change` take the place of each matrix of a linear layer, and say so in config.json."""
    tensors, changed = gather(directory), Tensors()
    for name, values in tensors.items():
        is_matrix = name.endswith("proj.weight")
        changed |= change(name, values) if is_matrix else {name: values.to(torch.bfloat16)}
    save_file(changed, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def of_transformers(directory: Path) -> Tensors:
    """The parameters that transformers loads, in bf16."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def read_one(path: Path, tensors: Tensors, settings: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
    """`layer.weight` from a file with these tensors, read in ranges that fit no part."""
    save_file(tensors, path / WEIGHTS_NAME)
    with ShardReader(path / WEIGHTS_NAME) as shard:
        [file], _ = dequantised_files([shard], settings, dtype)
        return read_in_ranges(file, "layer.weight")


def read_in_ranges(file: TensorFile, name: str) -> torch.Tensor:
    entry = file.tensors[name]
    step = max(1, entry.num_elements // 3 - 1)
    parts = [
        file.read(name, start, min(start + step, entry.num_elements)) for start in range(0, entry.num_elements, step)
    ]
    found = torch.cat(parts).view(entry.shape)
    assert found.dtype == entry.dtype
    return found


def block_scales(values: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes in fp8 of a matrix, and a scale for each block."""
    largest = values.view(values.shape[0] // rows, rows, -1, columns).abs().amax(dim=(1, 3))
    scales = largest / 448.0
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return (values / spread).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_fp8_in_blocks_is_what_transformers_dequantises(tmp_path: Path, family: str) -> None:
    changes = {"intermediate_size": 48} if family == "llama" else {}
    save_tiny(family, tmp_path, **changes)

    def change(name: str, values: torch.Tensor) -> Tensors:
        codes, scales = block_scales(values, 8, 8)
        stem = name.removesuffix("weight")
        return {name: codes, f"{stem}weight_scale_inv": scales, f"{stem}activation_scale": torch.ones(1)}

    settings: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    quantise_layers(tmp_path, settings, change)
    found, wanted = import_all(tmp_path), of_transformers(tmp_path)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], values.float()) for name, values in wanted.items())


@pytest.mark.parametrize("kind", ["e8m0", "bytes", "whole matrix", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_of_fp8_in_other_forms(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    codes = values.to(torch.float8_e4m3fn)
    shape = {"whole matrix": (1,), "rows": (64, 1)}.get(kind, (4, 3))
    exponents = torch.randint(120, 132, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    scales = exponents.view(torch.float8_e8m0fnu) if kind == "e8m0" else exponents
    if kind in ("whole matrix", "rows"):
        scales = exponents.float() / 1000
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scales}
    assert torch.equal(read_one(tmp_path, tensors, {"quant_method": "fp8"}, dtype), wanted)


def test_blocks_that_do_not_divide_the_matrix(tmp_path: Path) -> None:
    """576 rows in blocks of 128, as DeepSeek-V3 has them: the last block is half as high."""
    codes = torch.randn(576, 200, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    wanted = torch.empty(576, 200)
    for row in range(576):
        for first in range(0, 200, 128):
            columns = slice(first, first + 128)
            wanted[row, columns] = codes[row, columns].float() * scales[row // 128, first // 128]
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scales}
    settings: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert torch.equal(read_one(tmp_path, tensors, settings, torch.float32), wanted)


def test_experts_of_fp4_beside_layers_of_fp8(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed = torch.randint(-128, 128, (64, 48), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scales = torch.randint(120, 130, (64, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    scales = scales.view(torch.float8_e8m0fnu)
    wanted = Fp8Dequantize(None)._dequantize_one(packed, scales)
    tensors = {"layer.weight": packed, "layer.scale": scales}
    assert torch.equal(read_one(tmp_path, tensors, {"quant_method": "fp8"}, torch.bfloat16), wanted)


def test_experts_in_mxfp4_are_what_transformers_dequantises(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=96, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    tensors, generator = gather(tmp_path), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
    save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / WEIGHTS_NAME)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    saved = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    found, wanted = import_all(tmp_path), of_transformers(tmp_path)
    # What is not quantised is in fp32 in these files, and rounded where it is loaded.
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name].bfloat16(), values.bfloat16()) for name, values in wanted.items())
    assert sum("experts" in name and "bias" not in name for name in wanted) == 4


def test_the_settings_under_their_earlier_name(tmp_path: Path) -> None:
    """As compressed-tensors wrote them once."""
    save_tiny("llama", tmp_path)

    def in_fp8(name: str, values: torch.Tensor) -> Tensors:
        scale = values.float().abs().amax(dim=1, keepdim=True) / 448
        return {name: (values.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    quantise_layers(tmp_path, in_one_group("float-quantized", weights), in_fp8)
    wanted = import_all(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"quantization_config"', '"compression_config"'))
    found, loaded = import_all(tmp_path), dict(load_language_model(tmp_path, dtype=torch.bfloat16).named_parameters())
    assert set(found) == set(wanted) and any(name.endswith("proj.weight") for name in found)
    for name, values in wanted.items():
        assert torch.equal(found[name], values) and torch.equal(loaded[name].float(), values.bfloat16().float())


def in_one_group(form: str, weights: object) -> dict[str, object]:
    """The settings of compressed-tensors for all linear layers."""
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def compressor_of(form: str) -> type[BaseCompressor]:
    return cast(type[BaseCompressor], BaseCompressor.get_value_from_registry(form))


SCHEMES: dict[str, tuple[str, dict[str, object]]] = {
    "fp8 of a channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 of a tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 of blocks": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}
    ),
    "int8 of a channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 with zero points": (
        "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    ),
    "int4 of a group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int3 of a channel": ("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}),
    "int8 in words": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compressed_tensors(tmp_path: Path, scheme: str, scale_dtype: torch.dtype) -> None:
    form, arguments = SCHEMES[scheme]
    args = QuantizationArgs(**arguments)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 96, generator=generator).to(scale_dtype)
    grid = {"channel": (64, 1), "tensor": (1,), "block": (2, 3), "group": (64, 3)}[str(arguments["strategy"])]
    state = {"weight": weight, "weight_scale": (0.01 + torch.rand(grid, generator=generator) / 10).to(scale_dtype)}
    if arguments.get("symmetric") is False:
        state["weight_zero_point"] = torch.randint(-3, 4, grid, generator=generator, dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    saved = compressor_of(form).compress(state, scheme)
    wanted = compressor_of(form).decompress(saved, scheme)["weight"]
    settings = in_one_group(form, json.loads(args.model_dump_json()))
    found = read_one(tmp_path, of_layer(saved), settings, scale_dtype)
    assert wanted.dtype == scale_dtype and torch.equal(found, wanted)


def test_nvfp4_and_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    for form, group in (("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)):
        args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group" if group == 16 else "group",
                                group_size=group)  # fmt: skip
        packed = torch.randint(0, 256, (64, 48), generator=generator, dtype=torch.uint8)
        scales = torch.rand(64, 96 // group, generator=generator).add(0.5).to(torch.float8_e4m3fn)
        state = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": torch.tensor([7.3])}
        if group == 32:
            exponents = torch.randint(120, 130, (64, 3), generator=generator, dtype=torch.uint8)
            state = {"weight_packed": packed, "weight_scale": exponents}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        wanted = compressor_of(form).decompress(dict(state), scheme)["weight"]
        settings: dict[str, object] = {"quant_method": "compressed-tensors", "format": form}
        assert torch.equal(read_one(tmp_path, of_layer(state), settings, torch.float32), wanted.detach().float()), form


def of_bitsandbytes(values: torch.Tensor, form: str) -> tuple[Tensors, torch.Tensor]:
    """The tensors that bitsandbytes saves of a matrix as `layer.weight`, and what it dequantises them to."""
    if form == "int8":
        codes, magnitudes, _ = bnb.functional.int8_vectorwise_quant(values.half())
        saved = {"layer.weight": codes, "layer.SCB": magnitudes, "layer.weight_format": torch.tensor(0).byte()}
        return saved, codes.to(values.dtype).mul_(magnitudes.unsqueeze(1).mul(1.0 / 127.0))
    packed, state = bnb.functional.quantize_4bit(
        values, blocksize=64, quant_type=form[:3], compress_statistics=form.endswith("double")
    )
    parts = {f"layer.weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    return {"layer.weight": packed, **parts}, bnb.functional.dequantize_4bit(packed, state).reshape(values.shape)


@pytest.mark.parametrize("form", ["nf4", "nf4 double", "fp4", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_files_of_bitsandbytes(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        tensors, wanted = of_bitsandbytes(values, form)
        assert torch.equal(read_one(tmp_path, tensors, {"quant_method": "bitsandbytes"}, dtype), wanted), shape


@pytest.mark.parametrize("form", ["nf4", "nf4 double", "int8"])
def test_codes_of_bitsandbytes_are_kept(tmp_path: Path, form: str) -> None:
    """A base that is quantised in the form that a config asks for keeps its bytes: it is not quantised once more."""
    from ratel_cli.model.files.quantised import QUANTISED_FORMS, quantise

    for shape in SHAPES[2:]:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(8)).bfloat16()
        tensors, _ = of_bitsandbytes(values, form)
        save_file(tensors, tmp_path / WEIGHTS_NAME)
        with ShardReader(tmp_path / WEIGHTS_NAME) as shard:
            _, coded = dequantised_files([shard], {"quant_method": "bitsandbytes"}, torch.bfloat16)
            found = coded.take("layer.weight")
            assert found is not None
            for each in QUANTISED_FORMS:
                layout = QuantisedLayout(each, *shape)
                data = found.layout_bytes(layout)
                assert (data is not None) == (each == form)
                assert data is None or torch.equal(data, quantise(values, each)), (shape, each)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [True, False], ids=["in order", "by activation"])
def test_gptq(tmp_path: Path, bits: int, version: Literal["gptq", "gptq_v2"], *, is_ordered: bool) -> None:
    parts, wanted = of_words((64, 128), version, size=32, by_activation=not is_ordered, seed=9, bits=bits)
    settings: dict[str, object] = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    assert torch.equal(read_one(tmp_path, of_layer(parts), settings, torch.float16), wanted)
    check_packed(tmp_path, settings, wanted if bits == 4 else None)


def of_layer(parts: Tensors) -> Tensors:
    return {f"layer.{name}": each.contiguous() for name, each in parts.items()}


def check_packed(directory: Path, settings: Mapping[str, object], wanted: torch.Tensor | None) -> None:
    """The matrix of the files stays in half a byte for each element, and has the same numbers in any dtype. `wanted`
    None: it does not stay so."""
    with ShardReader(directory / WEIGHTS_NAME) as shard:
        _, coded = dequantised_files([shard], settings, torch.float16)
        found = coded.take("layer.weight")
        assert found is not None
        layout = found.layout
        if wanted is None:
            assert layout is None
            return
        assert layout is not None and layout.shape == wanted.shape
        data = found.layout_bytes(layout)
        assert found.layout_bytes(replace(layout, num_groups=layout.num_groups + 1)) is None
        assert found.layout_bytes(QuantisedLayout("nf4", *wanted.shape)) is None
    assert data is not None and len(data) == layout.num_bytes < 0.7 * wanted.numel()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for at_once in (1, 100, 1 << 22):  # elements that are expanded together
            with mock.patch.object(quantised, "EXPANDED_ELEMENTS", at_once):
                assert torch.equal(dequantised(data, layout, dtype), wanted.to(dtype))


def test_scales_in_another_dtype_are_read_as_numbers(tmp_path: Path) -> None:
    settings: dict[str, object] = {"quant_method": "gptq", "bits": 4}
    save_file({**gptq_tensors(), "layer.scales": torch.ones(4, 64).bfloat16()}, tmp_path / WEIGHTS_NAME)
    check_packed(tmp_path, settings, None)


def test_awq(tmp_path: Path) -> None:
    parts, wanted = of_words((64, 128), "awq", size=32, by_activation=False, seed=10)
    settings: dict[str, object] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    assert torch.equal(read_one(tmp_path, of_layer(parts), settings, torch.float16), wanted)
    check_packed(tmp_path, settings, wanted)


def fp8_tensors() -> Tensors:
    codes, scales = block_scales(torch.randn(64, 96, generator=torch.Generator().manual_seed(1)), 32, 32)
    return {"layer.weight": codes, "layer.weight_scale_inv": scales}


def gptq_tensors() -> Tensors:
    return {
        "layer.qweight": torch.zeros(16, 64, dtype=torch.int32),
        "layer.qzeros": torch.zeros(4, 8, dtype=torch.int32),
        "layer.scales": torch.ones(4, 64).half(),
        "layer.g_idx": torch.arange(128).int() // 32,
    }


def nf4_tensors() -> Tensors:
    return of_bitsandbytes(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16(), "nf4 double")[0]


def packed_tensors() -> Tensors:
    return {
        "layer.weight_packed": torch.zeros(64, 12, dtype=torch.int32),
        "layer.weight_scale": torch.ones(64, 3),
        "layer.weight_shape": torch.tensor([64, 96]),
    }


def expert_tensors() -> Tensors:
    return {
        "up_proj_blocks": torch.zeros(2, 64, 3, 16, dtype=torch.uint8),
        "up_proj_scales": torch.zeros(2, 64, 3, dtype=torch.uint8),
    }


GPTQ: dict[str, object] = {"quant_method": "gptq", "bits": 4}
_OF_FORMATS: dict[str, tuple[Callable[[], Tensors], dict[str, object]]] = {
    "fp8": (fp8_tensors, {"quant_method": "fp8"}),
    "gptq": (gptq_tensors, GPTQ),
    "nf4": (nf4_tensors, {"quant_method": "bitsandbytes"}),
    "packed": (packed_tensors, {"quant_method": "compressed-tensors"}),
    "experts": (expert_tensors, {"quant_method": "mxfp4"}),
    "gptq in 3 bits": (gptq_tensors, GPTQ | {"bits": 3}),
    "another version of AWQ": (gptq_tensors, {"quant_method": "awq", "bits": 4, "version": "gemv"}),
    "an unknown format": (fp8_tensors, {"quant_method": "vptq"}),
    "no format": (fp8_tensors, {}),
    "nothing of the format": (fp8_tensors, GPTQ),
}
_UNFIT: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("fp8", "layer.weight_scale_inv", torch.ones(5, 7), "does not fit the matrix"),
    ("fp8", "layer.weight", torch.ones(9).to(torch.float8_e4m3fn), "are matrices"),
    ("gptq", "layer.qzeros", None, "tensor layer.qzeros is missing"),
    ("gptq", "layer.scales", torch.ones(4, 32).half(), "does not fit"),
    ("gptq", "layer.g_idx", torch.zeros(7).int(), "it must be (128,)"),
    ("gptq", "layer.g_idx", torch.full((128,), 4).int(), "there are 4"),
    ("gptq", "layer.qzeros", torch.zeros(4, 7).int(), "it must be (4, 8)"),
    ("gptq", "layer.qweight", torch.ones(16, 64), "words of 32 bits"),
    ("packed", "layer.weight_zero_point", torch.zeros(7, 3).int(), "does not fit the matrix"),
    ("packed", "layer.weight_g_idx", torch.full((96,), 3).int(), "there are 3"),
    ("packed", "layer.weight_global_scale", torch.ones(2), "it must be one number"),
    ("packed", "layer.weight_shape", torch.tensor([64, 0]), "does not fit codes"),
    ("packed", "layer.weight_shape", torch.tensor([64, 1000]), "do not fit 1000 columns"),
    ("packed", "layer.weight_shape", None, "layer.weight_shape is"),
    ("nf4", "layer.weight.nested_absmax", None, "is not the state"),
    ("nf4", "layer.weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte(), "is not the state"),
    ("nf4", "layer.weight.absmax", torch.zeros(9).byte(), "needs 128"),
    ("nf4", "layer.weight", torch.zeros(9, 1).byte(), "needs more"),
    ("experts", "up_proj_scales", torch.zeros(3, 64, 3).byte(), "it must be bytes"),
    ("experts", "up_proj_blocks", torch.zeros(64, 3, 16).byte(), "of 4 dimensions"),
    ("gptq in 3 bits", "none", None, "Ratel reads 2, 4 and 8"),
    ("another version of AWQ", "none", None, "is not read"),
    ("an unknown format", "none", None, "which Ratel does not read"),
    ("no format", "none", None, "an unnamed format"),
    ("nothing of the format", "none", None, "but no file has"),
]
"""A tensor of a format that is another one, or is missing, and what is said."""


@pytest.mark.parametrize(("form", "name", "values", "message"), _UNFIT)
def test_what_does_not_fit_is_found_when_the_files_are_opened(
    tmp_path: Path, form: str, name: str, values: torch.Tensor | None, message: str
) -> None:
    make, settings = _OF_FORMATS[form]
    tensors = make()
    tensors.pop(name, None)
    if values is not None:
        tensors[name] = values
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with ShardReader(tmp_path / WEIGHTS_NAME) as shard, pytest.raises(BadInput) as raised:
        dequantised_files([shard], settings, torch.bfloat16)
    assert message in raised.value.message and raised.value.message.isprintable()


def test_a_matrix_and_its_scales_in_different_files(tmp_path: Path) -> None:
    tensors = fp8_tensors()
    wanted = read_one(tmp_path, tensors, {"quant_method": "fp8"}, torch.float32)
    save_file({"layer.weight": tensors["layer.weight"]}, tmp_path / "1.safetensors")
    save_file({"layer.weight_scale_inv": tensors["layer.weight_scale_inv"]}, tmp_path / "2.safetensors")
    with ShardReader(tmp_path / "1.safetensors") as one, ShardReader(tmp_path / "2.safetensors") as other:
        files, _ = dequantised_files([other, one], {"quant_method": "fp8"}, torch.float32)
        assert [list(each.tensors) for each in files] == [[], ["layer.weight"]]
        assert torch.equal(read_in_ranges(files[1], "layer.weight"), wanted)


def test_the_memory_of_one_tensor_at_a_time(tmp_path: Path) -> None:
    tensors = {f"{name}.{part}": each for name in "ab" for part, each in
               (("weight", fp8_tensors()["layer.weight"]), ("weight_scale_inv", torch.ones(2, 3)))}  # fmt: skip
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with ShardReader(tmp_path / WEIGHTS_NAME) as shard:
        [file], coded = dequantised_files([shard], {"quant_method": "fp8"}, torch.float32)
        for name in ("a.weight", "b.weight"):
            file.read_whole(name)
        kept = {each.entry.name: each._last is not None or bool(each._kept) for each in coded.tensors()}
        assert kept == {"a.weight": False, "b.weight": True}
        coded.forget()
        assert not any(each._last is not None or each._kept for each in coded.tensors())


def test_a_config_without_its_tensors_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "but no file has the tensors of that format" in rejection(tmp_path)
