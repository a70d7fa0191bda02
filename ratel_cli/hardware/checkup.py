"""What `ratel doctor` finds about this machine: each check ends in a verdict, a reason, and a remedy if one is needed.

Here is what the kernel says: io_uring, huge pages, locked memory, swap, limits on memory, the processor's clock; and
what the environment says of torch's threads. Drives are in `checkup_drives`, GPUs in `checkup_gpu`.

`slow`: a run works, but not as fast as it could. `broken`: a run would fail. Invariant: a check depends only on its
arguments, so a test can give it any machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ratel_cli.hardware.host import available_bytes, group_limit_bytes
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.openmp import SPIN_ROUNDS, WAIT_POLICY
from ratel_cli.units import GIB, MIB, counted, format_bytes

Verdict = Literal["ok", "slow", "broken"]

_CPUS: Final = "sys/devices/system/cpu"
_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"
_SELF_GOVERNING: Final = ("intel_pstate", "amd-pstate-epp")
"""Drivers that raise the clock under load whatever the governor's name is."""
_LEAST_AVAILABLE_BYTES: Final = 2 * GIB
"""A run takes half a GiB before it has done anything, and leaves a margin of one to everything else."""
_SWAPPED_SHARE: Final = 0.05
_CLOCK_SHARE: Final = 0.95
_BF16_PRODUCTS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_COUNTS_RINGS_BEFORE: Final = (5, 12)
"""Kernels before this one count a ring's memory as locked."""
_RING_BYTES: Final = 8 * MIB
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


def check_locked_memory(limit_bytes: int | None, kernel: str) -> Diagnosis:
    """`limit_bytes`: RLIMIT_MEMLOCK; None: there is no limit. `kernel`: its release, such as `6.8.0-45-generic`."""
    if limit_bytes is None:
        return Diagnosis(what="memlock", verdict="ok", reason="no limit")
    numbers = tuple(map(int, re.findall(r"\d+", kernel)[:2]))
    if numbers < _COUNTS_RINGS_BEFORE and limit_bytes < _RING_BYTES:
        return Diagnosis(
            what="memlock",
            verdict="slow",
            reason=f"{format_bytes(limit_bytes)}: this kernel counts io_uring's memory, which may not fit",
            remedy="ulimit -l unlimited",
        )
    return Diagnosis(what="memlock", verdict="ok", reason=f"{format_bytes(limit_bytes)}; Ratel locks no memory itself")


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


def check_swap(files: SystemFiles) -> Diagnosis:
    """Whether memory was swapped out: what a run has in memory would be read from a drive again."""
    areas = [line.split() for line in (files.text("proc/swaps") or "").splitlines()[1:]]
    sizes = [
        (int(area[2]), int(area[3])) for area in areas if len(area) >= 4 and area[2].isdigit() and area[3].isdigit()
    ]
    if not sizes:
        return Diagnosis(what="swap", verdict="ok", reason="none")
    total, used = (1024 * sum(column) for column in zip(*sizes, strict=True))
    if used > max(GIB, _SWAPPED_SHARE * memory_total_bytes(files)):
        return Diagnosis(
            what="swap",
            verdict="slow",
            reason=f"{format_bytes(used)} of {format_bytes(total)} are swapped out: memory is short",
            remedy="close what uses the memory, then: sudo swapoff -a && sudo swapon -a",
        )
    return Diagnosis(what="swap", verdict="ok", reason=f"{format_bytes(used)} of {format_bytes(total)} used")


def check_clock(files: SystemFiles) -> Diagnosis:
    """Whether the processor may use its full clock."""
    cpus = [name for name in files.names(_CPUS) if re.fullmatch(r"cpu\d+", name)]
    scaling = [f"{_CPUS}/{cpu}/cpufreq" for cpu in cpus if files.text(f"{_CPUS}/{cpu}/cpufreq/scaling_governor")]
    if not scaling:
        return Diagnosis(what="CPU clock", verdict="ok", reason="not visible here (a virtual machine, or a container)")
    saving = [each for each in scaling if _saves_power(files, each)]
    governors = sorted({files.text(f"{each}/scaling_governor") or "" for each in saving or scaling})
    names = ", ".join(governors)
    if saving:
        return Diagnosis(
            what="CPU clock",
            verdict="slow",
            reason=f"{counted(len(saving), 'core')} of {len(scaling)} save power (governor {names})",
            remedy="sudo cpupower frequency-set -g performance",
        )
    capped = [each for each in scaling if _is_capped(files, each)]
    if capped:
        return Diagnosis(
            what="CPU clock",
            verdict="slow",
            reason=f"the clock of {counted(len(capped), 'core')} of {len(scaling)} is limited below its maximum",
            remedy="sudo cpupower frequency-set -u MAXIMUM; cpupower frequency-info shows it",
        )
    return Diagnosis(what="CPU clock", verdict="ok", reason=f"governor {names}")


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


def _saves_power(files: SystemFiles, scaling: str) -> bool:
    governor = files.text(f"{scaling}/scaling_governor")
    if files.text(f"{scaling}/scaling_driver") in _SELF_GOVERNING:
        return files.text(f"{scaling}/energy_performance_preference") == "power"
    return governor in ("powersave", "conservative")


def _is_capped(files: SystemFiles, scaling: str) -> bool:
    most, allowed = (files.number(f"{scaling}/{name}") for name in ("cpuinfo_max_freq", "scaling_max_freq"))
    return most is not None and allowed is not None and allowed < _CLOCK_SHARE * most
