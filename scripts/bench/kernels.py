"""Which kernels a piece of work runs on a GPU, and how long each takes, by torch's profiler.

Regime: one call, after others that warm up. Without a GPU that the profiler knows, operators and their time on the CPU
take the place of kernels: that shows only that the measurement runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_KINDS = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("products", re.compile(r"gemm|cutlass|nvjet|cublas|xmma|wgmma|matmul|splitk|::(add|b)?mm\b", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
)
"""By words in kernels' names; others are element-wise."""
ELEMENTWISE = "element-wise"
_NAME_LENGTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """All launches of one kernel."""

    name: str
    number: int
    seconds: float

    @property
    def kind(self) -> str:
        return next((kind for kind, words in _KINDS if words.search(self.name)), ELEMENTWISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """What ran, the longest first."""

    kernels: list[Kernel]
    on_gpu: bool
    """Whether these are kernels; if not, operators on the CPU."""
    busy_seconds: float
    """How long at least one ran."""
    span_seconds: float
    """From the beginning of the first to the end of the last."""

    @property
    def number(self) -> int:
        return sum(each.number for each in self.kernels)

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds."""
        found = dict.fromkeys((*(kind for kind, _ in _KINDS), ELEMENTWISE), 0.0)
        for each in self.kernels:
            found[each.kind] += each.seconds
        return found

    def summary(self) -> dict[str, object]:
        """Without the single kernels."""
        return {
            "kernels": self.number,
            "on_gpu": self.on_gpu,
            "busy_seconds": self.busy_seconds,
            "span_seconds": self.span_seconds,
            "seconds": self.by_kind,
        }

    def text(self, *, rows: int = 30) -> str:
        """The table for a person."""
        head = f"{self.number} {'kernels' if self.on_gpu else 'operators on the CPU'}, {1e3 * self.busy_seconds:.3f} ms"
        lines = [f"{head} of {1e3 * self.span_seconds:.3f} ms", f"{'ms':>10} {'number':>7}  kind          name"]
        lines += [
            f"{1e3 * each.seconds:>10.3f} {each.number:>7}  {each.kind:<13} {each.name[:_NAME_LENGTH]}"
            for each in self.kernels[:rows]
        ]
        others = self.kernels[rows:]
        if others:
            lines.append(f"{1e3 * sum(each.seconds for each in others):>10.3f} {len(others):>7}  others")
        return "\n".join(lines)


def kernels_of(work: Callable[[], object], device: torch.device) -> KernelTable:
    """What `work` runs, once, from its beginning until the GPU is done. Raises RuntimeError if the profiler sees none.

    What the host does is not noted, which would cost it time.
    """
    has_kernels = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if has_kernels else ProfilerActivity.CPU]
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    with profile(activities=activities) as profiled:
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    wanted = DeviceType.CUDA if has_kernels else DeviceType.CPU
    seconds, number, spans = defaultdict[str, float](float), defaultdict[str, int](int), list[tuple[float, float]]()
    for event in profiled.events() or ():
        if event.device_type != wanted or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        own = end - start if has_kernels else event.self_cpu_time_total / 1e6
        seconds[event.name] += own
        number[event.name] += 1
        spans.append((start, end))
    if not spans:
        raise RuntimeError("torch's profiler saw no kernels")
    kernels = [Kernel(name=name, number=number[name], seconds=spent) for name, spent in seconds.items()]
    return KernelTable(
        kernels=sorted(kernels, key=lambda each: -each.seconds),
        on_gpu=has_kernels,
        busy_seconds=sum(end - start for start, end in _merged(spans)),
        span_seconds=max(end for _, end in spans) - min(start for start, _ in spans),
    )


def _merged(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same times without overlaps."""
    begin, reached = 0.0, 0.0
    for start, end in sorted(spans):
        if start > reached:
            yield begin, reached
            begin = start
        reached = max(reached, end)
    yield begin, reached
