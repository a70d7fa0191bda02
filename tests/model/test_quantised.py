"""Quantised matrices: the bytes and values of bitsandbytes, and a layer that keeps neither for its backward."""

from __future__ import annotations

import weakref

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ratel_cli.errors import BadInput
from ratel_cli.model.files import quantised
from ratel_cli.model.files.quantised import QUANTISED_FORMS, QuantisedLayout, dequantised, quantise
from ratel_cli.model.files.quantised_model import quantise_layers
from ratel_cli.model.files.quantised_modules import QuantisedLinear, quantise_experts
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.sizes import QuantisedForm
from tests import quantised as oracle
from tests.engine.architectures import tiny_config

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXPANDED = 1 << 16
"""Elements that are expanded together here."""
SHAPES = (
    (1, 1), (1, 2), (3, 5), (1, 63), (1, 64), (1, 65), (7, 64), (31, 31), (128, 130), (96, 33 * 64), (1, 256 * 64),
    (1, 256 * 64 + 1), (255, 64), (2, EXPANDED // 2), (3, EXPANDED // 2 + 33),
)  # fmt: skip


def drawn(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 7919 + shape[1])
    return (torch.randn(shape, generator=generator) * 0.05).to(dtype)


@pytest.mark.parametrize("form", QUANTISED_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_values_are_those_of_bitsandbytes(
    shape: tuple[int, int], dtype: torch.dtype, form: QuantisedForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "EXPANDED_ELEMENTS", EXPANDED)
    matrix = drawn(shape, dtype)
    layout, data = QuantisedLayout(form, *shape), quantise(matrix, form)
    for number, (part, wanted) in enumerate(zip(layout.parts(data), oracle.quantised_bytes(matrix, form), strict=True)):
        assert torch.equal(part, wanted), number
    assert torch.equal(dequantised(data, layout, dtype), oracle.dequantised(matrix, form))


@pytest.mark.parametrize("form", ["nf4", "nf4 double"])
def test_zeros_and_equal_values(form: QuantisedForm) -> None:
    matrix = drawn((300, 64), torch.float32)
    matrix[3:7] = 0
    matrix[9], matrix[10], matrix[11] = 1.0, -1.0, 1e-40
    for each in (matrix, torch.zeros(300, 64), torch.ones(300, 64)):
        layout, data = QuantisedLayout(form, *each.shape), quantise(each, form)
        assert list(map(bytes_of, layout.parts(data))) == list(map(bytes_of, oracle.quantised_bytes(each, form)))
        assert torch.equal(dequantised(data, layout, torch.float32), oracle.dequantised(each, form))


def bytes_of(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()


@pytest.mark.parametrize(("form", "share"), [("nf4 double", 0.516), ("nf4", 0.5625), ("int8", 1.001)])
def test_bytes_for_each_weight(form: QuantisedForm, share: float) -> None:
    assert QuantisedLayout(form, 4096, 4096).num_bytes / 4096**2 == pytest.approx(share, abs=1e-3)


def layer_of(matrix: torch.Tensor, bias: torch.Tensor | None, form: QuantisedForm) -> QuantisedLinear:
    made = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
    layer = QuantisedLinear(QuantisedLayout(form, *matrix.shape), made, matrix.dtype)
    layer.weight = nn.Parameter(quantise(matrix, form), requires_grad=False)
    return layer


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96), (2, 0, 96)])
@pytest.mark.parametrize("form", QUANTISED_FORMS)
def test_backward_takes_the_bytes_that_are_bound_then(
    form: QuantisedForm, shape: tuple[int, ...], has_bias: bool
) -> None:
    matrix, bias = drawn((64, 96), torch.bfloat16), torch.randn(64).bfloat16() if has_bias else None
    layer, inputs = layer_of(matrix, bias, form), torch.randn(shape).bfloat16().requires_grad_()
    gradient = torch.randn((*shape[:-1], 64)).bfloat16()
    output = layer(inputs)
    data = layer.weight.detach().clone()
    layer.weight.data.fill_(255)  # the buffer is used for something else
    layer.weight = nn.Parameter(data, requires_grad=False)
    [found] = torch.autograd.grad(output, inputs, gradient)
    linear = nn.functional.linear(inputs, oracle.dequantised(matrix, form), bias)
    [wanted] = torch.autograd.grad(linear, inputs, gradient)
    assert torch.equal(output, linear) and torch.equal(found, wanted)


def test_bitsandbytes_takes_the_bytes_of_forward() -> None:
    """Why the layer is our own: with a buffer that is used again, this gives other gradients, and no error."""
    matrix = drawn((64, 96), torch.bfloat16)
    packed, state = bnb.functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4")
    inputs, buffer = torch.randn(5, 96).bfloat16().requires_grad_(), packed.clone()
    output = bnb.matmul_4bit(inputs, buffer, quant_state=state)
    [wanted] = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    buffer.fill_(255)
    [found] = torch.autograd.grad(output.sum(), inputs)
    assert not torch.equal(found, wanted)


class Watched(QuantisedLinear):
    """A layer that notes whether the matrices still exist that it has expanded."""

    made: list[weakref.ref[torch.UntypedStorage]]

    def values(self, name: str) -> torch.Tensor:
        found = super().values(name)
        self.made.append(weakref.ref(found.untyped_storage()))
        return found


