"""What would help: a better machine, a larger batch, the same batch in other micro-batches, no clipping, or an adapter
instead of the whole model, each planned anew by itself. Pure.

Invariant: advice gains more than 1 %, or writes less, and fits. The greatest gain comes first. Advice that changes the
weights says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.forecast.forecast import Forecast, Setting
from ratel_cli.planning.search.split import LEAST_GAIN, SplitRate, best_split
from ratel_cli.units import format_bytes

_SHOWN_AS_FASTER = 1.05
_SHOWN_WHOLE = 10
_LARGER = "twice the tokens per step: the result differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change, and what it is predicted to give."""

    change: str
    tokens_per_second: float
    gain: float
    """The gain as a share of the tokens per second without the change; with clipping, those of a clipped step."""
    unclipped_gain: float | None = None
    """No clipping only: the gain over a step that is not clipped, if such a step takes another time than a clipped one.
    """
    times_less_written: float | None = None
    """An adapter only: what a step writes to NVMe without the change, by what it writes with it."""


def best_first(advices: Iterable[Advice]) -> tuple[Advice, ...]:
    """The advices in the order in which they are shown."""
    return tuple(sorted(advices, key=lambda advice: -advice.gain))


def advise(
    setting: Setting, rate: Callable[[Setting], SplitRate], *, chunk_bytes: int | None = None
) -> tuple[Advice, ...]:
    """The changes that gain; where the setting does not fit, only a split of its step that does. `chunk_bytes`: what
    the plan chose for the head, which stays where a change leaves micro-batches as they are; None: it is chosen anew.
    """
    now = rate(setting)
    split = other_split(setting, rate) if setting.has_own_split else None
    advices = [] if split is None else [split]
    for change, changed in _changes(setting) if now.fits else ():
        keeps_chunk = changed.workload.micro_batch_tokens == setting.workload.micro_batch_tokens
        then = rate(replace(changed, chunk_bytes=chunk_bytes or changed.chunk_bytes) if keeps_chunk else changed)
        if then.fits and then.tokens_per_second > (1 + LEAST_GAIN) * now.tokens_per_second:
            advices.append(_advice(change, now, then, stops_clipping=changed.clips != setting.clips))
    return best_first(advices)


def adapter_advice(now: Forecast, then: Forecast, *, rank: int, tokens_per_second: float) -> Advice | None:
    """A LoRA adapter of this rank instead of the whole model; None if that does not fit, or writes no less.

    `now` and `then` are the forecasts of the two by costs of one kind. `tokens_per_second`: of the whole model, as the
    plan shows it. Where the whole model does not fit, the gain is 0: there is nothing to compare with.
    """
    written_bytes = then.prediction.traffic.written_bytes
    times_less = now.prediction.traffic.written_bytes / written_bytes if written_bytes else 0.0
    if not then.fits or times_less <= 1:
        return None
    times = then.prediction.tokens_per_second / now.prediction.tokens_per_second
    speed = f", {times:.1f} x faster" if now.fits and times >= _SHOWN_AS_FASTER else ""
    return Advice(
        change=f"adapter: lora (LoRA r={rank}: {_times_words(times_less)} x less written{speed}; the result differs)",
        tokens_per_second=times * tokens_per_second,
        gain=times - 1 if now.fits else 0.0,
        times_less_written=times_less,
    )


def _times_words(times: float) -> str:
    return f"{times:.1f}" if times < _SHOWN_WHOLE else f"{times:,.0f}"


def other_split(setting: Setting, rate: Callable[[Setting], SplitRate]) -> Advice | None:
    """Advise other micro-batches with the same tokens per step. None if no other split gains, or if none fits.

    Where the setting does not fit, the gain is 0: there is nothing to compare with.
    """
    now = rate(setting)
    best = best_split(setting.workload, lambda workload: rate(replace(setting, workload=workload)))
    if not best.fits or (now.fits and best.tokens_per_second <= (1 + LEAST_GAIN) * now.tokens_per_second):
        return None
    workload = best.workload
    change = (
        f"micro_batch_size: {workload.micro_batch_size}, "
        f"gradient_accumulation_steps: {workload.num_micro_batches} (the same tokens per step)"
    )
    gain = best.tokens_per_second / now.tokens_per_second - 1 if now.fits else 0.0
    return Advice(change=change, tokens_per_second=best.tokens_per_second, gain=gain)


def _advice(change: str, now: SplitRate, then: SplitRate, *, stops_clipping: bool) -> Advice:
    gain = then.tokens_per_second / now.tokens_per_second - 1
    if not stops_clipping:
        return Advice(change=change, tokens_per_second=then.tokens_per_second, gain=gain)
    facts, unclipped_gain = "no clipping: the result differs", None
    if now.unclipped_tokens_per_second is not None:
        unclipped_gain = then.tokens_per_second / now.unclipped_tokens_per_second - 1
        facts += f"; {unclipped_gain:+.0%} over steps that need no clipping, {gain:+.0%} over clipped ones"
    return Advice(
        change=f"{change} ({facts})",
        tokens_per_second=then.tokens_per_second,
        gain=gain,
        unclipped_gain=unclipped_gain,
    )


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
    if setting.wear != "ignore":
        yield "storage.wear: ignore (more is written)", replace(setting, wear="ignore")
    rows, number = 2 * workload.micro_batch_size, 2 * workload.num_micro_batches
    more = replace(setting, workload=replace(workload, num_micro_batches=number))
    if setting.has_own_split:
        yield (
            f"micro_batch_size: {rows} ({_LARGER})",
            replace(setting, workload=replace(workload, micro_batch_size=rows)),
        )
        yield f"gradient_accumulation_steps: {number} ({_LARGER})", more
    else:
        yield f"tokens_per_step: {setting.layout.num_ranks * more.workload.tokens} ({_LARGER})", more
    yield "max_grad_norm: null", replace(setting, clips=False)
