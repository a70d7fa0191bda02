"""Reading weights in host memory on a GPU (MemFerry), next to uploading them; copies of pageable memory (Fuyou, 5.5).

Regime: bf16, one process, memory that is registered as a run registers it. The ceiling of everything that crosses the
link is a copy of pinned memory. The fastest of repeated calls counts.

    copies     pinned and pageable memory, up and down
    products   a matrix of `--width` squared times rows of tokens: with the matrix on the GPU, in place in forward and
               in backward, and uploaded; and its gradient, made on the GPU and straight in host memory. `passes` is how
               often the matrix would have crossed the link in that time
    rows       of an embedding, collected by the host and uploaded, or read in place

    python -m scripts.bench.direct [--width 8192] [--tokens 128 1024 4096] [--seconds 0.1]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch.nn import functional

from ratel_cli.engine.device.mapped import mapped
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.io.views import view
from ratel_cli.units import format_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement, at least")
    options = parser.parse_args(arguments)
    device = compute_device("auto")
    if device.type == "cpu":
        parser.error("there is no GPU")
    num_bytes = 2 * options.width**2
    with BufferPool(None, pin=GpuPinning(device, parser.error)) as pool, pool.lease(num_bytes, "weights") as lease:
        pinned = view(lease.memory, torch.bfloat16).view(options.width, options.width)
        pinned.copy_(torch.rand(options.width, dtype=torch.bfloat16).expand_as(pinned))
        in_place = mapped(lease.memory, device)
        assert in_place is not None
        bench = Bench(pool, pinned, in_place.view(torch.bfloat16).view_as(pinned), options.seconds)
        found = {
            "copies": bench.copies(),
            "products": [bench.product(tokens) for tokens in options.tokens],
            "rows": [bench.rows(tokens) for tokens in options.tokens],
        }
    print(json.dumps({"options": vars(options), **found}))


class Bench:
    """A matrix in host memory, as the host and as the GPU sees it."""

    def __init__(self, pool: BufferPool, pinned: torch.Tensor, in_place: torch.Tensor, seconds: float) -> None:
        self._pool, self._pinned, self._in_place = pool, pinned, in_place
        self._on_gpu = torch.empty_like(in_place)
        self._seconds = seconds

    def copies(self) -> dict[str, float]:
        """Bytes per second."""
        pageable = self._pinned.clone()
        spent = {
            "pinned up": self._fastest(lambda: self._on_gpu.copy_(self._pinned, non_blocking=True)),
            "pinned down": self._fastest(lambda: self._pinned.copy_(self._on_gpu, non_blocking=True)),
            "pageable up": self._fastest(lambda: self._on_gpu.copy_(pageable)),
            "pageable down": self._fastest(lambda: pageable.copy_(self._on_gpu)),
        }
        rates = {name: pageable.nbytes / seconds for name, seconds in spent.items()}
        print("  ".join(f"{name} {format_bytes(int(rate))}/s" for name, rate in rates.items()), flush=True)
        return rates

    def product(self, tokens: int) -> dict[str, float]:
        """Seconds."""
        inputs, results = (torch.rand(tokens, len(self._pinned)).to(self._on_gpu) for _ in range(2))
        up = self._fastest(lambda: self._on_gpu.copy_(self._pinned, non_blocking=True))
        on_gpu = functional.linear(inputs, self._on_gpu)
        assert torch.equal(on_gpu, functional.linear(inputs, self._in_place))
        found = {
            "tokens": tokens,
            "upload": up,
            "forward": self._fastest(lambda: functional.linear(inputs, self._on_gpu)),
            "forward in place": self._fastest(lambda: functional.linear(inputs, self._in_place)),
            "backward in place": self._fastest(lambda: results @ self._in_place),
            "gradient": self._fastest(lambda: torch.mm(results.t(), inputs, out=self._on_gpu)),
            "gradient in place": self._fastest(lambda: torch.mm(results.t(), inputs, out=self._in_place)),
        }
        found["passes"] = found["forward in place"] / up
        print("  ".join(f"{name} {value:.6g}" for name, value in found.items()), flush=True)
        return found

    def rows(self, tokens: int) -> dict[str, float]:
        """Seconds."""
        ids = torch.randint(len(self._pinned), (tokens,))
        on_gpu = ids.to(self._on_gpu.device)
        there = torch.empty(tokens, len(self._pinned), dtype=self._pinned.dtype, device=self._on_gpu.device)
        with self._pool.lease(there.nbytes, "rows") as lease:
            collected = view(lease.memory, there.dtype).view_as(there)
            found = {
                "tokens": tokens,
                "collect": self._fastest(lambda: torch.index_select(self._pinned, 0, ids, out=collected)),
                "upload": self._fastest(lambda: there.copy_(collected, non_blocking=True)),
                "in place": self._fastest(lambda: torch.index_select(self._in_place, 0, on_gpu, out=there)),
            }
            assert torch.equal(there.cpu(), collected)
        print("  ".join(f"{name} {value:.6g}" for name, value in found.items()), flush=True)
        return found

    def _fastest(self, work: Callable[[], object]) -> float:
        fastest, end = float("inf"), perf_counter() + self._seconds
        while fastest == float("inf") or perf_counter() < end:
            torch.accelerator.synchronize()
            began = perf_counter()
            work()
            torch.accelerator.synchronize()
            fastest = min(fastest, perf_counter() - began)
        return fastest


if __name__ == "__main__":
    main()
