"""What would help: a better machine, a larger batch, or the same batch in other micro-batches, each planned anew by
itself; and what a server costs. Pure.

Invariant: advice gains more than 1 % and fits. The greatest gain comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.units import format_bytes

LEAST_GAIN = 0.01
"""The share of tokens per second that advice must gain."""

_SERVER_DOLLARS = 14_098
"""A commodity 4U server without GPUs and SSDs (Ratel, Table VII)."""
_GPU_DOLLARS = 1_600
"""An NVIDIA RTX 4090 (Table VII)."""
_SSD_DOLLARS = 308
"""An Intel P5510 of 3.84 TB (Table VII)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change, and what it is predicted to give."""

    change: str
    tokens_per_second: float
    gain: float
    """The gain as a share of the tokens per second without the change."""


def advise(setting: Setting, tokens_per_second: Callable[[Setting], float | None]) -> tuple[Advice, ...]:
    """The changes that gain. `tokens_per_second` gives None for a setting that does not fit."""
    now = tokens_per_second(setting)
    if now is None:
        return ()
    advices: list[Advice] = []
    split = best_split(setting, tokens_per_second)
    if split is not None:
        advices.append(split)
    for change, changed in _changes(setting):
        then = tokens_per_second(changed)
        if then is not None and then > (1 + LEAST_GAIN) * now:
            advices.append(Advice(change=change, tokens_per_second=then, gain=then / now - 1))
    return tuple(sorted(advices, key=lambda advice: -advice.gain))


def best_split(setting: Setting, tokens_per_second: Callable[[Setting], float | None]) -> Advice | None:
    """The same tokens per step in other micro-batches. None if no other split gains, or if no smaller micro-batch fits
    where the setting does not.

    It goes from one divisor of the step's rows to the next while that gains. Where the setting does not fit, the gain
    is 0: there is nothing to compare with.
    """
    workload = setting.workload
    rows = workload.micro_batch_size * workload.num_micro_batches

    def rate_of(size: int) -> float | None:
        changed = replace(workload, micro_batch_size=size, num_micro_batches=rows // size)
        return tokens_per_second(replace(setting, workload=changed))

    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    start = divisors.index(workload.micro_batch_size)
    now = best = tokens_per_second(setting)
    chosen: int | None = None
    smaller, larger = divisors[:start][::-1], divisors[start + 1 :]
    for size in smaller:
        then = rate_of(size)
        if then is not None and (best is None or then > best):
            best, chosen = then, size
        elif best is not None:
            break
    for size in larger if now is not None else ():
        then = rate_of(size)
        if then is None or best is None or then <= best:
            break
        best, chosen = then, size
    if chosen is None or best is None or (now is not None and best <= (1 + LEAST_GAIN) * now):
        return None
    change = f"micro_batch_size: {chosen}, gradient_accumulation_steps: {rows // chosen} (the same tokens per step)"
    return Advice(change=change, tokens_per_second=best, gain=0.0 if now is None else best / now - 1)


def with_drives(hardware: HardwareProfile, count: int) -> HardwareProfile:
    """The machine with `count` drives of the kind that it has; each has its share of the rates and the space."""
    nvme = hardware.nvme
    times = count / nvme.num_devices
    return replace(
        hardware,
        nvme=replace(
            nvme,
            num_devices=count,
            read_bytes_per_second=times * nvme.read_bytes_per_second,
            write_bytes_per_second=times * nvme.write_bytes_per_second,
            mixed_bytes_per_second=times * nvme.mixed_bytes_per_second,
            free_bytes=int(times * nvme.free_bytes),
            endurance_tb_written=None if nvme.endurance_tb_written is None else times * nvme.endurance_tb_written,
        ),
    )


def server_dollars(*, num_gpus: int, num_ssds: int) -> int:
    """The price of the Ratel paper's commodity server with this many RTX 4090 and SSDs (Table VII)."""
    return _SERVER_DOLLARS + _GPU_DOLLARS * num_gpus + _SSD_DOLLARS * num_ssds


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    hardware, workload, limit_bytes = setting.hardware, setting.workload, setting.host_limit_bytes
    count = hardware.nvme.num_devices + 1
    yield f"one more SSD, {count} in all", replace(setting, hardware=with_drives(hardware, count))
    host = hardware.host
    memory_bytes = limit_bytes or host.memory_bytes
    activation_bytes = host.activation_bytes
    more_memory = replace(
        host,
        memory_bytes=2 * host.memory_bytes,
        available_bytes=host.available_bytes + host.memory_bytes,
        activation_bytes=None if activation_bytes is None else activation_bytes + host.memory_bytes,
    )
    yield (
        f"twice the RAM, {format_bytes(2 * memory_bytes)}",
        replace(
            setting,
            hardware=replace(hardware, host=more_memory),
            host_limit_bytes=None if limit_bytes is None else 2 * limit_bytes,
        ),
    )
    rows, number = 2 * workload.micro_batch_size, 2 * workload.num_micro_batches
    yield f"micro_batch_size: {rows}", replace(setting, workload=replace(workload, micro_batch_size=rows))
    yield (
        f"gradient_accumulation_steps: {number}",
        replace(setting, workload=replace(workload, num_micro_batches=number)),
    )
