"""Where the time of one layer goes on a GPU: kernels, masks of packed rows, adapters, dequantising, fused kernels.

Regime: one layer of the shapes of Qwen3-8B and Llama-8B (hidden 4096), random weights and inputs, bf16, 16,384 tokens,
nothing moved. Each measurement is guarded by itself. What is measured, with its ceiling:

    kernels      plain forward and backward, a watched forward, a replayed one: by torch's profiler, by kind of kernel;
                 how long the GPU idles in a unit. The ceiling is the time of the products alone
    determinism  the same layer with `deterministic` on and off
    masks        rows of one sample, which need no mask, against packed rows of the same tokens; attention alone with
                 and without a mask, with lengths (torch's varlen attention), and by each of torch's kernels
    fused        the layer with Liger's functions and compiled; the loss over 152k words: torch's, Liger's
    adapters     LoRA of rank 16, 64 and 256, in fp32 as PEFT has it, and under autocast
    dequantising rates of each form; the ceiling is a copy
    long         peak memory of one row of 65k and 131k tokens, with and without a mask, next to what a plan counts
    small        the share of a unit in which the GPU idles, by its tokens

    python -m scripts.bench.gpu_layer [--parts kernels masks ...] [--seconds 300] [--tiny]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.layer_runner import loss_sum
from ratel_cli.model.files import quantised
from ratel_cli.model.files.quantised import QuantisedLayout, dequantised
from ratel_cli.sizes import IGNORED_TARGET, StoredForm
from ratel_cli.units import GIB
from scripts.bench.ceilings import Sustained, sustained
from scripts.bench.contestants import SHAPES, position_ids
from scripts.bench.findings import Report, reason_of
from scripts.bench.kernels import KernelTable, kernels_of
from scripts.bench.one_layer import LayerCase, OneLayer, one_layer
from tests.simulated_gpu import install_if_asked

_QUEUED_UNITS = 8
"""Units that the host asks for before it waits: enough that a queue fills."""
_SAMPLES_OF_ROW = 4
_RANKS = (16, 64, 256)
_NEEDS_CUDA = "it needs an NVIDIA GPU"


def setting(report: Report, real: int, tiny: int) -> int:
    """A size: of a GPU, or one that shows only that it runs."""
    return tiny if report.is_tiny else real


def seconds_of(report: Report, seconds: float) -> float:
    """How long something is measured; once if sizes are tiny."""
    return 0.0 if report.is_tiny else seconds


def shapes_of(report: Report) -> tuple[str, str]:
    """Those of a Qwen3 and of a Llama."""
    return ("tiny-qwen3", "tiny") if report.is_tiny else ("qwen3-8b", "llama-8b")


@contextmanager
def deterministic(device: torch.device, required: bool = True) -> Iterator[None]:
    """As a run computes."""
    with nullcontext() if device.type == "cpu" else determinism(required, device, notice=print):
        yield


# --- Kernels ---------------------------------------------------------------------------------------------------------


def measure_kernels(report: Report, device: torch.device) -> None:
    """Tables of kernels of both shapes, and how long the GPU idles in a unit."""
    tokens = setting(report, 16384, 32)
    for shape in shapes_of(report):
        case = LayerCase(shape=shape, rows=4, row_tokens=tokens // 4)
        report.measure(f"kernels, {case}", partial(_measure_kernels, report, case, device))


def _measure_kernels(report: Report, case: LayerCase, device: torch.device) -> dict[str, int]:
    """What is counted of the layer, next to what is measured of it."""
    with deterministic(device), one_layer(case, device) as layer:
        _measure_passes(report, layer, device)
        units = {
            name: report.measure(f"{case}: {name}", partial(_unit, report, work, device))
            for name, work in {"step": layer.step, "recomputed step": layer.recomputed_step}.items()
        }
        moved, flops = layer.traits.moved, 3 * layer.flops
    words = [_words_of_unit(name, unit, flops) for name, unit in units.items() if unit is not None]
    if words:
        report.line(f"{case.shape}: " + "; ".join(words))
    bytes_per_token = 0 if moved is None else moved.forward_per_token + moved.backward_per_token
    return {"flops of a step": flops, "bytes of element-wise kernels in a step": case.tokens * bytes_per_token}


def _measure_passes(report: Report, layer: OneLayer, device: torch.device) -> None:
    """A table of each pass, after one of each that does not count."""
    layer.recomputed_step()
    for name, work in _passes(layer):
        table = report.measure(f"{layer.case}: {name}", partial(kernels_of, work, device))
        if table is not None:
            report.table(f"{layer.case}: {name}", table.text())


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One layer on one micro-batch, where others are queued before it."""

    seconds: float
    kernels: KernelTable | None
    """None where the profiler sees none."""

    @property
    def idle(self) -> float | None:
        """The share of its time in which no kernel runs."""
        return None if self.kernels is None else max(0.0, 1 - self.kernels.busy_seconds / self.seconds)


