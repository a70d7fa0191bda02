"""The Ratel paper: its cost model (`cost_model: paper`), and the largest model that its layout can train. Pure.

States take 14 bytes per parameter, activations 34 b s h per block. The time of a step (section IV-D), with its notation
in brackets:

    T_iter = T_f + T_b                                                                                    Eq. 1
    T_f    = max(FLOP_f / THP_G, A / BW_G, 2 P / BW_G, 2 P / R + A_nvme / W)                              Eq. 2, 4
    A_nvme = max(0, A - MEM_avail)                                      Eq. 3, without the maximum in the paper
    T_b    = max((2 FLOP_f + FLOP_r) / THP_G, 2 P / BW_G, (2 P + A) / BW_G, (14 P + A_nvme) / R + 14 P / W)   Eq. 5

A machine is short of memory tier by tier (`ratel plan --largest`). Activations never decide: with the block inputs
swapped, only one block's activations stay in the GPU, and the inputs may go to NVMe. So GPU and main memory bound the
width, and NVMe bounds the depth. With width h, batch b, sequence length s, vocabulary V, L blocks and P parameters, in
bytes:

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

Invariants: the link is duplex, NVMe is simplex (R = BW_S2M, W = BW_M2S). Neither the embedding nor the logits count as
activations, and the head is never recomputed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ratel_cli.papers.prefix import SwappableOperator
from ratel_cli.planning.time.step_time import StageTime, StepTime

MAX_LAYERS = 100_000
"""The end of the search over depth."""
_WEIGHT_BYTES, _STATE_BYTES = 2, 14
"""Per parameter, see `PaperShape`."""
_STATE_TENSORS = 3
"""Tensors of states in memory at once: one is read, one updated, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperShape:
    """A GPT-type model and a batch, as the paper counts them."""

    num_layers: int
    num_heads: int
    hidden_size: int
    vocab_size: int
    num_parameters: int
    """Nominal [P]: 13e9 for the 13B model."""
    batch_size: int
    sequence_len: int

    @property
    def flops_forward(self) -> int:
        """The blocks and the head [FLOP_f]: L (24 b s h^2 + 4 b s^2 h) + 2 b s h V."""
        h = self.hidden_size
        block = 24 * h**2 + 4 * self.sequence_len * h
        return self._tokens * (self.num_layers * block + 2 * h * self.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """P16, the compute weights, read in forward and again in backward. G16, the gradients, are as large."""
        return _WEIGHT_BYTES * self.num_parameters

    @property
    def state_bytes(self) -> int:
        """P32 and OS32, the fp32 master weights and optimizer states, and P16 (Table II): what the optimizer reads and
        writes."""
        return _STATE_BYTES * self.num_parameters

    @property
    def activation_bytes(self) -> int:
        """Block inputs and all operators: 34 b s h per block [A_all]."""
        return self.num_layers * 34 * self._tokens * self.hidden_size

    @property
    def inter_block_bytes(self) -> int:
        """The block inputs [A_interBlock]."""
        return self.num_layers * self._output_bytes

    @property
    def operators(self) -> tuple[SwappableOperator, ...]:
        """The operators of every block, in forward order. Norms and GELU count no FLOPs, so they are swapped last."""
        output_bytes, blocks = self._output_bytes, tuple(range(self.num_layers))
        square = 2 * self._tokens * self.hidden_size**2
        attention = 4 * self._tokens * self.sequence_len * self.hidden_size
        return tuple(
            SwappableOperator(name=name, blocks=blocks, num_bytes=width * output_bytes, flops=flops)
            for name, width, flops in (
                ("ln1", 1, 0),
                ("qkv", 3, 3 * square),
                ("attention", 1, attention),
                ("projection", 1, square),
                ("ln2", 1, 0),
                ("fc1", 4, 4 * square),
                ("gelu", 4, 0),
                ("fc2", 1, 4 * square),
            )
        )

    @property
    def _tokens(self) -> int:
        return self.batch_size * self.sequence_len

    @property
    def _output_bytes(self) -> int:
        """Bytes of an output as wide as the model, in 16 bit."""
        return 2 * self._tokens * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperHardware:
    """The rates and memories that the equations know."""

    flops_per_second: float
    """[THP_G]"""
    link_bytes_per_second: float
    """One way [BW_G]."""
    read_bytes_per_second: float
    """All SSDs together [BW_S2M]."""
    write_bytes_per_second: float
    """[BW_M2S]"""
    available_bytes: int
    """Main memory for activations [MEM_avail]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEquations:
    """Eq. 1 to 5 for one shape on one machine; the `Equations` that `prefix.py` searches."""

    shape: PaperShape
    hardware: PaperHardware

    @property
    def operators(self) -> tuple[SwappableOperator, ...]:
        """All but the block inputs, in forward order."""
        return self.shape.operators

    @property
    def inter_block_bytes(self) -> int:
        """The block inputs: always swapped."""
        return self.shape.inter_block_bytes

    @property
    def available_bytes(self) -> int:
        """Main memory for activations [MEM_avail]."""
        return self.hardware.available_bytes

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        """Predicted seconds of a step [T_iter]."""
        return self.time(
            swapped_bytes=swapped_bytes, spilled_bytes=spilled_bytes, recomputed_flops=recomputed_flops
        ).total

    def time(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> StepTime:
        """Every term, for the bytes swapped [A] and spilled [A_nvme] and the FLOPs recomputed [FLOP_r]."""
        hardware, flops_forward = self.hardware, self.shape.flops_forward
        weight_bytes, state_bytes = self.shape.weight_bytes, self.shape.state_bytes
        link, read, write = (
            hardware.link_bytes_per_second,
            hardware.read_bytes_per_second,
            hardware.write_bytes_per_second,
        )
        return StepTime(
            forward=_stage(
                compute=flops_forward / hardware.flops_per_second,
                down=swapped_bytes / link,
                up=weight_bytes / link,
                nvme_read=weight_bytes / read,
                nvme_write=spilled_bytes / write,
            ),
            backward=_stage(
                compute=(2 * flops_forward + recomputed_flops) / hardware.flops_per_second,
                down=weight_bytes / link,
                up=(weight_bytes + swapped_bytes) / link,
                nvme_read=(state_bytes + spilled_bytes) / read,
                nvme_write=state_bytes / write,
            ),
        )

    def without_states(self) -> PaperEquations:
        """These equations with no parameters to move: P stands only in the terms of traffic."""
        return replace(self, shape=replace(self.shape, num_parameters=0))


def _stage(*, compute: float, down: float, up: float, nvme_read: float, nvme_write: float) -> StageTime:
    """A stage that takes as long as its busiest resource: all overlap fully, reads and writes of NVMe do not. The
    optimizer's computing is left out."""
    return StageTime(
        compute=compute,
        down=down,
        up=up,
        nvme_read=nvme_read,
        nvme_write=nvme_write,
        optimizer=0.0,
        total=max(compute, down, up, nvme_read + nvme_write),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """Bytes in each tier: needed, or available."""

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
        host_bytes=buffers + _STATE_TENSORS * _STATE_BYTES * largest_tensor,
        nvme_bytes=shape.state_bytes + shape.inter_block_bytes,
    )


def fits(shape: PaperShape, have: TierBytes) -> bool:
    """Whether the shape fits into every tier."""
    needed = need(shape)
    return (
        needed.gpu_bytes <= have.gpu_bytes
        and needed.host_bytes <= have.host_bytes
        and needed.nvme_bytes <= have.nvme_bytes
    )


def largest(shapes: Mapping[str, PaperShape], have: TierBytes) -> str | None:
    """The name of the shape with the most parameters among those that fit; None if none does."""
    fitting = [name for name, shape in shapes.items() if fits(shape, have)]
    return max(fitting, key=lambda name: shapes[name].num_parameters, default=None)


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
