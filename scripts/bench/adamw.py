"""How close the kernels of all update rules come to the memory's limit; AdamW next to torch's and DeepSpeed's for CPUs.

Regime: arrays far larger than the caches, on huge pages, as in training; one update of all of them.
Ceiling: `stream_*`, which loads and stores the same bytes on the same number of threads, and computes very little.
`of limit` is the time of the fastest stream of that layout and number of threads divided by the contestant's:

    ratel adamw_bfloat16      hi16 lo16 m32 v32 in place, bf16 gradient     26 B per parameter
    ratel adamw_float32       w32 m32 v32 in place, fp32 gradient           28 B
    ratel adamw_float16       as float32, fp16 gradient, w16 written        28 B
    ratel adamw_8bit          hi16 lo16 tie8 m8 v8 and scales, bf16 gradient    14.3 B
    ratel lion, sgd_momentum  hi16 lo16 tie8 m32, bf16 gradient                 18.3 B
    ratel muon                hi16 lo16 tie8 m32, bf16 direction and gradient   20.3 B
    ratel sgd                 hi16 lo16 tie8, bf16 gradient                     10.3 B
    ratel adamw_stochastic    p16 m32 v32, bf16 gradient                        22 B
    ratel adamw_8bit_stochastic    p16 m8 v8 and scales, bf16 gradient          10.1 B
    torch fused               fp32 weights, moments and gradient            28 B, against the float32 limit
    torch three passes        bf16 gradient to fp32, fused step, weights to bf16: what bf16 training with
                              torch does; against the bfloat16 limit, because the result is the same
    deepspeed fused           DeepSpeedCPUAdam on the same arrays, where DeepSpeed is installed
    deepspeed three passes    what ZeRO-Offload does with bf16 gradients and weights

The contestants of a layout take turns in every round, in an order that rotates. Times are medians over rounds; `of
limit` is the median of the rounds' fractions. On two threads, each thread has one half. The last line is JSON.

    python -m scripts.bench.adamw [--parameters N] [--rounds N] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch

from ratel_cli import _native
from ratel_cli.engine.optimizer.settings import OptimizerSettings, UpdateNumbers, kernel_name
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.schedule.rules import ADAMW, ADAMW_8BIT, LION, MUON, SGD, SGD_MOMENTUM, UNIT_8BIT, Rule
from ratel_cli.sizes import VALUE_BYTES

LAYOUTS: dict[str, tuple[torch.dtype, ...]] = {
    "bfloat16": (torch.bfloat16, torch.int16, torch.float32, torch.float32),
    "float32": (torch.float32, torch.float32, torch.float32),
    "float16": (torch.float16, torch.float32, torch.float32, torch.float32),
}
_OTHERS = (ADAMW_8BIT, LION, SGD, SGD_MOMENTUM, MUON, ADAMW.without_master(), ADAMW_8BIT.without_master())
RULES = {rule.name: rule for rule in _OTHERS}
"""Other rules than AdamW, in bf16. Each counts as a layout of its own."""
KERNELS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "bfloat16": (_native.stream_adamw_bfloat16, _native.adamw_bfloat16),
    "float32": (_native.stream_adamw_float32, _native.adamw_float32),
    "float16": (_native.stream_adamw_float16, _native.adamw_float16),
}
GRADIENTS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
BYTES_PER_PARAMETER: dict[str, float] = {
    "bfloat16": 26, "float32": 28, "float16": 28,
    **{
        name: 2 * (2 if rule.takes_whole else 1)
        + 2 * sum(VALUE_BYTES[field.dtype] / field.per for field in rule.record("bfloat16").fields)
        for name, rule in RULES.items()
    },
}  # fmt: skip
LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedUpdate:
    """A contestant: `run` makes one update of all parameters."""

    name: str
    layout: str
    num_threads: int
    run: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """The medians of one contestant."""

    name: str
    layout: str
    num_threads: int
    seconds: float
    fastest_seconds: float
    bytes_per_second: float
    fraction_of_limit: float


class Arrays:
    """One set of tensors on huge pages, shared by the contestants of a layout."""

    def __init__(self, pool: BufferPool, resources: ExitStack, num_parameters: int) -> None:
        self._pool = pool
        self._resources = resources
        self._num_parameters = num_parameters

    def tensor(self, dtype: torch.dtype, *, per: int = 1) -> torch.Tensor:
        """Zeros, one for each `per` parameters: every page is touched."""
        number = -(-self._num_parameters // per)
        lease = self._resources.enter_context(self._pool.lease(number * dtype.itemsize, "benchmark"))
        return torch.frombuffer(lease.memory, dtype=dtype, count=number).zero_()

    def record(self, rule: Rule) -> list[tuple[torch.Tensor, int]]:
        """The fields of a rule, a direction if it needs one, and a gradient, with plausible values, each with the
        parameters of one value."""
        fields = rule.record("bfloat16").fields
        found = [(self.tensor(VALUE_DTYPES[each.dtype], per=each.per), each.per) for each in fields]
        given = 2 if rule.takes_whole else 1
        found.extend((self.tensor(torch.bfloat16).normal_(0.0, 1e-3), 1) for _ in range(given))
        found[0][0].normal_(0.0, 0.02)
        return found

    def zeros_for_stream(self, name: str) -> torch.Tensor:
        """A gradient by which `stream_*` changes nothing, so that it leaves the others plausible values."""
        return self.tensor(GRADIENTS[name])

    def layout(self, name: str) -> tuple[torch.Tensor, ...]:
        """State and gradient of one kernel, with plausible values."""
        tensors = [self.tensor(dtype) for dtype in (*LAYOUTS[name], GRADIENTS[name])]
        tensors[-1].normal_(0.0, 1e-3)
        tensors[0].normal_(0.0, 0.02)
        if name == "float16":
            tensors[1].copy_(tensors[0])
        return tuple(tensors)


def native(operation: str, layout: str, isa: str, tensors: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """One call of a kernel of `_native` on all of `tensors`.

    Instruction sets that this machine would not choose take the square root of machines that would.
    """
    square_root: Literal["correct"] | None = None if isa == _native.active_isa() else "correct"
    stream, adamw = KERNELS[layout]
    if operation == "stream":
        return lambda: stream(*tensors, isa=isa)

    scalars = _native.AdamWScalars(
        decay_factor=1 - LEARNING_RATE * 0.01,
        beta1=0.9,
        one_minus_beta1=1 - 0.9,
        beta2=0.999,
        one_minus_beta2=1 - 0.999,
        step_size=LEARNING_RATE / (1 - 0.9**10),
        bias_correction2_sqrt=(1 - 0.999**10) ** 0.5,
        epsilon=1e-8,
        gradient_scale=1.0,
        square_root=square_root,
    )
    return lambda: adamw(*tensors, scalars=scalars, isa=isa)


def native_contestants(
    layout: str, tensors: tuple[torch.Tensor, ...], zeros: torch.Tensor, num_threads: int, executor: ThreadPoolExecutor
) -> Iterator[TimedUpdate]:
    """The stream limit and the kernel on every instruction set, on contiguous shares of the arrays."""
    for operation, used in (("stream", (*tensors[:-1], zeros)), ("adamw", tensors)):
        shares = list(zip(*(tensor.tensor_split(num_threads) for tensor in used), strict=True))
        for isa in _native.supported_isas():
            calls = [native(operation, layout, isa, share) for share in shares]
            yield TimedUpdate(
                name=f"{operation} {isa}", layout=layout, num_threads=num_threads, run=on_threads(calls, executor)
            )


def rule_contestants(
    rule: Rule, arrays: Arrays, num_parameters: int, num_threads: int, executor: ThreadPoolExecutor
) -> Iterator[TimedUpdate]:
    """The stream limit and the kernel of another rule than AdamW, on the instruction set that is chosen here."""
    fields, zeros = arrays.record(rule), arrays.tensor(torch.bfloat16)
    options = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "momentum": 0.9, "nesterov": False}
    settings = OptimizerSettings(weight_decay=0.01, options={**options, "adjust_lr_fn": "match_rms_adamw"})
    update = UpdateNumbers(number=10, learning_rate=LEARNING_RATE, gradient_scale=1.0)
    block = lay_out_block(index=0, name="block", parameters=[("matrix", (1, 1), True)], dtype="bfloat16", rule=rule)
    scalars = settings.scalars(update, block, _native.native_square_root())
    edge = -(-num_parameters // (num_threads * UNIT_8BIT)) * UNIT_8BIT
    parts = [(first, min(first + edge, num_parameters)) for first in range(0, num_parameters, edge)]
    for prefix, name in (("stream_", "stream"), ("", rule.name)):
        kernel = getattr(_native, prefix + kernel_name(rule, "bfloat16"))
        keywords = {} if prefix else {"scalars": scalars, "roundings": [(1, 0)] if block.rounds_stochastically else []}
        calls: list[Callable[[], None]] = []
        for first, last in parts:
            shares = [values[first // per : -(-last // per)] for values, per in fields]
            if prefix:
                shares[-1] = zeros[first:last]
            calls.append(partial(kernel, *shares, **keywords))
        yield TimedUpdate(
            name=f"{name} {_native.active_isa()}",
            layout=rule.name,
            num_threads=num_threads,
            run=on_threads(calls, executor),
        )


def on_threads(calls: list[Callable[[], None]], executor: ThreadPoolExecutor) -> Callable[[], None]:
    """The first call runs here, the others on the executor's threads."""

    def run() -> None:
        futures = [executor.submit(call) for call in calls[1:]]
        calls[0]()
        for future in futures:
            future.result()

    return run


