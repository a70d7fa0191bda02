"""What a machine can do, as a value: measured by `hardware.measure`, read by everything in `planning`.

Pure: no torch. The JSON form is the hardware file of the user's contract.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """The device that runs the blocks: a GPU, or the CPU with a budget of host memory in its place."""

    name: str
    memory_bytes: int
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All store directories together, as the run's own queue sees them."""

    paths: tuple[str, ...]
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Both directions together while as much is read as written, at the same time."""
    weights: tuple[int, ...]
    """The paths' shares of the stripes, by how fast their drives are alone (movement/extents.py)."""
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Main memory and the CPU's share of the work."""

    memory_bytes: int
    available_bytes: int
    adam_parameters_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine."""

    gpu: ComputeDevice
    nvme: Nvme
    host: Host

    def to_json(self) -> dict[str, object]:
        """The hardware file's content."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}