def _words_of_unit(name: str, unit: Unit, flops: int) -> str:
    words = f"{name} {1e3 * unit.seconds:.1f} ms, {flops / unit.seconds / 1e12:.3g} TFLOP/s"
    if unit.kernels is None:
        return words
    kinds = unit.kernels.by_kind
    total = sum(kinds.values()) or 1.0
    shares = ", ".join(f"{kind} {seconds / total:.0%}" for kind, seconds in kinds.items() if seconds)
    return f"{words} ({unit.kernels.number} kernels: {shares}; idle {unit.idle:.0%})"


def _passes(layer: OneLayer) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each pass of a layer, which is run once."""
    yield "forward", layer.forward
    output = layer.forward()
    yield "backward", lambda: layer.backward(output)
    yield "watched forward", layer.watched
    tape, again = layer.watched(), layer.watched()
    yield "replayed forward", lambda: layer.replayed(tape)
    output = layer.replayed(again)
    yield "backward of the replayed", lambda: layer.backward(output)


def _unit(report: Report, work: Callable[[], object], device: torch.device) -> Unit:
    seconds = _seconds_of_unit(report, work, device)
    try:
        return Unit(seconds=seconds, kernels=kernels_of(work, device))
    except RuntimeError as error:
        report.fail("the profiler", reason_of(error))
        return Unit(seconds=seconds, kernels=None)


def _seconds_of_unit(report: Report, unit: Callable[[], object], device: torch.device) -> float:
    number = setting(report, _QUEUED_UNITS, 1)

    def work() -> None:
        for _ in range(number):
            unit()

    return sustained(work, device, seconds=seconds_of(report, 0.5)).median_seconds / number


def measure_determinism(report: Report, device: torch.device) -> None:
    """The step of a layer with deterministic kernels, and with any."""
    shape, tokens = shapes_of(report)[0], setting(report, 16384, 32)
    spent = {}
    for name, required in (("on", True), ("off", False)):
        case = LayerCase(shape=shape, rows=4, row_tokens=tokens // 4)
        found = report.measure(f"deterministic {name}", partial(_step_seconds, report, case, device, required=required))
        if found is not None:
            spent[name] = found.median_seconds
    if len(spent) == 2:
        report.line(f"deterministic on {1e3 * spent['on']:.1f} ms, off {1e3 * spent['off']:.1f} ms a step of a layer")


def _step_seconds(
    report: Report,
    case: LayerCase,
    device: torch.device,
    *,
    required: bool = True,
    change: Callable[[DecoderModel], object] = lambda model: None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    seconds: float = 0.4,
) -> Sustained:
    """A layer's forward and backward."""
    with deterministic(device, required), one_layer(case, device, change=change) as layer, around():
        return sustained(layer.step, device, seconds=seconds_of(report, seconds))


# --- Masks -----------------------------------------------------------------------------------------------------------


def _row_shapes(report: Report) -> list[tuple[int, int]]:
    """Rows and their tokens, of one number of tokens."""
    return [(2, 16), (1, 32)] if report.is_tiny else [(8, 2048), (2, 8192), (1, 16384)]


def measure_masks(report: Report, device: torch.device) -> None:
    """A layer on rows of one sample, and on packed ones; then attention alone."""
    for rows, row_tokens in _row_shapes(report):
        work = partial(_mask_times, report, device, rows, row_tokens)
        spent = report.measure(f"{rows}x{row_tokens}", work)
        if spent:
            report.line(f"ms, {rows}x{row_tokens}: " + ", ".join(f"{name} {each:.2f}" for name, each in spent.items()))


