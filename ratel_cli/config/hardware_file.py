"""A hardware file as `ratel profile -o` or a person writes it: the keys of `hardware.spec`, in YAML or JSON.

Sizes may be written as 24GiB and rates as 3.5GB/s; all other values are plain. Keys with a safe default may be left
out.

Invariant: everything that is wrong is reported at once, each at its line, as one BadInput that carries the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ratel_cli.config.keys.base import Contradiction, Section, contradictions, rejection
from ratel_cli.config.keys.messages import contradictions_in, finding_of
from ratel_cli.config.yaml.source import locate, read_file
from ratel_cli.config.yaml.yaml_marks import Finding, Marked, plain, raise_all, read_text
from ratel_cli.units import parse_bytes, parse_rate


def _to_bytes(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as exc:
        raise rejection("must be a size like 24GiB, 500GB or 1e12") from exc


def _to_rate(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_rate(value)
    except (ValueError, OverflowError) as exc:
        raise rejection("must be a rate like 3.5GB/s or 3.5e9") from exc


Bytes = Annotated[int, Field(ge=0), BeforeValidator(_to_bytes)]
Rate = Annotated[float, Field(gt=0), BeforeValidator(_to_rate)]
Speed = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class GpuSection(Section):
    """The device that runs the blocks: a GPU, or the CPU."""

    name: str = Field(min_length=1)
    """The device's name, for tables."""
    memory_bytes: Bytes
    """All memory of the device."""
    flops_per_second: Speed
    """The rate of large matrix products, in the data type of training."""
    memory_bytes_per_second: Rate | None = None
    """The sum of reading and writing a GPU's own memory. Default: unknown; plans then ignore it."""


class LinkSection(Section):
    """The link between host memory and the GPU."""

    to_gpu_bytes_per_second: Rate
    """The rate of uploads alone."""
    from_gpu_bytes_per_second: Rate
    """The rate of downloads alone."""
    both_bytes_per_second: Rate | None = None
    """The sum of both rates while both are busy. Default: the sum of the single rates, as on a full-duplex link."""
    num_sharing: Count = 1
    """The number of GPUs that share these rates, below one root complex or switch, if all of them are busy."""


class DriveSection(Section):
    """The drive of one directory, while the others are idle."""

    read_bytes_per_second: Rate
    """The rate of reading only."""
    write_bytes_per_second: Rate
    """The rate of writing only."""
    mixed_bytes_per_second: Rate
    """The sum of both rates while as much is read as written."""


class NvmeSection(Section):
    """All directories of the store together."""

    paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The directories that were measured. Default: none, for a machine that is only described."""
    num_devices: Count | None = None
    """The number of drives. Default: one for each of `paths`."""
    read_bytes_per_second: Rate
    """The rate of reading only."""
    write_bytes_per_second: Rate
    """The rate of writing only."""
    mixed_bytes_per_second: Rate | None = None
    """The sum of both rates while as much is read as written. Default: as if reads and writes alternated."""
    weights: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """The share of each path in the stripes. Default: equal shares."""
    free_bytes: Bytes
    """Free space for the store."""
    endurance_tb_written: Speed | None = None
    """What all drives together are rated for, in TB written (10^12 bytes). Default: unknown."""
    alone: Annotated[tuple[DriveSection, ...], Field(strict=False)] = ()
    """The rates of each path's drive while the others are idle. Default: unknown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = []
        if not self.paths and self.num_devices is None:
            message = "`nvme` needs `num_devices`, or `paths`"
            found.append(Contradiction(keys=("num_devices", "paths"), message=message))
        for key, count in (("weights", len(self.weights)), ("alone", len(self.alone))):
            if count not in (0, len(self.paths)):
                message = f"`{key}` has {count} entries, but `paths` has {len(self.paths)}"
                found.append(Contradiction(keys=(key,), message=message))
        if found:
            raise contradictions(found)
        return self


class HostSection(Section):
    """Main memory and the CPU."""

    memory_bytes: Bytes
    """Installed memory."""
    available_bytes: Bytes
    """Memory that a run may use."""
    adam_parameters_per_second: Speed
    """Parameters that AdamW updates on one thread."""
    memory_bytes_per_second: Rate | None = None
    """The sum of reading and writing by all cores. Default: unknown; plans then ignore it."""
    num_cores: Count = 1
    """Cores that compute."""
    activation_bytes: Bytes | None = None
    """The MEM_avail of the paper's equations, for `cost_model: paper`. Default: `available_bytes`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.available_bytes > self.memory_bytes:
            message = "`available_bytes` is more than `memory_bytes`"
            raise contradictions([Contradiction(keys=("available_bytes",), message=message)])
        return self


class NetworkSection(Section):
    """Between this machine and others like it, for `ratel plan --ranks`."""

    bytes_per_second: Rate
    """The rate of each direction while both are busy."""


class PricesSection(Section):
    """What the machine's parts cost, in dollars, for `ratel plan --prices`."""

    server_dollars: Annotated[int, Field(ge=0)]
    """The machine without GPUs and SSDs."""
    gpu_dollars: Annotated[int, Field(ge=0)]
    """A GPU."""
    ssd_dollars: Annotated[int, Field(ge=0)]
    """An SSD."""


class HardwareFile(Section):
    """One machine."""

    format_version: Literal[1] = 1
    """The version of this format."""
    gpu: GpuSection
    """The device that runs the blocks: a GPU, or the CPU."""
    link: LinkSection | None = None
    """The link between host memory and the GPU. Default: none, as for a CPU."""
    nvme: NvmeSection
    """The drives."""
    host: HostSection
    """Main memory and the CPU."""
    network: NetworkSection | None = None
    """The network. Default: unknown."""
    prices: PricesSection | None = None
    """What the machine's parts cost. Default: unknown."""


_SECTIONS: Mapping[tuple[str, ...], type[Section]] = {
    (): HardwareFile,
    ("gpu",): GpuSection,
    ("link",): LinkSection,
    ("nvme",): NvmeSection,
    ("nvme", "alone"): DriveSection,
    ("host",): HostSection,
    ("network",): NetworkSection,
    ("prices",): PricesSection,
}


def read_hardware_file(path: Path) -> HardwareFile:
    """Read and validate a hardware file. Raises BadInput with everything that is wrong."""
    findings: list[Finding] = []
    root = read_text(read_file(path, "hardware file"), str(path), findings)
    if not isinstance(root.content, dict):
        hint = "write `gpu:`, `nvme:` and `host:` with their keys; `ratel profile -o FILE` writes such a file"
        raise Finding(where=root.where, message="a hardware file consists of `key: value` lines", hint=hint).as_error()
    try:
        file = HardwareFile.model_validate(plain(root))
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            findings.extend(_findings_of(error, root, findings))
    raise_all(findings)
    return file


def _findings_of(error: ErrorDetails, root: Marked, earlier: list[Finding]) -> Iterator[Finding]:
    place = locate(root, error["loc"])
    if error["type"] == "contradictions":
        yield from (finding for _, finding in contradictions_in(error, root))
    elif error["type"] == "extra_forbidden":
        *around, key = (step for step in error["loc"] if isinstance(step, str))
        message = f"unknown key `{key}`" + (f" in `{'.'.join(around)}`" if around else "")
        close = get_close_matches(key, _SECTIONS[tuple(around)].model_fields, n=1)
        yield Finding(where=place.key, message=message, hint=f"did you mean `{close[0]}`?" if close else None)
    elif error["input"] is not None or all(finding.where != place.value for finding in earlier):
        # Otherwise the value could not be read, and there is a finding about that.
        yield finding_of(error, root)