def peer_contestants(
    fp32: tuple[torch.Tensor, ...], bf16: tuple[torch.Tensor, ...], num_threads: int
) -> Iterator[TimedUpdate]:
    """The fused fp32 steps of others, alone and with the two conversions that bf16 training needs."""
    weight, m32, v32, gradient = fp32
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    by_torch = torch.optim.AdamW([parameter], lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    by_torch.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": m32, "exp_avg_sq": v32}
    yield from fused_and_three_passes("torch", by_torch, gradient, bf16, num_threads)
    if find_spec("deepspeed") is not None:
        by_deepspeed: torch.optim.Optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
            [parameter], lr=LEARNING_RATE, weight_decay=0.01, adamw_mode=True
        )
        by_deepspeed.state[parameter] = {"step": 10, "exp_avg": m32, "exp_avg_sq": v32}
        yield from fused_and_three_passes("deepspeed", by_deepspeed, gradient, bf16, num_threads)


def fused_and_three_passes(
    name: str,
    optimizer: torch.optim.Optimizer,
    gradient: torch.Tensor,
    bf16: tuple[torch.Tensor, ...],
    num_threads: int,
) -> Iterator[TimedUpdate]:
    """One optimizer of one fp32 parameter, on torch's threads."""
    weight16, gradient16 = bf16
    [weight] = optimizer.param_groups[0]["params"]

    def fused() -> None:
        torch.set_num_threads(num_threads)
        optimizer.step()

    def three_passes() -> None:
        torch.set_num_threads(num_threads)
        gradient.copy_(gradient16)
        optimizer.step()
        weight16.copy_(weight.data)

    yield TimedUpdate(name=f"{name} fused", layout="float32", num_threads=num_threads, run=fused)
    yield TimedUpdate(name=f"{name} three passes", layout="bfloat16", num_threads=num_threads, run=three_passes)


