"""A machine by the names of its parts, as `ratel plan --gpu rtx4090 --ram 64GB --ssd 2x990pro` gives them.

What the parts can do stands in parts.yaml, with where each number comes from. Invariant: what is described is what a
hardware file with the same numbers describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ratel_cli.config.hardware_file import HardwareFile
from ratel_cli.config.yaml.yaml_marks import plain, read_text
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.units import parse_bytes, parse_rate

_FILE = Path(__file__).with_name("parts.yaml")
_SEVERAL = re.compile(r"(?:([1-9]\d{0,2})\s*x\s*)?(.+)", re.IGNORECASE)
_MOST_BYTES = 1 << 50
"""Most bytes of host memory, and most that a drive moves in a second: no machine has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the options name."""

    gpu: str
    ram: str | None = None
    ssd: str | None = None

    def machine(self) -> HardwareFile:
        """The machine of these parts, and of usual ones where none is named. Raises BadInput for an unknown one."""
        known = _known()
        chosen = _found("--gpu", self.gpu, known["gpus"])
        memory_bytes = _memory_bytes(self.ram or known["ram"], least_bytes=parse_bytes(known["system_bytes"]))
        host = {
            **known["host"],
            **chosen.get("host", {}),
            "memory_bytes": memory_bytes,
            "available_bytes": memory_bytes - parse_bytes(known["system_bytes"]),
        }
        link, nvme = known["links"][chosen["link"]], _drives(self.ssd or known["ssd"], known)
        return HardwareFile.model_validate({"gpu": chosen["gpu"], "link": link, "nvme": nvme, "host": host})


@cache
def _known() -> dict[str, Any]:
    read = plain(read_text(_FILE.read_text(encoding="utf-8"), str(_FILE), []))
    assert isinstance(read, dict)
    return read


def _found(option: str, name: str, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as YAML has it
    """The part of this name, however it is written: RTX 4090, rtx-4090, 4090."""
    short = re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
    for each in (short, f"rtx{short}"):
        if each in parts:
            return parts[each]
    close = get_close_matches(short, parts, n=3) or get_close_matches(f"rtx{short}", parts, n=3)
    hint = f"did you mean {' or '.join(close)}? Another" if close else f"known are {', '.join(parts)}; another"
    raise BadInput(
        f"argument '{option}': {excerpt(name)} is not known", f"{hint} one can be described in a file for --hardware"
    )


def _memory_bytes(text: str, *, least_bytes: int) -> int:
    """Memory is sold in GB that are GiB."""
    try:
        num_bytes = parse_bytes(re.sub(r"(?i)gb?$", "GiB", text.strip()))
    except ValueError:
        num_bytes = 0
    if not least_bytes < num_bytes <= _MOST_BYTES:
        raise BadInput(
            f"argument '--ram': must be a size with a unit, more than 4GB, such as 64GB, not {excerpt(text)}"
        )
    return num_bytes


def _drives(text: str, known: Mapping[str, Any]) -> dict[str, object]:
    """`nvme` of a hardware file: drives of one name, or of the rate that each reads and writes with."""
    match = _SEVERAL.fullmatch(text.strip())
    number, name = int(match[1] or 1) if match else 1, match[2] if match else text
    if "/" in name:
        one = {"read_bytes_per_second": name, "write_bytes_per_second": name, "free_bytes": known["drive_bytes"]}
    else:
        one = _found("--ssd", name, known["drives"])
    return {
        "num_devices": number,
        "read_bytes_per_second": number * _rate(one["read_bytes_per_second"]),
        "write_bytes_per_second": number * _rate(one["write_bytes_per_second"]),
        "free_bytes": number * parse_bytes(one["free_bytes"]),
        "endurance_tb_written": float(number * one["endurance_tb_written"]) if "endurance_tb_written" in one else None,
    }


def _rate(text: str) -> float:
    try:
        rate = parse_rate(text)
    except (ValueError, OverflowError):
        rate = 0.0
    if not 0 < rate <= _MOST_BYTES:
        raise BadInput(f"argument '--ssd': must be like 2x990pro or 2x7GB/s, not {excerpt(text)}")
    return rate
