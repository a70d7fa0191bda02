"""What a machine can do, as a value: measured by `hardware.measure`, read by everything in `planning`.

Pure: no torch. The JSON form is the hardware file of the user's contract.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ratel_cli.units import GIB, MIB

FORMAT_VERSION = 1
GPU_CONTEXT_BYTES = 640 * MIB
"""What CUDA takes of a GPU before anything is allocated: context, kernels, queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """The device that runs the blocks: a GPU, or the CPU with a budget of host memory in its place."""

    name: str
    memory_bytes: int
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between host memory and the GPU."""

    to_gpu_bytes_per_second: float
    from_gpu_bytes_per_second: float
    both_bytes_per_second: float
    """Both directions together while as much goes up as comes down, at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """What one or several drives do, as the run's own queue sees them."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Both directions together while as much is read as written, at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All store directories together, as the run's own queue sees them."""

    paths: tuple[str, ...]
    """Empty where a hardware file describes a machine that is elsewhere."""
    num_devices: int = 1
    """Drives that the directories are on."""
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Both directions together while as much is read as written, at the same time."""
    weights: tuple[int, ...]
    """The paths' shares of the stripes, by how fast their drives are alone (io/striping.py)."""
    free_bytes: int
    endurance_tb_written: float | None = None
    """What the drives are rated for, all together, in 10^12 bytes; from a file that a person wrote."""
    alone: tuple[DriveRates, ...] = ()
    """What each path's drive does while the others rest. Empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Main memory and the CPU's share of the work."""

    memory_bytes: int
    available_bytes: int
    adam_parameters_per_second: float
    """On one thread."""
    memory_bytes_per_second: float | None = None
    """Read and written together, by all cores. None: unknown."""
    num_cores: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine."""

    gpu: ComputeDevice
    link: Link | None = None
    """None where the CPU runs the blocks."""
    nvme: Nvme
    host: Host

    def to_json(self) -> dict[str, object]:
        """The hardware file's content."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}


def alternating_bytes_per_second(read_bytes_per_second: float, write_bytes_per_second: float) -> float:
    """The mixed rate of a drive that does one thing at a time: what to assume where it was not measured."""
    return 2 / (1 / read_bytes_per_second + 1 / write_bytes_per_second)


def margin_bytes(memory_bytes: int) -> int:
    """What is left to everything else, of a memory of this size, where the user sets no limit."""
    return max(GIB, memory_bytes // 20)