def measure(contestants: list[TimedUpdate], num_rounds: int) -> dict[int, list[float]]:
    """Seconds of every run, by the contestant's place in the list; one round before that is not counted."""
    seconds: dict[int, list[float]] = {place: [] for place in range(len(contestants))}
    for number in range(num_rounds + 1):
        for turn in range(len(contestants)):
            place = (turn + number * 7) % len(contestants)
            begin = time.perf_counter()
            contestants[place].run()
            if number > 0:
                seconds[place].append(time.perf_counter() - begin)
    return seconds


def summarize(
    contestants: list[TimedUpdate], seconds: dict[int, list[float]], num_parameters: int
) -> list[KernelResult]:
    """Medians. The fraction of the limit is the median of the rounds' own fractions, so that drift cancels."""
    medians = [statistics.median(seconds[place]) for place in range(len(contestants))]
    limits: dict[int, int] = {}  # by number of threads: the place of the fastest stream
    for place, contestant in enumerate(contestants):
        if contestant.name.startswith("stream"):
            best = limits.setdefault(contestant.num_threads, place)
            if medians[place] < medians[best]:
                limits[contestant.num_threads] = place
    return [
        KernelResult(
            name=contestant.name,
            layout=contestant.layout,
            num_threads=contestant.num_threads,
            seconds=median,
            fastest_seconds=min(seconds[place]),
            bytes_per_second=num_parameters * BYTES_PER_PARAMETER[contestant.layout] / median,
            fraction_of_limit=statistics.median(
                limit / own for limit, own in zip(seconds[limits[contestant.num_threads]], seconds[place], strict=True)
            ),
        )
        for place, (contestant, median) in enumerate(zip(contestants, medians, strict=True))
    ]


