"""Numbers that float16 cannot hold are refused by the name of their tensor: plain weights, codes, scales, exports."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from ratel_cli.errors import BadInput, Diverged
from ratel_cli.model.files.quantised import QuantisedLayout, quantise
from ratel_cli.model.files.quantised_model import QuantisedWeight, QuantisingSource
from ratel_cli.model.files.quantised_modules import QuantisedLinear, quantise_experts
from ratel_cli.sizes import DtypeName, QuantisedForm
from tests.model.test_export_weights import in_store
from tests.model.test_import_weights import CountingSource, made_up_spec
from tests.model.test_quantised_files import read_one
from tests.model.tiny import Tensors, imported_store
from tests.quantised import of_words

BEYOND = "tensor layer.weight has the value {}, which is beyond the range of {}"


class OneMatrix:
    """A source that has the same matrix under any name."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.values.reshape(-1)[start:stop].float()


def _plain(layer: nn.Module) -> nn.Module:
    """A model with this layer alone."""
    plain = nn.Module()
    plain.register_module("layer", layer)
    return plain


@pytest.mark.parametrize("number", [65519.9, 65520.0, 70000.0, -1e38, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_weight_beyond_the_range_is_not_imported(tmp_path: Path, dtype: DtypeName, number: float) -> None:
    """What rounds to the largest number of float16 is none."""
    spec = made_up_spec(dtype)
    source = CountingSource(spec)
    source.values["p2048"][2047] = number
    if dtype == "float16" and number != 65519.9:
        what = r"tensor p2048 has the value .*, which is beyond the range of float16 \(65504 at most\)"
        if math.isnan(number):
            what = "tensor p2048 has the value nan$"
        with pytest.raises(BadInput, match=what), imported_store(tmp_path, spec, source):
            pass
    else:
        with imported_store(tmp_path, spec, source) as (store, _):
            assert store.progress.step == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_codes_that_stand_for_more(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.full((64, 96), 448.0).to(torch.float8_e4m3fn)
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": torch.full((1,), 200.0)}
    if dtype == torch.float16:
        with pytest.raises(BadInput, match=BEYOND.format("89600", "float16")):
            read_one(tmp_path, tensors, {"quant_method": "fp8"}, dtype)
    else:
        assert read_one(tmp_path, tensors, {"quant_method": "fp8"}, dtype).isfinite().all()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_scales_of_words_that_stand_for_more(tmp_path: Path, method: str) -> None:
    parts, _ = of_words((64, 64), method, size=16, by_activation=False, seed=1)  # type: ignore[arg-type]
    parts["scales"][1, 3] = 60000.0
    settings = {"quant_method": method, "bits": 4, "group_size": 16, "version": "gemm"}
    with pytest.raises(BadInput, match=BEYOND.format("-?inf", "bfloat16")):
        read_one(tmp_path, {f"layer.{end}": part for end, part in parts.items()}, settings, torch.bfloat16)


@pytest.mark.parametrize("form", ["int8", "nf4", "nf4 double"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_stored", [False, True], ids=["quantised here", "in the files"])
@pytest.mark.parametrize("num_stacked", [0, 2])
def test_quantised_matrices(form: QuantisedForm, dtype: torch.dtype, is_stored: bool, num_stacked: int) -> None:
    matrix = torch.randn((*([num_stacked] if num_stacked else []), 64, 256), generator=torch.Generator().manual_seed(1))
    holder = nn.Module()
    plain = _plain(holder)
    holder.weight = nn.Parameter(matrix.clone())
    if num_stacked:
        module = nn.Module()
        module.weight = nn.Parameter(matrix.to(dtype))
        quantise_experts(module, ["weight"], form)
    else:
        module = QuantisedLinear(QuantisedLayout.of(form, matrix.shape), None, dtype)
    weight = QuantisedWeight(module, "weight")  # type: ignore[arg-type]

    def read(values: torch.Tensor) -> None:
        stored = quantise(values.float(), form) if is_stored else None
        if form == "int8" and is_stored:  # a scale as large, which float16 had not made
            stored = quantise(values.clamp(-1000, 1000), form)
            stored[-4 * matrix.shape[0] :].zero_()
            weight.layout.parts(stored)[1].view(torch.float32)[3] = values.abs().max()
        source = QuantisingSource(OneMatrix(values), {"layer.weight": weight}, plain, stored=lambda *_: stored)
        source.read("layer.weight", 0, 8)

    read(matrix)
    matrix.view(-1)[-1] = 60000.0
    read(matrix)
    matrix.view(-1)[-1] = 70000.0
    if dtype == torch.float16 or (form == "int8" and not is_stored):
        with pytest.raises(BadInput, match=BEYOND.format(".*", "float16")):
            read(matrix)
    else:
        read(matrix)


def test_scales_of_int4_are_products_in_float16() -> None:
    layout = QuantisedLayout("int4", 4, 8, num_groups=1)
    data = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    layout.parts(data)[2].zero_()
    module = QuantisedLinear(layout, None, torch.bfloat16)
    plain, layers = _plain(nn.Linear(8, 4)), {"layer.weight": QuantisedWeight(module, "weight")}
    for scale, is_finite in ((4000.0, True), (5000.0, False)):
        layout.parts(data)[1].view(torch.float16).fill_(scale)
        source = QuantisingSource(OneMatrix(torch.zeros(4, 8)), layers, plain, stored=lambda *_: data)
        if is_finite:
            source.read("layer.weight", 0, 8)
        else:
            with pytest.raises(BadInput, match=BEYOND.format("inf", "bfloat16")):
                source.read("layer.weight", 0, 8)


def test_what_training_has_made_too_large_is_not_exported(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        exported.export(output, dtype="float16")
        before = {path.name: path.read_bytes() for path in output.iterdir()}

    def enlarge(tensors: Tensors) -> None:
        tensors["model.norm.weight"][3] = 70000.0

    changed = tmp_path / "changed"
    changed.mkdir()
    with in_store(changed, "llama", rewritten=enlarge) as exported:
        with pytest.raises(Diverged, match=r"tensor model.norm.weight cannot be exported: .*not finite in float16"):
            exported.export(output, dtype="float16")
        exported.export(changed / "out", dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_number_is_never_refused_without_a_way() -> None:
    module = QuantisedLinear(QuantisedLayout.of("int8", (4, 64)), None, torch.bfloat16)
    layers = {"layer.weight": QuantisedWeight(module, "weight")}
    with pytest.raises(BadInput) as raised:
        QuantisingSource(OneMatrix(torch.full((4, 64), 7e4)), layers, _plain(nn.Linear(64, 4))).read(
            "layer.weight", 0, 1
        )
    assert raised.value.hint == "use load_in_4bit: load_in_8bit takes matrices in float16"
