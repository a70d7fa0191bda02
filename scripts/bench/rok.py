"""The recompute-offload-keep curve, measured: a stack of MLP blocks, whose activations are kept in memory,
computed again (torch.utils.checkpoint), or offloaded (`ratel.offload_activations`): all, what the cache finds by
itself (auto), or all to host memory, with nothing written (host).

Regime: one process, no optimizer. Where the CPU computes, its memory takes the place of the GPU's, and copies and
checksums take time from computing, so offloading costs more than it would with a GPU. The ceiling is `keep`. Strategies
take turns, and the fastest step of each counts, since other programs can only slow one down; the first step of a turn,
in which the amount is found and host memory is pinned, does not. `held` is what autograd still holds when forward ends,
in tensors that have not left; `peak` is the GPU memory of a step beyond the weights.

    python -m scripts.bench.rok [--blocks 12] [--width 512] [--rows 1024] [--turns 7] [--steps 2] [--storage DIR]
                                [--device cuda] [--dtype bfloat16] [--host-memory 1GiB]

Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ratel_cli as ratel
from ratel_cli.engine.cache.saved_tensors import CacheCounts
from ratel_cli.units import MIB, format_bytes

STRATEGIES = ("keep", "recompute", "offload", "auto", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One strategy's point."""

    strategy: str
    held_bytes: int
    """Of activations that are in their place when forward ends."""
    resident_bytes: int
    """Of a step, to host memory."""
    written_bytes: int
    """Of a step, to the drives."""
    seconds: float
    """The fastest step."""
    rows_per_second: float
    peak_bytes: int | None
    """Of the GPU's memory, beyond what is there before the step; None on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The steps of a strategy that count."""

    seconds: float
    """The fastest one."""
    peak_bytes: int | None
    counts: CacheCounts
    """Of the last one."""


class Stack(nn.Module):
    """Blocks whose outputs are added to their inputs, [rows, width]."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.recomputes = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            changed = checkpoint(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden)
            hidden = hidden + changed
        return hidden.square().mean()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a turn, of which the first does not count")
    parser.add_argument("--device", default="cpu", help="the device of torch that computes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--host-memory", default="1GiB", help="what `host` may take")
    parser.add_argument("--storage", help="a directory on the drive; a temporary one if it is not given")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be 2 at least: the first one does not count")
    dtype: torch.dtype = getattr(torch, options.dtype)
    model = Stack(options.blocks, options.width).to(options.device, dtype)
    rows = torch.randn(options.rows, options.width, device=options.device, dtype=dtype, requires_grad=True)
    turns: dict[str, list[Turn]] = {name: [] for name in STRATEGIES}
    with tempfile.TemporaryDirectory(dir=options.storage) as storage:
        for _ in range(options.turns):
            for name in STRATEGIES:
                turns[name].append(run(model, rows, name, Path(storage), options.steps, options.host_memory))
    held_bytes = {name: measured_bytes(model, rows, recomputes=name == "recompute") for name in ("keep", "recompute")}
    points = []
    for name in STRATEGIES:
        fastest = min(turns[name], key=lambda turn: turn.seconds)
        counts = turns[name][-1].counts
        left_bytes = counts.resident + counts.written
        points.append(
            MeasuredPoint(
                strategy=name,
                held_bytes=held_bytes.get(name, held_bytes["keep"] - left_bytes),
                resident_bytes=counts.resident,
                written_bytes=counts.written,
                seconds=fastest.seconds,
                rows_per_second=options.rows / fastest.seconds,
                peak_bytes=fastest.peak_bytes,
            )
        )
    print_table(points)
    print(json.dumps({"options": vars(options), "points": [asdict(each) for each in points]}))


def run(model: Stack, rows: torch.Tensor, name: str, storage: Path, steps: int, host_memory: str) -> Turn:
    """One turn: steps in one context, all but the first of which count."""
    model.recomputes = name == "recompute"
    counts = CacheCounts()
    found: list[Turn] = []
    with ExitStack() as opened:
        if name not in ("keep", "recompute"):
            counts = opened.enter_context(
                ratel.offload_activations(
                    model,
                    storage=[storage],
                    least_bytes=MIB // 4,
                    amount="auto" if name == "auto" else "all",
                    host_memory=host_memory if name == "host" else 0,
                )
            )
        for _ in range(steps):
            before = CacheCounts(**asdict(counts))
            spent, peak_bytes = timed_step(model, rows)
            moved = CacheCounts(**{key: value - getattr(before, key) for key, value in asdict(counts).items()})
            found.append(Turn(seconds=spent, peak_bytes=peak_bytes, counts=moved))
    last = found[-1]
    return replace(last, seconds=min(each.seconds for each in found[1:]))


def timed_step(model: Stack, rows: torch.Tensor) -> tuple[float, int | None]:
    """Forward and backward: seconds, and the GPU memory that they take."""
    before_bytes = 0
    is_gpu = rows.device.type != "cpu"
    if is_gpu:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before_bytes = torch.accelerator.memory_allocated()
    began = perf_counter()
    model(rows).backward()
    if is_gpu:
        torch.accelerator.synchronize()
    spent = perf_counter() - began
    model.zero_grad()
    rows.grad = None
    return spent, torch.accelerator.max_memory_allocated() - before_bytes if is_gpu else None


def measured_bytes(model: Stack, rows: torch.Tensor, *, recomputes: bool) -> int:
    """What autograd holds when forward ends, weights left out; a storage counts once."""
    model.recomputes = recomputes
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(rows)
    if recomputes:  # what checkpoints hold is their inputs, of which hooks see nothing
        return len(model.layers) * rows.nbytes
    assert loss.grad_fn is not None
    return sum(held.values())


def print_table(points: Sequence[MeasuredPoint]) -> None:
    """A row for each strategy."""
    kept = points[0].seconds
    sized = " ".join(f"{name:>10}" for name in ("held", "to RAM", "written", "peak"))
    print(f"{'strategy':10} {sized} {'step':>9} {'rows/s':>9} {'of keep':>8}")
    for each in points:
        sizes = (each.held_bytes, each.resident_bytes, each.written_bytes, each.peak_bytes)
        columns = " ".join(f"{'' if size is None else format_bytes(size):>10}" for size in sizes)
        share = kept / each.seconds
        print(
            f"{each.strategy:10} {columns} {each.seconds:7.3f} s {each.rows_per_second:9.0f} {share:8.2f}", flush=True
        )


if __name__ == "__main__":
    main()