def print_table(results: list[KernelResult], num_parameters: int) -> None:
    print(f"{'layout':<13}{'threads':>7}  {'contestant':<24}{'ns/param':>10}{'fastest':>10}{'GB/s':>8}{'of limit':>10}")
    for result in sorted(results, key=lambda result: (result.layout, result.num_threads, result.seconds)):
        nanoseconds, fastest = (1e9 * t / num_parameters for t in (result.seconds, result.fastest_seconds))
        print(
            f"{result.layout:<13}{result.num_threads:>7}  {result.name:<24}{nanoseconds:>10.3f}{fastest:>10.3f}"
            f"{result.bytes_per_second / 1e9:>8.1f}{result.fraction_of_limit:>10.3f}"
        )


def speedups(results: list[KernelResult]) -> dict[str, float]:
    """Ratel's default kernel against the three passes of others, by their name and number of threads."""
    seconds = {(result.name, result.layout, result.num_threads): result.seconds for result in results}
    ours = f"adamw {_native.active_isa()}"
    return {
        f"{name.partition(' ')[0]}_{num_threads}_threads": spent / seconds[ours, "bfloat16", num_threads]
        for (name, _, num_threads), spent in seconds.items()
        if name.endswith("three passes")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=48 << 20, help="parameters per array")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each contestant")
    parser.add_argument("--smoke", action="store_true", help="tiny arrays, two rounds: does it run?")
    arguments = parser.parse_args()
    num_parameters, num_rounds = (5001, 2) if arguments.smoke else (arguments.parameters, arguments.rounds)
    thread_counts = [count for count in (1, 2) if count <= (os.cpu_count() or 1)]
    if find_spec("deepspeed") is None:
        print("deepspeed takes no part: it is not installed")

    results: list[KernelResult] = []
    with ThreadPoolExecutor(max(thread_counts)) as executor:
        for layout in LAYOUTS:
            with BufferPool(None) as pool, ExitStack() as resources:
                arrays = Arrays(pool, resources, num_parameters)
                contestants: list[TimedUpdate] = []
                tensors, zeros = arrays.layout(layout), arrays.zeros_for_stream(layout)
                fp32 = arrays.layout("float32") if layout == "bfloat16" else tensors
                bf16 = (arrays.tensor(torch.bfloat16), tensors[-1])
                for num_threads in thread_counts:
                    contestants += native_contestants(layout, tensors, zeros, num_threads, executor)
                    if layout != "float16":
                        contestants += [c for c in peer_contestants(fp32, bf16, num_threads) if c.layout == layout]
                seconds = measure(contestants, num_rounds)
                results += summarize(contestants, seconds, num_parameters)
        for rule in RULES.values():
            with BufferPool(None) as pool, ExitStack() as resources:
                arrays, contestants = Arrays(pool, resources, num_parameters), []
                for num_threads in thread_counts:
                    contestants += rule_contestants(rule, arrays, num_parameters, num_threads, executor)
                seconds = measure(contestants, num_rounds)
                results += summarize(contestants, seconds, num_parameters)
    print_table(results, num_parameters)
    faster = speedups(results)
    print("adamw_bfloat16 against three passes: " + ", ".join(f"{k} {v:.2f}x" for k, v in faster.items()))
    print(
        json.dumps(
            {
                "benchmark": "adamw",
                "num_parameters": num_parameters,
                "num_rounds": num_rounds,
                "isa": _native.active_isa(),
                "square_root": _native.native_square_root(),
                "speedup_over_three_passes": faster,
                "results": [asdict(result) for result in results],
            }
        )
    )


if __name__ == "__main__":
    main()
