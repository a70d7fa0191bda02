"""What main memory and the CPU beside it do: a pass over memory on all cores, and the optimizer's kernel on one thread.

Called by `hardware.measure`.
"""

from __future__ import annotations

import torch

from ratel_cli import _native
from ratel_cli.hardware.budget import best_seconds
from ratel_cli.io.buffers import BufferPool
from ratel_cli.sizes import CHUNK_ELEMENTS

_ADAM_PARAMETERS = 1 << 21
"""As many as the optimizer's group, and more than caches hold."""


def memory_rate(pool: BufferPool, num_bytes: int, seconds: float) -> float:
    """Bytes per second, read and written, of a pass over a buffer such as the run's, on all of torch's threads.

    In place, as the optimizer's: a copy to another buffer reads that one too before it writes it, which nobody counts,
    and reached 16 GB/s where this reached 52 (2-core Xeon, 2026-11), and AdamW alone 30.
    """
    with pool.lease(num_bytes, "measuring main memory") as lease:
        values = torch.frombuffer(lease.memory, dtype=torch.float32)
        best = best_seconds(values.neg_, seconds)
    pool.trim()
    return 2 * num_bytes / best


def adam_rate(seconds: float) -> float:
    """Parameters per second of the bf16 update on one thread, with the checksums that training takes."""
    weights = torch.zeros(_ADAM_PARAMETERS, dtype=torch.bfloat16)
    low = torch.zeros(_ADAM_PARAMETERS, dtype=torch.int16)
    m, v = torch.zeros(_ADAM_PARAMETERS), torch.zeros(_ADAM_PARAMETERS)
    gradient = torch.ones(_ADAM_PARAMETERS, dtype=torch.bfloat16)

    num_chunks = _ADAM_PARAMETERS // CHUNK_ELEMENTS

    def update() -> None:
        _native.update_bfloat16(
            weights,
            low,
            m,
            v,
            gradient,
            segments=[(0, _ADAM_PARAMETERS, True)],
            chunk_elements=CHUNK_ELEMENTS,
            seeds_before=num_chunks * [None, 1, 1, 1],
            seeds_after=num_chunks * [1, 1, 1, 1],
            decay_factor=1.0,
            one_minus_beta1=0.1,
            beta2=0.999,
            one_minus_beta2=0.001,
            step_size=1e-5,
            bias_correction2_sqrt=1.0,
            epsilon=1e-8,
            gradient_scale=1.0,
        )

    return _ADAM_PARAMETERS / best_seconds(update, seconds)
