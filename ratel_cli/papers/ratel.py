"""The Ratel paper's cost model (`cost_model: paper`): 14 bytes of state per parameter, 34 b s h of activations per
block. Pure.

Section IV-D, with its notation in brackets:

    T_iter = T_f + T_b                                                                                    Eq. 1
    T_f    = max(FLOP_f / THP_G, A / BW_G, 2 P / BW_G, 2 P / R + A_nvme / W)                              Eq. 2, 4
    A_nvme = max(0, A - MEM_avail)                                      Eq. 3, without the maximum in the paper
    T_b    = max((2 FLOP_f + FLOP_r) / THP_G, 2 P / BW_G, (2 P + A) / BW_G, (14 P + A_nvme) / R + 14 P / W)   Eq. 5

Invariants: the link is duplex, NVMe is simplex (R = BW_S2M, W = BW_M2S). Neither the embedding nor the logits count as
activations, and the head is never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratel_cli.papers.prefix import SwappableOperator
from ratel_cli.planning.time.step_time import StageTime, StepTime

WEIGHT_BYTES = 2
"""Per parameter: P16, the compute weight, read in forward and again in backward. G16, the gradient, is as large."""
STATE_BYTES = 14
"""Per parameter: P32 and OS32, the fp32 master weight and optimizer states, and P16 (Table II). The optimizer reads and
writes them."""


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
    adam_parameters_per_second: float | None = None
    """Rate of AdamW, which Fuyou counts [T_o]. None leaves the optimizer's computing out, as the Ratel paper does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEquations:
    """Eq. 1 to 5 for one shape on one machine; the `Equations` that `planning.papers.prefix` searches."""

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
        weight_bytes = WEIGHT_BYTES * self.shape.num_parameters
        state_bytes = STATE_BYTES * self.shape.num_parameters
        link, read, write = (
            hardware.link_bytes_per_second,
            hardware.read_bytes_per_second,
            hardware.write_bytes_per_second,
        )
        adam = hardware.adam_parameters_per_second
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
                optimizer=self.shape.num_parameters / adam if adam is not None else 0.0,
            ),
        )

    def without_states(self) -> PaperEquations:
        """These equations with no parameters to move: P stands only in the terms of traffic and of the optimizer."""
        return replace(self, shape=replace(self.shape, num_parameters=0))


def _stage(
    *, compute: float, down: float, up: float, nvme_read: float, nvme_write: float, optimizer: float = 0.0
) -> StageTime:
    """A stage that takes as long as its busiest resource: all overlap fully, reads and writes of NVMe do not."""
    return StageTime(
        compute=compute,
        down=down,
        up=up,
        nvme_read=nvme_read,
        nvme_write=nvme_write,
        optimizer=optimizer,
        total=max(compute, down, up, nvme_read + nvme_write, optimizer),
    )