@pytest.mark.parametrize("form", QUANTISED_FORMS)
def test_no_graph_has_the_matrix(form: QuantisedForm) -> None:
    layer = layer_of(drawn((64, 96), torch.float32), None, form)
    layer.__class__, layer.made = Watched, []  # type: ignore[assignment]
    output = layer(torch.randn(5, 96, requires_grad=True))
    assert output.requires_grad and [each() for each in layer.made] == [None]
    output.sum().backward()
    assert [each() for each in layer.made] == [None, None]


class Experts(nn.Module):
    """Two stacks, which a row of inputs goes through by its expert, one after another."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(each.clone(), requires_grad=False) for each in (first, second))

    def forward(self, inputs: torch.Tensor, experts: list[int]) -> torch.Tensor:
        found = []
        for row, expert in zip(inputs, experts, strict=True):
            found.append(nn.functional.linear(row, self.first[expert]).relu() @ self.second[expert])
        return torch.stack(found) if found else inputs


def stack(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return drawn((shape[0] * shape[1], shape[2]), dtype).view(shape)


@pytest.mark.parametrize("form", QUANTISED_FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 7), (4, 64, 64), (3, 128, 128), (2, 256, 128)])
def test_stacks_are_those_of_bitsandbytes(shape: tuple[int, int, int], form: QuantisedForm) -> None:
    """As one matrix with all rows. Matrices that share no magnitude with others can be had alone."""
    values = stack(shape, torch.bfloat16)
    layout, data = QuantisedLayout.of(form, shape), quantise(values, form)
    wanted = oracle.dequantised(values.view(-1, shape[2]), form)
    found = dequantised(data, layout, torch.bfloat16)
    assert found.shape == shape and torch.equal(found.view_as(wanted), wanted)
    group, size = {"int8": 1, "nf4": 64, "nf4 double": 64 * 256}[form], shape[1] * shape[2]
    for first, last in ((0, 1), (shape[0] - 1, shape[0]), (shape[0] // 2, shape[0])):
        part = layout.of_matrices(data, first, last)
        assert (part is not None) == (first * size % group == 0 and (last == shape[0] or last * size % group == 0))
        if part is not None:
            assert torch.equal(dequantised(*part, torch.bfloat16), found[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32, 1), (3, 64, 5), (4, 32, 96)])
def test_experts_in_mxfp4_are_those_of_transformers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    number, inputs, outputs = shape
    generator, layout = torch.Generator().manual_seed(inputs + outputs), QuantisedLayout.of("mxfp4", shape)
    blocks = torch.randint(0, 256, (number, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(116, 134, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for part, values in zip(layout.parts(data), (blocks, exponents), strict=True):
        part.copy_(values.view(-1))
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)
    assert layout.shape == shape and torch.equal(dequantised(data, layout, dtype), wanted)
    for first, last in ((0, 1), (number - 1, number)):
        part = layout.of_matrices(data, first, last)
        assert part is not None and torch.equal(dequantised(*part, dtype), wanted[first:last])


@pytest.mark.parametrize("form", QUANTISED_FORMS)
@pytest.mark.parametrize("size", [6, 128])
@pytest.mark.parametrize("experts", [[], [2], [0, 2, 2, 1]])
def test_experts_take_the_bytes_that_are_bound_in_backward(form: QuantisedForm, size: int, experts: list[int]) -> None:
    first, second = (stack((3, size, size), torch.bfloat16) for _ in range(2))
    module = Experts(first, second)
    quantise_experts(module, ["first", "second"], form)
    assert isinstance(module, Experts) and [each.dtype for each in module.parameters()] == [torch.uint8] * 2
    inputs = torch.randn(len(experts), size).bfloat16().requires_grad_()
    output = module(inputs, experts)
    for name in ("first", "second"):
        data = module.get_parameter(name).detach().clone()
        module.get_parameter(name).data.fill_(255)  # the buffer is used for something else
        setattr(module, name, nn.Parameter(data, requires_grad=False))
    plain = Experts(*(oracle.dequantised(each.view(-1, size), form).view_as(each) for each in (first, second)))
    wanted = plain(inputs, experts)
    assert torch.equal(output, wanted)
    if experts:
        [found], [expected] = (torch.autograd.grad(each.sum(), inputs, retain_graph=True) for each in (output, wanted))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "mixtral", "llama_tied"])
def test_layers_are_those_of_transformers(architecture: str) -> None:
    skeleton = build_skeleton(tiny_config(architecture), dtype="bfloat16", attn_implementation="sdpa")
    wanted = oracle.quantised_names(skeleton)
    quantise_layers(skeleton, "nf4")
    found = {f"{name}.weight" for name, each in skeleton.named_modules() if isinstance(each, QuantisedLinear)}
    assert found == wanted != set()


def test_a_model_without_experts() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="bfloat16", attn_implementation="sdpa")
    with pytest.raises(BadInput, match="LlamaForCausalLM has no stacks of experts that could be quantised"):
        quantise_layers(skeleton, "nf4", with_experts=True)


def test_a_model_without_linear_layers() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="bfloat16", attn_implementation="sdpa")
    quantise_layers(skeleton, "nf4")
    with pytest.raises(BadInput, match="LlamaForCausalLM has no linear layers that could be quantised"):
        quantise_layers(skeleton, "nf4")
