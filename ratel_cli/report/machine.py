"""The words of a machine's profile: one row for each thing that was measured.

Invariant: nothing is decided here, and nothing heavy is imported.
"""

from __future__ import annotations

from ratel_cli.hardware.spec import DriveRates, HardwareProfile, Nvme
from ratel_cli.units import counted, format_bytes, format_count


def hardware_rows(profile: HardwareProfile, *, dtype: str) -> list[tuple[str, str]]:
    """Rows of a name and a fact. `dtype` is the type of the matrix products that were measured."""
    gpu, link, host = profile.gpu, profile.link, profile.host
    rows = [("compute", f"{gpu.name}: {gpu.flops_per_second / 1e12:.3g} TFLOP/s in {dtype}")]
    if link is not None:
        up, down = _rate(link.to_gpu_bytes_per_second), _rate(link.from_gpu_bytes_per_second)
        rows += [
            ("GPU memory", format_bytes(gpu.memory_bytes)),
            ("link", f"{up} to the GPU, {down} from it, {_rate(link.both_bytes_per_second)} both at once"),
        ]
    memory = f"{format_bytes(host.memory_bytes)}, {format_bytes(host.available_bytes)} of it available"
    if host.memory_bytes_per_second is not None:
        memory += f"; {_rate(host.memory_bytes_per_second)} read and written by {counted(host.num_cores, 'core')}"
    rows.append(("memory", memory))
    rows.append(("AdamW", f"{format_count(host.adam_parameters_per_second)} parameters/s on one thread"))
    return [*rows, *_drive_rows(profile.nvme)]


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


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
