"""What `ratel doctor` finds about this machine: each check ends in a verdict, a reason, and a remedy if one is needed.

Here is what the kernel says: io_uring, huge pages, limits on memory, the processor's instructions; and what the
environment says of torch's threads. Drives are in `checkup_drives`, GPUs in `checkup_gpu`.

`slow`: a run works, but not as fast as it could. `broken`: a run would fail. Invariant: a check depends only on its
arguments, so a test can give it any machine. What slows a run down is
said only where it was measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ratel_cli.hardware.host import available_bytes, group_limit_bytes
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.openmp import SPIN_ROUNDS, WAIT_POLICY
from ratel_cli.units import GIB, format_bytes

Verdict = Literal["ok", "slow", "broken"]

_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"
_LEAST_AVAILABLE_BYTES: Final = 2 * GIB
"""A run takes half a GiB before it has done anything, and leaves a margin of one to everything else."""
_BF16_PRODUCTS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_DIGITS_OF_LONG_SPINNING: Final = 5
"""10,000 rounds take some microseconds; libgomp's own 300,000 take longer than most waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one check."""

    what: str
    """What was checked, such as `huge pages`."""
    verdict: Verdict
    reason: str
    """In one line."""
    remedy: str | None = None
    """What to do: a command, a key of the config, or a sentence. None if nothing is to be done."""


def check_io_uring(files: SystemFiles, failure: str | None, *, is_required: bool) -> Diagnosis:
    """`failure`: why io_uring could not be used; None if it could. `is_required`: the config asks for it."""
    if failure is None:
        return Diagnosis(what="io_uring", verdict="ok", reason="available")
    disabled = files.number("proc/sys/kernel/io_uring_disabled")
    filtered = re.search(r"^Seccomp:\s*[12]", files.text("proc/self/status") or "", flags=re.MULTILINE)
    remedy = "set storage.engine to threads"
    if disabled:
        remedy = "sudo sysctl kernel.io_uring_disabled=0"
    elif filtered:
        remedy = "allow it in the container: --security-opt seccomp=unconfined, or a profile with the io_uring calls"
    verdict: Verdict = "broken" if is_required else "slow"
    reason = failure if is_required else f"{failure}; threads move the bytes, with more CPU time"
    return Diagnosis(what="io_uring", verdict=verdict, reason=reason, remedy=remedy)


def check_huge_pages(files: SystemFiles) -> Diagnosis:
    """Whether the kernel gives huge pages to those who ask. Reads are a third faster into them (io/buffers.py)."""
    choices = files.text(_HUGE_PAGES)
    if choices is None:
        reason = "this kernel has none: transfers take more CPU time"
        return Diagnosis(
            what="huge pages", verdict="slow", reason=reason, remedy="use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
        )
    chosen = re.search(r"\[(\w+)\]", choices)
    if chosen is not None and chosen[1] == "never":
        return Diagnosis(
            what="huge pages",
            verdict="slow",
            reason="turned off: transfers take more CPU time",
            remedy=f"echo madvise | sudo tee /{_HUGE_PAGES}",
        )
    return Diagnosis(what="huge pages", verdict="ok", reason=f"given on {chosen[1] if chosen else 'request'}")


def check_memory(files: SystemFiles, *, wanted_bytes: int | None) -> Diagnosis:
    """Memory that is available, and the control group's limit. `wanted_bytes`: `limits.host_memory` of the config."""
    available, limit = (
        available_bytes(files.proc, files.control_groups),
        group_limit_bytes(files.proc, files.control_groups),
    )
    total = memory_total_bytes(files)
    where = f"of {format_bytes(total)}"
    raise_limit = "close other programs, or use a machine with more RAM"
    if limit is not None and limit < total:
        where = f"within the control group's limit of {format_bytes(limit)} (the machine has {format_bytes(total)})"
        raise_limit = "raise the container's or the job's limit: docker run --memory, systemd MemoryMax=, slurm --mem"
    reason = f"{format_bytes(available)} available {where}"
    if wanted_bytes is not None and wanted_bytes > available:
        most_bytes = total if limit is None else min(limit, total)
        return Diagnosis(
            what="memory",
            verdict="broken" if wanted_bytes > most_bytes else "slow",
            reason=f"{reason}, but limits.host_memory is {format_bytes(wanted_bytes)}",
            remedy=f"lower limits.host_memory; or {raise_limit}",
        )
    if available < _LEAST_AVAILABLE_BYTES:
        return Diagnosis(what="memory", verdict="broken", reason=reason, remedy=raise_limit)
    return Diagnosis(what="memory", verdict="ok", reason=reason)


def check_waiting(environment: Mapping[str, str]) -> Diagnosis:
    """Whether torch's idle threads sleep soon. `environment`: the variables of a run."""
    name = SPIN_ROUNDS if SPIN_ROUNDS in environment else WAIT_POLICY
    value = environment.get(name, "")
    if (value.isdecimal() and len(value) < _DIGITS_OF_LONG_SPINNING) or value.lower() == "passive":
        return Diagnosis(what="threads", verdict="ok", reason=f"idle threads sleep soon ({name}={value})")
    return Diagnosis(
        what="threads",
        verdict="slow",
        reason=f"idle threads spin ({name}={value}): beside other programs a step takes several times as long",
        remedy=f"unset {name}",
    )


def check_bf16(files: SystemFiles) -> Diagnosis:
    """Whether the processor has instructions for products of bf16 numbers, for a run that computes on it in bf16."""
    flags = instruction_flags(files)
    if not flags or flags & _BF16_PRODUCTS:
        return Diagnosis(what="bf16", verdict="ok", reason="the processor multiplies in bf16")
    return Diagnosis(
        what="bf16",
        verdict="slow",
        reason="this processor has no bf16 instructions, so a step in bf16 takes 8 to 47 times as long as one in fp32",
        remedy="set dtype: float32",
    )


def instruction_flags(files: SystemFiles) -> frozenset[str]:
    """What the processor can do, in the kernel's words; empty if it does not say."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", files.text("proc/cpuinfo") or "", flags=re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def memory_total_bytes(files: SystemFiles) -> int:
    """The machine's main memory."""
    found = re.search(r"^MemTotal:\s*(\d+)", files.text("proc/meminfo") or "", flags=re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