def _mask_times(report: Report, device: torch.device, rows: int, row_tokens: int) -> dict[str, float]:
    """Milliseconds of what could be measured."""
    shape, spent = shapes_of(report)[0], dict[str, float]()
    for samples in (1, _SAMPLES_OF_ROW):
        case = LayerCase(shape=shape, rows=rows, row_tokens=row_tokens, samples=samples)
        found = report.measure(f"layer, {case}", partial(_step_seconds, report, case, device), needs_seconds=2)
        if found is not None:
            spent["packed" if samples > 1 else "whole"] = 1e3 * found.median_seconds
    return spent | _attention_times(report, device, shape, rows, row_tokens)


def _attention_times(report: Report, device: torch.device, shape: str, rows: int, row_tokens: int) -> dict[str, float]:
    """Milliseconds of attention's forward and backward alone, by how it knows the samples."""
    attention = _Attention(shape, rows, row_tokens, device)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "attention without a mask": attention.causal,
        "masked": attention.masked,
        "by lengths": attention.by_lengths,
        "cuDNN": lambda: attention.causal_by(SDPBackend.CUDNN_ATTENTION),
    }
    spent = {}
    for name, way in ways.items():
        measured = f"{name}, {rows}x{row_tokens}"
        if device.type != "cuda" and name in ("by lengths", "cuDNN"):
            report.leave_out(measured, _NEEDS_CUDA)
            continue
        required = name != "cuDNN"  # torch leaves it out where kernels must be deterministic
        found = report.measure(measured, partial(attention.seconds, report, way, required=required), needs_seconds=1)
        if found is not None:
            spent[name] = 1e3 * found.median_seconds
    return spent


class _Attention:
    """Queries, keys and values of one layer, and the samples of its rows."""

    def __init__(self, shape: str, rows: int, row_tokens: int, device: torch.device) -> None:
        keys = SHAPES[shape]
        heads, kv_heads = keys["num_attention_heads"], keys["num_key_value_heads"]
        head_dim = keys.get("head_dim", keys["hidden_size"] // heads)
        self._device, self._groups = device, heads // kv_heads
        self._tensors = [
            torch.randn(rows, number, row_tokens, head_dim, device=device, dtype=torch.bfloat16).requires_grad_()
            for number in (heads, kv_heads, kv_heads)
        ]
        positions = position_ids(rows, row_tokens, _SAMPLES_OF_ROW)
        sample = (positions == 0).cumsum(1).to(device)
        self._mask = (sample.unsqueeze(2) == sample.unsqueeze(1)).tril_().unsqueeze(1)
        """Of all pairs; a run makes it once for all layers."""
        self._flat = [each.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for each in self._tensors]
        """One row behind the other: `[tokens, heads, head_dim]`."""
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()
        edges = [*starts, rows * row_tokens]
        self._lengths = torch.tensor(edges, dtype=torch.int32, device=device)
        self._longest = max(stop - start for start, stop in itertools.pairwise(edges))

    def seconds(self, report: Report, way: Callable[[], torch.Tensor], *, required: bool) -> Sustained:
        """Of forward and backward."""

        inputs = self._flat if way == self.by_lengths else self._tensors

        def work() -> None:
            output = way()
            torch.autograd.grad(output, inputs, torch.ones_like(output))

        with deterministic(self._device, required):
            return sustained(work, self._device, seconds=seconds_of(report, 0.2))

    def causal(self) -> torch.Tensor:
        """As for rows of one sample."""
        query, key, value = self._tensors
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def causal_by(self, backend: SDPBackend) -> torch.Tensor:
        """The same by one of torch's kernels."""
        with sdpa_kernel(backend):
            return self.causal()

    def masked(self) -> torch.Tensor:
        """As transformers attends to packed rows: with a mask of all pairs, and keys repeated for each head."""
        query, key, value = self._tensors
        key, value = (each.repeat_interleave(self._groups, dim=1) for each in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self._mask)

    def by_lengths(self) -> torch.Tensor:
        """torch's attention for rows of any lengths, one behind the other."""
        attend = import_module("torch.nn.attention.varlen").varlen_attn
        query, key, value = self._flat
        known = inspect.signature(attend).parameters  # versions of torch differ
        options: dict[str, object] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(self._groups, dim=1) for each in (key, value))
        found = attend(query, key, value, self._lengths, self._lengths, self._longest, self._longest, **options)
        assert isinstance(found, torch.Tensor)
        return found


