"""A hardware file as a person writes it, or `ratel profile -o` does: the keys of `hardware.spec`, in YAML or JSON.

Called by `run.hardware_file`, which makes a profile of it. Sizes may be written 24GiB and rates 3.5GB/s; other
numbers are plain. What has an honest default may be left out.

Invariant: all that is wrong is told at once, each at its line, as one BadInput that carries the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ratel_cli.config.messages import explain_error
from ratel_cli.config.sections import Contradiction, Section, refuse, refuse_together
from ratel_cli.config.source import locate, place_of_keys, read_file
from ratel_cli.config.yaml_marks import Finding, Marked, plain, read_text
from ratel_cli.units import parse_bytes


def _to_bytes(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as exc:
        raise refuse("must be a size like 24GiB, 500GB or 1e12") from exc


def _to_rate(value: object) -> object:
    if not isinstance(value, str):
        return value
    size, slash, second = value.partition("/")
    try:
        if slash + second.strip() != "/s":
            raise ValueError(value)
        return float(parse_bytes(size))
    except (ValueError, OverflowError) as exc:
        raise refuse("must be a rate like 3.5GB/s or 3.5e9") from exc


Bytes = Annotated[int, Field(ge=0), BeforeValidator(_to_bytes)]
Rate = Annotated[float, Field(gt=0), BeforeValidator(_to_rate)]
Speed = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class GpuSection(Section):
    """The device that runs the blocks."""

    name: str = Field(min_length=1)
    """For people."""
    memory_bytes: Bytes
    """All of its memory."""
    flops_per_second: Speed
    """Of large matrix products, in the dtype that will be trained in."""


class LinkSection(Section):
    """Between host memory and the GPU."""

    to_gpu_bytes_per_second: Rate
    """While nothing comes back."""
    from_gpu_bytes_per_second: Rate
    """While nothing goes there."""
    both_bytes_per_second: Rate | None = None
    """Both directions together, at the same time. Default: the sum, as PCI Express is full duplex."""


class DriveSection(Section):
    """One directory's drive, alone."""

    read_bytes_per_second: Rate
    """Reading only."""
    write_bytes_per_second: Rate
    """Writing only."""
    mixed_bytes_per_second: Rate
    """Both directions together, as much read as written."""


class NvmeSection(Section):
    """All store directories together."""

    paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The directories that were measured. Default: none, where a machine is only described."""
    num_devices: Count | None = None
    """How many drives. Default: one for each of `paths`."""
    read_bytes_per_second: Rate
    """Reading only."""
    write_bytes_per_second: Rate
    """Writing only."""
    mixed_bytes_per_second: Rate | None = None
    """Both directions together, as much read as written. Default: as if one waited for the other."""
    weights: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """The paths' shares of the stripes. Default: equal ones."""
    free_bytes: Bytes
    """Space for the store."""
    endurance_tb_written: Speed | None = None
    """What the drives are rated for, all together, in TB written (10^12 bytes). Default: unknown."""
    alone: Annotated[tuple[DriveSection, ...], Field(strict=False)] = ()
    """What each path does while the others rest. Default: unknown."""

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
            raise refuse_together(found)
        return self


class HostSection(Section):
    """Main memory and the CPU."""

    memory_bytes: Bytes
    """Installed."""
    available_bytes: Bytes
    """What a run may take."""
    adam_parameters_per_second: Speed
    """AdamW updates on one thread."""
    memory_bytes_per_second: Rate | None = None
    """Read and written together, by all cores. Default: unknown, and then it bounds nothing."""
    num_cores: Count = 1
    """Cores for computing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.available_bytes > self.memory_bytes:
            message = "`available_bytes` is more than `memory_bytes`"
            raise refuse_together([Contradiction(keys=("available_bytes",), message=message)])
        return self


class HardwareFile(Section):
    """One machine."""

    format_version: Literal[1] = 1
    """Of the file."""
    gpu: GpuSection
    """The device that runs the blocks: a GPU, or the CPU."""
    link: LinkSection | None = None
    """Default: none, as where the CPU runs the blocks."""
    nvme: NvmeSection
    """The drives."""
    host: HostSection
    """Main memory and the CPU."""


_SECTIONS: Mapping[tuple[str, ...], type[Section]] = {
    (): HardwareFile,
    ("gpu",): GpuSection,
    ("link",): LinkSection,
    ("nvme",): NvmeSection,
    ("nvme", "alone"): DriveSection,
    ("host",): HostSection,
}


def read_hardware_file(path: Path) -> HardwareFile:
    """Read and validate. Raises BadInput with all there is to correct."""
    findings: list[Finding] = []
    root = read_text(read_file(path, "hardware file"), str(path), findings)
    if not isinstance(root.content, dict):
        hint = "write `gpu:`, `nvme:` and `host:` with their keys; `ratel profile -o FILE` makes one"
        raise Finding(where=root.where, message="a hardware file is `key: value` lines", hint=hint).as_error()
    file = _validate(root, findings)
    if findings or file is None:
        first, *others = sorted(findings, key=lambda finding: finding.where)
        raise first.as_error(tuple(other.as_error() for other in others))
    return file


def _validate(root: Marked, findings: list[Finding]) -> HardwareFile | None:
    """The file; None where it is not valid, and then findings say why."""
    try:
        return HardwareFile.model_validate(plain(root))
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            _tell(error, root, findings)
        return None


def _tell(error: ErrorDetails, root: Marked, findings: list[Finding]) -> None:
    location = error["loc"]
    place = locate(root, location)
    if error["type"] == "contradictions":
        findings.extend(
            Finding(where=place_of_keys(root, location, each.keys), message=each.message, hint=each.hint)
            for each in error["ctx"]["found"]
        )
    elif error["type"] == "extra_forbidden":
        *around, key = (step for step in location if isinstance(step, str))
        message = f"unknown key `{key}`" + (f" in `{'.'.join(around)}`" if around else "")
        close = get_close_matches(key, _SECTIONS[tuple(around)].model_fields, n=1)
        findings.append(
            Finding(where=place.key, message=message, hint=f"did you mean `{close[0]}`?" if close else None)
        )
    elif error["input"] is not None or all(finding.where != place.value for finding in findings):
        # Else the value could not be read, and that has been told.
        message, hint = explain_error(error, place.name, None)
        where = place.key if error["input"] is None else place.value
        findings.append(Finding(where=where, message=message, hint=hint))
