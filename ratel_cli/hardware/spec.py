"""What a machine can do, as a value. Measured by `hardware.measure`, or read from a hardware file; plans depend on it.

Pure: no torch. The JSON form of HardwareProfile is the hardware file, and `config.hardware_file` describes each field.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ratel_cli.units import GIB, MIB

FORMAT_VERSION = 1
GPU_CONTEXT_BYTES = 640 * MIB
"""GPU memory that CUDA takes before anything is allocated: context, kernels, queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    """The device that runs the blocks: a GPU, or the CPU with a part of the host memory in its place."""

    name: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float | None = None
    """Rate of a GPU's own memory, reading and writing together. None: unknown, or the CPU computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Rates between host memory and the GPU."""

    to_gpu_bytes_per_second: float
    from_gpu_bytes_per_second: float
    both_bytes_per_second: float
    """The sum of both rates while both directions are busy."""
    num_sharing: int = 1
    """GPUs that share these rates, below one root complex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Rate between machines; in a rank's share of a machine, between the rank and all other ranks."""

    bytes_per_second: float
    """Rate of each direction while both are busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """What one drive or several can do, measured through the queue that training uses."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """The sum of both rates while as much is read as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvme:
    """All directories of the store together."""

    paths: tuple[str, ...]
    """Empty if a hardware file describes a machine that is elsewhere."""
    num_devices: int = 1
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    shares: tuple[int, ...]
    """The share of each path in the stripes, by the speed of its drive alone (io/striping.py)."""
    free_bytes: int
    endurance_tb_written: float | None = None
    """TB (10^12 bytes) that the drives are rated for, from a hardware file. None: unknown; nothing measures it."""
    alone: tuple[DriveRates, ...] = ()
    """Rates of each path's drive while the others are idle. Empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Main memory and the CPU."""

    memory_bytes: int
    available_bytes: int
    adam_parameters_per_second: float
    """On one thread."""
    memory_bytes_per_second: float | None = None
    """Reading and writing together, by all cores. None: unknown."""
    num_cores: int = 1
    activation_bytes: int | None = None
    """The paper's MEM_avail, for `cost_model: paper`, from a hardware file. None: all that is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the machine's parts cost, in dollars."""

    server_dollars: int
    """Without GPUs and SSDs."""
    gpu_dollars: int
    ssd_dollars: int

    def dollars(self, *, num_ssds: int) -> int:
        """The price of the server with one GPU and this many SSDs."""
        return self.server_dollars + self.gpu_dollars + self.ssd_dollars * num_ssds


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One machine."""

    gpu: ComputeDevice
    link: Link | None = None
    """The link between host memory and the GPU; None if the CPU computes."""
    nvme: Nvme
    host: Host
    network: Network | None = None
    """None: unknown; plans then ignore it."""
    prices: Prices | None = None
    """Prices from a hardware file. None: unknown; nothing measures them."""

    def to_json(self) -> dict[str, object]:
        """The content of a hardware file."""
        content = asdict(self)
        names = {"shares": "weights"}  # as files have it
        content["nvme"] = {names.get(key, key): value for key, value in content["nvme"].items()}
        return {"format_version": FORMAT_VERSION, **content}


def alternating_bytes_per_second(read_bytes_per_second: float, write_bytes_per_second: float) -> float:
    """The mixed rate of a drive that alternates between reads and writes: the assumption if it was not measured."""
    return 2 / (1 / read_bytes_per_second + 1 / write_bytes_per_second)


def plannable_gpu_bytes(limit_bytes: int) -> int:
    """What a plan may use of a limit on GPU memory: all but 4 %.

    torch's allocator takes memory in segments that are rarely full. Where none is left, it gives its cache back and
    stops the GPU until it can.
    """
    return limit_bytes - limit_bytes // 25


def margin_bytes(memory_bytes: int) -> int:
    """How much of a memory of this size a run leaves to everything else, if the user sets no limit."""
    return max(GIB, memory_bytes // 20)