# --- Fused kernels ---------------------------------------------------------------------------------------------------


def measure_fused(report: Report, device: torch.device) -> None:
    """A layer as transformers has it, compiled, and with Liger's functions; then the loss."""
    qwen, llama = shapes_of(report)
    tokens = setting(report, 16384, 32)
    spent = dict[str, float]()
    for shape in (qwen, llama):
        case = LayerCase(shape=shape, rows=4, row_tokens=tokens // 4)
        found = report.measure(f"as it is, {shape}", partial(_step_seconds, report, case, device))
        if found is not None:
            spent[shape] = found.median_seconds
    report.measure("head and loss", partial(_measure_loss, report, device, spent))
    if device.type != "cuda":
        report.leave_out("Liger", _NEEDS_CUDA)
    elif find_spec("liger_kernel") is None:
        report.leave_out("Liger", "liger-kernel is not installed")
    else:
        for shape, name in ((qwen, "qwen3"), (llama, "llama")):
            case = LayerCase(shape=shape, rows=4, row_tokens=tokens // 4)
            with _unchanged(f"transformers.models.{name}.modeling_{name}"):
                liger = partial(_with_liger, name)
                found = report.measure(f"Liger, {shape}", partial(_step_seconds, report, case, device, change=liger))
            if found is not None:
                spent[f"{shape} with Liger"] = found.median_seconds
    if spent:
        report.line("ms: " + ", ".join(f"{name} {1e3 * each:.2f}" for name, each in spent.items()))


def measure_compiled(report: Report, device: torch.device) -> None:
    """A layer that torch.compile has compiled. Compiling takes longer than all that is measured with it."""
    if device.type != "cuda":
        report.leave_out("compiled", _NEEDS_CUDA)
        return
    case = LayerCase(shape=shapes_of(report)[1], rows=4, row_tokens=setting(report, 16384, 32) // 4)
    found = report.measure("compiled", partial(_compiled_seconds, report, case, device), needs_seconds=15)
    if found is not None:
        report.line(f"{case.shape} compiled: {1e3 * found.median_seconds:.2f} ms")


def _compiled_seconds(report: Report, case: LayerCase, device: torch.device) -> Sustained:
    with deterministic(device), one_layer(case, device) as layer:
        forward = layer.compiled("inductor")
        return sustained(lambda: layer.backward(forward()), device, seconds=seconds_of(report, 0.4))


def _with_liger(name: str, model: DecoderModel) -> None:
    apply = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{name}")
    apply(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        model=model.skeleton,
    )


@contextmanager
def _unchanged(module: str) -> Iterator[None]:
    """A context behind which a module has the functions and classes that it had before."""
    names = vars(import_module(module))
    before = dict(names)
    try:
        yield
    finally:
        names.update(before)


def _measure_loss(report: Report, device: torch.device, spent: dict[str, float]) -> None:
    """Forward and backward of head and loss over many words, a chunk of tokens after the other."""
    keys = SHAPES[shapes_of(report)[0]]
    tokens, chunk = setting(report, 4096, 16), setting(report, 512, 8)
    hidden = torch.randn(tokens, keys["hidden_size"], device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(keys["vocab_size"], keys["hidden_size"], device=device)).bfloat16().requires_grad_()
    targets = torch.randint(keys["vocab_size"], (tokens,), device=device)

    def by_chunks() -> None:
        for start in range(0, tokens, chunk):
            part = hidden[start : start + chunk]
            loss = loss_sum(functional.linear(part, weight).unsqueeze(0), targets[start : start + chunk])
            torch.autograd.grad(loss, (part, weight))

    def fused() -> None:
        loss = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
            reduction="sum", ignore_index=IGNORED_TARGET
        )
        torch.autograd.grad(loss(weight, hidden, targets), (hidden, weight))

    ways: dict[str, Callable[[], None]] = {"loss": by_chunks}
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        ways["loss with Liger"] = fused
    for name, work in ways.items():
        found = report.measure(name, partial(sustained, work, device, seconds=seconds_of(report, 0.3)))
        if found is not None:
            spent[f"{name} of {tokens} tokens"] = found.median_seconds


# --- Adapters --------------------------------------------------------------------------------------------------------


def measure_adapters(report: Report, device: torch.device) -> None:
    """A step of a layer with LoRA, in fp32 and under autocast."""
    llama, tokens = shapes_of(report)[1], setting(report, 16384, 32)
    ranks = (4,) if report.is_tiny else _RANKS
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "": nullcontext,
        " under autocast": lambda: torch.autocast(device.type, dtype=torch.bfloat16),
    }
    spent = dict[str, float]()
    for rank in (0, *ranks):
        case = LayerCase(shape=llama, rows=4, row_tokens=tokens // 4, lora=rank)
        for name, around in ways.items():
            if name and not rank:
                continue
            if name and device.type != "cuda":
                report.leave_out(f"rank {rank}{name}", _NEEDS_CUDA)
            else:
                work = partial(_step_seconds, report, case, device, around=around, seconds=0.3)
                found = report.measure(f"rank {rank}{name}", work, needs_seconds=1)
                if found is not None:
                    spent[f"rank {rank}{name}" if rank else "whole layer"] = 1e3 * found.median_seconds
    if spent:
        report.line("LoRA, ms a step: " + ", ".join(f"{name} {each:.1f}" for name, each in spent.items()))


# --- Dequantising ----------------------------------------------------------------------------------------------------


def measure_dequantising(report: Report, device: torch.device) -> None:
    """Elements per second of each form, and of a copy in bf16."""
    rows, columns = (64, 128) if report.is_tiny else (14336, 4096)
    experts = (2, 64, 32) if report.is_tiny else (32, 2880, 5760)
    layouts = {
        "NF4 double": QuantisedLayout.of("nf4 double", (rows, columns)),
        "NF4": QuantisedLayout.of("nf4", (rows, columns)),
        "int8": QuantisedLayout.of("int8", (rows, columns)),
        "int4": QuantisedLayout("int4", rows, columns, num_groups=columns // 32),
        "int4 in any order": QuantisedLayout("int4", rows, columns, num_groups=columns // 32, has_order=True),
        "MXFP4": QuantisedLayout.of("mxfp4", experts),
    }
    rates = dict[str, float]()
    matrix = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    found = report.measure("a copy", lambda: _rate(report, matrix.clone, matrix.numel(), device))
    if found is not None:
        rates["copy"] = found
    for name, layout in layouts.items():
        has_kernel = device.type == "cuda" and find_spec("bitsandbytes") is not None and layout.form in _OF_BITSANDBYTES
        found = report.measure(name, partial(_dequantising_rate, report, layout, device))
        if found is not None:
            rates[f"{name} by bitsandbytes" if has_kernel else name] = found
        if has_kernel:
            with mock.patch.object(quantised, "_fused_kernel", return_value=None):
                found = report.measure(
                    f"{name} without bitsandbytes", partial(_dequantising_rate, report, layout, device)
                )
            if found is not None:
                rates[name] = found
    report.line("dequantising, G elements/s: " + ", ".join(f"{name} {each / 1e9:.3g}" for name, each in rates.items()))


_OF_BITSANDBYTES: tuple[StoredForm, ...] = ("nf4", "nf4 double")
"""Forms for which Ratel takes its kernel on an NVIDIA GPU."""


def _dequantising_rate(report: Report, layout: QuantisedLayout, device: torch.device) -> float:
    data = torch.ones(layout.num_bytes, dtype=torch.uint8, device=device)
    if layout.has_order:
        layout.parts(data)[3].zero_()  # the groups of its columns
    return _rate(report, lambda: dequantised(data, layout, torch.bfloat16), layout.num_elements, device)


def _rate(report: Report, work: Callable[[], object], num_elements: int, device: torch.device) -> float:
    return num_elements / sustained(work, device, seconds=seconds_of(report, 0.2)).median_seconds


# --- Sizes of rows and micro-batches ---------------------------------------------------------------------------------


def measure_long_rows(report: Report, device: torch.device) -> None:
    """Peak memory of a replayed layer and its backward on one long row, next to what a plan counts for it."""
    shape = shapes_of(report)[1]
    for row_tokens in (64, 128) if report.is_tiny else (65536, 131072):
        words = []
        for samples, mask in ((1, "no mask"), (2, "a mask")):
            case = LayerCase(shape=shape, rows=1, row_tokens=row_tokens, samples=samples)
            work = partial(_peak, case, device)
            found = report.measure(f"{row_tokens} tokens, {mask}", work, needs_seconds=4 * samples)
            if found is not None:
                counted = found["counted_bytes"] + (found["counted_pairs_bytes"] if samples > 1 else 0)
                peak = f"{found['peak_bytes'] / GIB:.1f} of {counted / GIB:.1f} GiB counted"
                words.append(f"{mask} {found['seconds']:.2f} s, {peak}")
        if words:
            report.line(f"layer, {row_tokens} tokens: " + "; ".join(words))


def _peak(case: LayerCase, device: torch.device) -> dict[str, float]:
    """Beside weights, their gradients, and the layer's input."""
    with deterministic(device), one_layer(case, device) as layer:
        tape = layer.watched()
        on_gpu = device.type != "cpu"
        if on_gpu:
            torch.accelerator.synchronize(device)
            torch.accelerator.reset_peak_memory_stats(device)
            before = torch.accelerator.memory_allocated(device)

        def work() -> None:
            layer.backward(layer.replayed(tape))

        spent = sustained(work, device, seconds=0.0)
        peak = torch.accelerator.max_memory_allocated(device) - before if on_gpu else 0
        activations = layer.traits.activations
        per_token = 0 if activations is None else activations.saved_per_token + activations.more_per_token
        per_pair = 0 if activations is None else activations.saved_per_pair + activations.more_per_pair
        return {
            "seconds": spent.best_seconds,
            "peak_bytes": peak,
            "counted_bytes": case.tokens * per_token,
            "counted_pairs_bytes": case.tokens * case.row_tokens * per_pair,
        }


def measure_small(report: Report, device: torch.device) -> None:
    """How long the GPU idles in units of few tokens."""
    shape = shapes_of(report)[0]
    units = dict[int, Unit]()
    for tokens in (8, 16) if report.is_tiny else (512, 1024, 2048, 4096):
        case = LayerCase(shape=shape, rows=1, row_tokens=tokens)
        found = report.measure(f"{tokens} tokens", partial(_recomputed_unit, report, case, device))
        if found is not None:
            units[tokens] = found
    words = [
        f"{tokens} {1e3 * unit.seconds:.1f} ms" + ("" if unit.idle is None else f", {unit.idle:.0%}")
        for tokens, unit in units.items()
    ]
    if words:
        report.line("tokens of a recomputed unit, its time, idle: " + "; ".join(words))


def _recomputed_unit(report: Report, case: LayerCase, device: torch.device) -> Unit:
    with deterministic(device), one_layer(case, device) as layer:
        layer.recomputed_step()
        return _unit(report, layer.recomputed_step, device)


# --- The benchmark ---------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Report, torch.device], None]] = {
    "kernels": measure_kernels,
    "determinism": measure_determinism,
    "masks": measure_masks,
    "adapters": measure_adapters,
    "dequantising": measure_dequantising,
    "long": measure_long_rows,
    "small": measure_small,
    "fused": measure_fused,
    "compiled": measure_compiled,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=300.0, help="after this time nothing more is started")
    parser.add_argument("--tiny", action="store_true", help="sizes that show only that it runs")
    options = parser.parse_args(arguments)
    install_if_asked()
    device = compute_device("auto")
    report = Report(seconds=options.seconds, is_tiny=options.tiny)
    for name, measure in PARTS.items():
        if name in options.parts:
            measure(report, device)
    findings = asdict(report.findings)
    for title, text in findings.pop("tables").items():
        print(f"{title}\n{text}\n")
    print("\n".join(report.findings.lines))
    for name, reason in {**report.findings.failures, **report.findings.left_out}.items():
        print(f"not measured: {name}: {reason}")
    print(json.dumps({"benchmark": "gpu_layer", "device": str(device), **findings}, default=asdict))


if __name__ == "__main__":
    main()
