"""The largest model that a machine can train, tier by tier, with the paper's layout (`ratel plan --largest`). Pure.

Activations never decide: with the block inputs swapped, only one block's activations stay in the GPU, and the inputs
may go to NVMe. So GPU and main memory bound the width, and NVMe bounds the depth. With width h, batch b, sequence
length s, vocabulary V, L blocks and P parameters, in bytes:

    GPU          96 h^2          four times a block's 12 h^2 parameters in 16 bit: weights in use, weights that
                                 come next, gradients being computed, gradients being downloaded
                 + 34 b s h      one block's activations
    main memory  96 h^2          the same four
                 + 42 t          three tensors of states in flight, 14 bytes each per parameter (section IV-C);
                                 t = max(4 h^2, V h) elements, the largest tensor
    NVMe         14 P            states
                 + 2 b s h L     block inputs, for which main memory may have no space

The GPU's rule fits what the paper could train on 24 and 16 GiB. Main memory's rule follows from the pipeline; the paper
gives none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ratel_cli.papers.ratel import STATE_BYTES, PaperShape

MAX_LAYERS = 100_000
"""The end of the search over depth."""
_STATE_TENSORS = 3
"""Tensors of states in memory at once: one is read, one updated, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes in each tier: needed, available, or missing."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The number of layers of a model with another depth, and its parameters."""

    num_layers: int
    num_parameters: int


def need(shape: PaperShape) -> TierBytes:
    """What it takes to train the shape at all."""
    h = shape.hidden_size
    buffers = 96 * h**2
    largest_tensor = max(4 * h**2, shape.vocab_size * h)
    return TierBytes(
        gpu_bytes=buffers + shape.activation_bytes // shape.num_layers,
        host_bytes=buffers + _STATE_TENSORS * STATE_BYTES * largest_tensor,
        nvme_bytes=STATE_BYTES * shape.num_parameters + shape.inter_block_bytes,
    )


def missing(shape: PaperShape, have: TierBytes) -> TierBytes:
    """By how much each tier is short; all zero if the shape fits."""
    needed = need(shape)
    return TierBytes(
        gpu_bytes=max(0, needed.gpu_bytes - have.gpu_bytes),
        host_bytes=max(0, needed.host_bytes - have.host_bytes),
        nvme_bytes=max(0, needed.nvme_bytes - have.nvme_bytes),
    )


def fits(shape: PaperShape, have: TierBytes) -> bool:
    """Whether the shape fits into every tier."""
    return missing(shape, have) == TierBytes(gpu_bytes=0, host_bytes=0, nvme_bytes=0)


def largest(shapes: Iterable[PaperShape], have: TierBytes) -> PaperShape | None:
    """The shape with the most parameters among those that fit; None if none does."""
    return max((shape for shape in shapes if fits(shape, have)), key=lambda shape: shape.num_parameters, default=None)


def deepest(shape: PaperShape, have: TierBytes) -> PaperShape | None:
    """The shape with as many layers as fit at its width; None if not even one layer does."""
    num_layers = bisect_left(
        range(1, MAX_LAYERS + 1), True, key=lambda layers: not fits(with_layers(shape, layers), have)
    )
    return with_layers(shape, num_layers) if num_layers else None


def with_layers(shape: PaperShape, num_layers: int) -> PaperShape:
    """The shape with another depth. Its parameters are 12 h^2 for each layer, and the embedding, which is tied."""
    h = shape.hidden_size
    return replace(shape, num_layers=num_layers, num_parameters=12 * num_layers * h**2 + shape.vocab_size * h)


def paper_models(*, batch_size: int, sequence_len: int = 1024) -> dict[str, PaperShape]:
    """The models of the paper's evaluation (Table IV), by their nominal size."""
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
