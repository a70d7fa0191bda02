"""The words of `ratel profile`: what a machine can do, and what a model's layers cost on it.

Invariant: nothing is computed here except sums, and nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.hardware.spec import DriveRates, HardwareProfile, Nvme
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.report.words.plan import aligned
from ratel_cli.units import counted, format_bytes, format_count, format_flops, format_rate, format_seconds


def hardware_rows(profile: HardwareProfile, *, dtype: str) -> list[tuple[str, str]]:
    """Rows of a name and a fact. `dtype` is the type of the matrix products that were measured."""
    gpu, link, host = profile.gpu, profile.link, profile.host
    rows = [("compute", f"{gpu.name}: {format_flops(gpu.flops_per_second)}/s in {dtype}")]
    if link is not None:
        up, down = format_rate(link.to_gpu_bytes_per_second), format_rate(link.from_gpu_bytes_per_second)
        own = format_bytes(gpu.memory_bytes)
        if gpu.memory_bytes_per_second is not None:
            own += f"; {format_rate(gpu.memory_bytes_per_second)} read and written"
        rows += [
            ("GPU memory", own),
            ("link", f"{up} to the GPU, {down} from it, {format_rate(link.both_bytes_per_second)} both at once"),
        ]
    memory = f"{format_bytes(host.memory_bytes)}, {format_bytes(host.available_bytes)} of it available"
    if host.memory_bytes_per_second is not None:
        memory += f"; {format_rate(host.memory_bytes_per_second)} read and written by {counted(host.num_cores, 'core')}"
    rows.append(("memory", memory))
    rows.append(("AdamW", f"{format_count(host.adam_parameters_per_second)} parameters/s on one thread"))
    return [*rows, *_drive_rows(profile.nvme)]


def model_rows(profile: ModelProfile, *, available_bytes: int) -> list[tuple[str, str]]:
    """Rows about one micro-batch. `available_bytes` is the host memory that a run has left for activations."""
    layers = [profile.profiles[number] for number in profile.layers]
    inputs, saved = sum(layer.input_bytes for layer in layers), sum(layer.saved_bytes for layer in layers)
    flops = sum(layer.flops_forward for layer in layers) + profile.flops_head
    return [
        ("micro-batch", f"{profile.micro_batch_tokens} tokens; forward {format_flops(flops)}"),
        ("layers", _seconds(layers)),
        ("other blocks", f"embedding {_time(profile.embedding_seconds)}, head and loss {_time(profile.head_seconds)}"),
        ("activations", f"{format_bytes(saved)} in all, including {format_bytes(inputs)} of layers' inputs"),
        ("available", f"{format_bytes(available_bytes)} of RAM for activations in a run"),
    ]


def operator_lines(profile: ModelProfile) -> list[str]:
    """For each kind of layer, a table of its operators. The operator that saves most per byte comes first."""
    lines = []
    for number, layer in enumerate(profile.profiles):
        count = profile.layers.count(number)
        which = f"{count} of {counted(len(profile.layers), 'layer')}"
        lines.append(f"operators worth offloading in {which}, for one layer and micro-batch:")
        rows = [
            (each.operator, format_bytes(each.num_bytes), format_flops(each.flops), _time(each.seconds))
            for each in layer.candidates
        ]
        lines += aligned([("operator", "output", "saves", "time"), *rows])
    return lines


def _drive_rows(nvme: Nvme) -> list[tuple[str, str]]:
    """All directories together and, if there are several, each one alone."""
    together = DriveRates(
        read_bytes_per_second=nvme.read_bytes_per_second,
        write_bytes_per_second=nvme.write_bytes_per_second,
        mixed_bytes_per_second=nvme.mixed_bytes_per_second,
    )
    where = f"{counted(nvme.num_devices, 'drive')}, {format_bytes(nvme.free_bytes)} free"
    if len(nvme.paths) < 2:
        return [("NVMe", f"{_rates(together)}  {', '.join((*nvme.paths, where))}")]
    return [
        ("NVMe", f"{_rates(together)}  together: {where}"),
        *(("", f"{_rates(rates)}  {path} alone") for path, rates in zip(nvme.paths, nvme.alone, strict=False)),
    ]


def _rates(rates: DriveRates) -> str:
    read, write = rates.read_bytes_per_second / 1e9, rates.write_bytes_per_second / 1e9
    mixed = rates.mixed_bytes_per_second / 1e9
    return f"{read:.2f} GB/s read  {write:.2f} GB/s written  {mixed:.2f} GB/s both at once"


def _seconds(layers: Sequence[LayerProfile]) -> str:
    forward = sum(layer.forward_seconds or 0.0 for layer in layers)
    recomputed = sum(layer.recomputed_seconds or 0.0 for layer in layers)
    backward = sum(layer.backward_seconds or 0.0 for layer in layers)
    return (
        f"{counted(len(layers), 'layer')} of {counted(len({id(layer) for layer in layers}), 'kind')}: "
        f"forward {format_seconds(forward)}, recomputation {format_seconds(recomputed)}, "
        f"backward {format_seconds(backward)}"
    )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)
