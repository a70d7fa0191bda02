"""The recompute-offload-keep curve, measured: a stack of MLP blocks on the CPU, whose activations are kept in memory,
computed again (torch.utils.checkpoint), or offloaded (`ratel.offload_activations`): all, what the cache finds by
itself (auto), or all to host memory, with nothing written (host).

Regime: fp32, one process, no optimizer. Where the CPU computes, its memory takes the place of the GPU's, and copies and
checksums take time from computing, so offloading costs more than it would with a GPU. The ceiling is `keep`. Strategies
take turns, and the fastest step of each counts, since other programs can only slow one down. Memory is what autograd
still holds when forward ends, in tensors that have not left.

    python -m scripts.bench.rok [--blocks 12] [--width 512] [--rows 1024] [--steps 7] [--storage DIR]

Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ratel_cli as ratel
from ratel_cli.engine.saved_tensors import CacheCounts
from ratel_cli.units import MIB, format_bytes

OFFLOADED: dict[str, dict[str, int | str]] = {
    "offload": {"amount": "all"},
    "auto": {"amount": "auto"},
    "host": {"amount": "all", "host_memory": "1GiB"},
}
STRATEGIES = ("keep", "recompute", *OFFLOADED)


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
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--storage", help="a directory on the drive; a temporary one if it is not given")
    options = parser.parse_args(arguments)
    model = Stack(options.blocks, options.width)
    rows = torch.randn(options.rows, options.width, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    counts: dict[str, CacheCounts] = {name: CacheCounts() for name in STRATEGIES}
    with tempfile.TemporaryDirectory(dir=options.storage) as storage:
        for turn in range(options.steps + 1):
            for name in STRATEGIES:
                # Two steps in a context, of which the second counts: the amount has been found by then.
                spent, counts[name] = run(model, rows, name, Path(storage))
                if turn:
                    seconds[name].append(spent)
    held_bytes = {name: measured_bytes(model, rows, recomputes=name == "recompute") for name in ("keep", "recompute")}
    points = []
    for name in STRATEGIES:
        left_bytes = counts[name].resident + counts[name].written
        spent = min(seconds[name])
        points.append(
            MeasuredPoint(
                strategy=name,
                held_bytes=held_bytes.get(name, held_bytes["keep"] - left_bytes),
                resident_bytes=counts[name].resident,
                written_bytes=counts[name].written,
                seconds=spent,
                rows_per_second=options.rows / spent,
            )
        )
    print_table(points)
    print(json.dumps({"options": vars(options), "points": [asdict(each) for each in points]}))


def run(model: Stack, rows: torch.Tensor, name: str, storage: Path) -> tuple[float, CacheCounts]:
    """The seconds of the second of two steps, and what it moved."""
    model.recomputes = name == "recompute"
    before, spent, counts = CacheCounts(), 0.0, CacheCounts()
    with ExitStack() as opened:
        if name in OFFLOADED:
            offloading = ratel.offload_activations(
                model,
                storage=[storage],
                least_bytes=MIB // 4,
                **OFFLOADED[name],  # type: ignore[arg-type]
            )
            counts = opened.enter_context(offloading)
        for _ in range(2):
            before = CacheCounts(**asdict(counts))
            began = perf_counter()
            model(rows).backward()
            spent = perf_counter() - began
            model.zero_grad()
    return spent, CacheCounts(**{key: value - getattr(before, key) for key, value in asdict(counts).items()})


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
    print(f"{'strategy':10} {'held':>10} {'to RAM':>10} {'written':>10} {'step':>9} {'rows/s':>9} {'of keep':>8}")
    for each in points:
        sizes = (each.held_bytes, each.resident_bytes, each.written_bytes)
        columns = " ".join(f"{format_bytes(size):>10}" for size in sizes)
        share = kept / each.seconds
        print(
            f"{each.strategy:10} {columns} {each.seconds:7.3f} s {each.rows_per_second:9.0f} {share:8.2f}", flush=True
        )


if __name__ == "__main__":
    main()
