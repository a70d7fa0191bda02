"""LoRA beside a quantised model on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.model.files.quantised import QUANTISED_FORMS, QuantisedLayout, dequantised, quantise
from ratel_cli.sizes import DtypeName, QuantisedForm
from tests import quantised as oracle
from tests.engine.exactness import AHEAD, PLACEMENTS
from tests.engine.test_adapters import ADAPTERS
from tests.engine.test_quantised import ATTENTION, FORMS, LORA, check_quantised
from tests.gpu.machine import NEEDS_GPU, gpu_machine, gpu_of_this_process
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("form", QUANTISED_FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 65), (300, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_expands_to_the_same_bits(shape: tuple[int, int], dtype: torch.dtype, form: QuantisedForm) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = quantise(matrix, form).to(gpu_of_this_process())
    found = dequantised(data, QuantisedLayout(form, *shape), dtype)
    assert found.device == data.device and torch.equal(found.cpu(), oracle.dequantised(matrix, form))


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_expands_int4_to_the_same_bits(dtype: torch.dtype, has_order: bool) -> None:
    """Against the CPU, which tests/model/test_quantised_files.py compares with the formats' definition."""
    generator, layout = torch.Generator().manual_seed(2), QuantisedLayout("int4", 96, 256, 0, 8, has_order)
    data = torch.randint(0, 256, (layout.num_bytes,), generator=generator, dtype=torch.uint8)
    _, scales, _, *order = layout.parts(data)
    scales.view(torch.float16).copy_(torch.rand(96 * 8, generator=generator) / 40)
    for each in order:
        each.view(torch.int16).copy_(torch.randint(0, 8, (256,), generator=generator))
    found = dequantised(data.to(gpu_of_this_process()), layout, dtype)
    assert torch.equal(found.cpu(), dequantised(data, layout, dtype))


@pytest.mark.parametrize(
    ("adapter", "architecture", "form", "dtype", "num_micro_batches"),
    rotating(
        LORA,
        ["llama", "llama_tied", "gpt2"],
        FORMS,
        ["bfloat16", "float16"],
        [1, 3],
        every=6,
        full_rotation=True,
    ),
)
def test_equals_peft_beside_what_bitsandbytes_makes(
    tmp_path: Path, architecture: str, adapter: str, form: QuantisedForm, dtype: DtypeName, num_micro_batches: int
) -> None:
    check_quantised(
        gpu_machine,
        tmp_path,
        architecture,
        form,
        ADAPTERS[adapter],
        dtype=dtype,
        num_micro_batches=num_micro_batches,
        placement=AHEAD,
    )


@pytest.mark.parametrize(("architecture", "form"), [("mixtral", "nf4 double"), ("gpt_oss", "int8")])
def test_quantised_experts(tmp_path: Path, architecture: str, form: QuantisedForm) -> None:
    check_quantised(
        gpu_machine, tmp_path, architecture, form, ATTENTION, dtype="float32", with_experts=True, placement=AHEAD
    )


@pytest.mark.parametrize(("placement", "form"), rotating(list(PLACEMENTS), FORMS, every=8, full_rotation=True))
def test_wherever_bytes_rest(tmp_path: Path, placement: str, form: QuantisedForm) -> None:
    options = dict(PLACEMENTS[placement])
    for key in ("group_elements", "chunk_elements"):  # a page of bytes has twice as many
        if isinstance(number := options.get(key), int):
            options[key] = 2 * number
    check_quantised(gpu_machine, tmp_path, "llama", form, ADAPTERS["all linear"], **options)
