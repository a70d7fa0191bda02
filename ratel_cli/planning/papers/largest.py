"""The largest model that a machine can train, tier by tier, with the paper's layout. Called for `ratel plan --largest`.

Pure. Activations never decide: with the block inputs swapped, all that stays in the GPU is one block's, and they may
go to NVMe. So the width is bounded by GPU and main memory, the depth by NVMe:

    GPU          96 h^2          four times a block's 12 h^2 parameters in 16 bits: weights in use, weights that
                                 come next, gradients being made, gradients on their way down
                 + 34 b s h      one block's activations
    main memory  96 h^2          the same four
                 + 42 t          three tensors of states in flight, 14 bytes each per parameter (section IV-C);
                                 t = max(4 h^2, V h), the largest tensor
    NVMe         14 P            states
                 + 2 b s h L     block inputs, if main memory has no room for them

The GPU's is the rule that fits what the paper could train on 24 and 16 GiB; main memory's follows from the pipeline,
the paper gives none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ratel_cli.planning.papers.paper import STATE_BYTES, PaperShape

MAX_LAYERS = 100_000
"""The end of the search over depth."""
_STATE_TENSORS = 3
"""In flight: read, updated, written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Bytes in each tier: needed, present, or missing."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int


def need(shape: PaperShape) -> Tiers:
    """To train the shape at all."""
    h = shape.hidden_size
    buffers = 96 * h**2
    largest_tensor = max(4 * h**2, shape.vocab_size * h)
    return Tiers(
        gpu_bytes=buffers + shape.activation_bytes // shape.num_layers,
        host_bytes=buffers + _STATE_TENSORS * STATE_BYTES * largest_tensor,
        nvme_bytes=STATE_BYTES * shape.num_parameters + shape.inter_block_bytes,
    )


def missing(shape: PaperShape, have: Tiers) -> Tiers:
    """By how much each tier falls short; all zero if the shape fits."""
    needed = need(shape)
    return Tiers(
        gpu_bytes=max(0, needed.gpu_bytes - have.gpu_bytes),
        host_bytes=max(0, needed.host_bytes - have.host_bytes),
        nvme_bytes=max(0, needed.nvme_bytes - have.nvme_bytes),
    )


def fits(shape: PaperShape, have: Tiers) -> bool:
    """In every tier."""
    return missing(shape, have) == Tiers(gpu_bytes=0, host_bytes=0, nvme_bytes=0)


def largest(shapes: Iterable[PaperShape], have: Tiers) -> PaperShape | None:
    """The one with the most parameters among those that fit; None if none does."""
    return max((shape for shape in shapes if fits(shape, have)), key=lambda shape: shape.num_parameters, default=None)


def deepest(shape: PaperShape, have: Tiers) -> PaperShape | None:
    """The shape with as many layers as fit at its width; None if not even one does."""
    num_layers = bisect_left(
        range(1, MAX_LAYERS + 1), True, key=lambda layers: not fits(with_layers(shape, layers), have)
    )
    return with_layers(shape, num_layers) if num_layers else None


def with_layers(shape: PaperShape, num_layers: int) -> PaperShape:
    """Another depth, its parameters counted: 12 h^2 a layer, and the embedding, which is the head as well."""
    h = shape.hidden_size
    return replace(shape, num_layers=num_layers, num_parameters=12 * num_layers * h**2 + shape.vocab_size * h)


def paper_models(*, batch_size: int, sequence_len: int = 1024) -> dict[str, PaperShape]:
    """Table IV: the models of the evaluation, by their nominal size."""
    return {
        f"{billions}B": PaperShape(
            num_layers=num_layers,
            num_heads=num_heads,
            hidden_size=hidden_size,
            vocab_size=50257,
            num_parameters=billions * 10**9,
            batch_size=batch_size,
            sequence_len=sequence_len,
        )
        for billions, num_layers, num_heads, hidden_size in _TABLE_IV
    }


_TABLE_IV = (
    (6, 28, 32, 4096),
    (13, 40, 40, 5120),
    (30, 48, 56, 7168),
    (70, 80, 64, 8192),
    (135, 88, 88, 11264),
    (175, 96, 96, 12288),
    (276, 112, 112, 14336),
    (412, 128, 128, 16384),
)
