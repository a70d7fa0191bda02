"""The paper's cost model (`cost_model: paper`): 14 bytes of state per parameter, 34 b s h of activations per block.

Section IV-D of the Ratel paper, with its notation in brackets. Gives `prefix` the equations it searches, `peers` and
`largest` the shapes. Pure.

    T_iter = T_f + T_b                                                                                    Eq. 1
    T_f    = max(FLOP_f / THP_G, A / BW_G, 2 P / BW_G, 2 P / R + A_nvme / W)                              Eq. 2, 4
    A_nvme = max(0, A - MEM_avail)                                      Eq. 3, without the maximum in the paper
    T_b    = max((2 FLOP_f + FLOP_r) / THP_G, 2 P / BW_G, (2 P + A) / BW_G, (14 P + A_nvme) / R + 14 P / W)   Eq. 5

Invariants: the link is duplex, NVMe is simplex (R = BW_S2M, W = BW_M2S); neither the embedding nor the logits count as
activations, and the head is never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.planning.papers.prefix import Operator

WEIGHT_BYTES = 2
"""Of a parameter: P16, read in forward and again in backward; G16 is as large."""
STATE_BYTES = 14
"""Of a parameter: P32, OS32 and P16 (Table II), read and written by the optimizer."""

Resource = Literal["compute", "down", "up", "nvme", "optimizer"]


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
    def operators(self) -> tuple[Operator, ...]:
        """Of every block, in forward order. Norms and GELU count no FLOPs, so that they are the last to be swapped."""
        output_bytes, blocks = self._output_bytes, tuple(range(self.num_layers))
        square = 2 * self._tokens * self.hidden_size**2
        attention = 4 * self._tokens * self.sequence_len * self.hidden_size
        return tuple(
            Operator(name=name, blocks=blocks, num_bytes=width * output_bytes, flops=flops)
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
        """Of an output as wide as the model, in 16 bits."""
        return 2 * self._tokens * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperHardware:
    """The rates and memories that the equations know."""

    flops_per_second: float
    """[THP_G]"""
    link_bytes_per_second: float
    """One way [BW_G]."""
    read_bytes_per_second: float
    """Of all SSDs together [BW_S2M]."""
    write_bytes_per_second: float
    """[BW_M2S]"""
    available_bytes: int
    """Of main memory, for activations [MEM_avail]."""
    adam_parameters_per_second: float | None = None
    """None leaves the optimizer's computing out, as the paper does; Fuyou has it [T_o]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """The seconds for which each resource is busy in a stage, which takes as long as the busiest."""

    compute: float
    down: float
    """From the GPU to main memory."""
    up: float
    nvme: float
    """Reads and writes, one after the other."""
    optimizer: float = 0.0

    @property
    def seconds(self) -> float:
        """All overlap fully."""
        return max(self.compute, self.down, self.up, self.nvme, self.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTime:
    """A step, term by term."""

    forward: StageTerms
    backward: StageTerms

    @property
    def seconds(self) -> float:
        """Eq. 1."""
        return self.forward.seconds + self.backward.seconds

    @property
    def bottleneck(self) -> Resource:
        """What is busy longest over both stages."""
        busy: dict[Resource, float] = {
            "compute": self.forward.compute + self.backward.compute,
            "down": self.forward.down + self.backward.down,
            "up": self.forward.up + self.backward.up,
            "nvme": self.forward.nvme + self.backward.nvme,
            "optimizer": self.forward.optimizer + self.backward.optimizer,
        }
        return max(busy, key=lambda resource: busy[resource])


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEquations:
    """Eq. 1 to 5 for one shape on one machine; the `Equations` that `planning.papers.prefix` searches."""

    shape: PaperShape
    hardware: PaperHardware

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All but the block inputs, in forward order."""
        return self.shape.operators

    @property
    def inter_block_bytes(self) -> int:
        """The block inputs: always swapped."""
        return self.shape.inter_block_bytes

    @property
    def host_room_bytes(self) -> int:
        """MEM_avail."""
        return self.hardware.available_bytes

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        """T_iter."""
        return self.time(
            swapped_bytes=swapped_bytes, spilled_bytes=spilled_bytes, recomputed_flops=recomputed_flops
        ).seconds

    def time(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> PaperTime:
        """Every term, for A, A_nvme and FLOP_r."""
        hardware, flops_forward = self.hardware, self.shape.flops_forward
        weight_bytes = WEIGHT_BYTES * self.shape.num_parameters
        state_bytes = STATE_BYTES * self.shape.num_parameters
        link, read, write = (
            hardware.link_bytes_per_second,
            hardware.read_bytes_per_second,
            hardware.write_bytes_per_second,
        )
        adam = hardware.adam_parameters_per_second
        return PaperTime(
            forward=StageTerms(
                compute=flops_forward / hardware.flops_per_second,
                down=swapped_bytes / link,
                up=weight_bytes / link,
                nvme=weight_bytes / read + spilled_bytes / write,
            ),
            backward=StageTerms(
                compute=(2 * flops_forward + recomputed_flops) / hardware.flops_per_second,
                down=weight_bytes / link,
                up=(weight_bytes + swapped_bytes) / link,
                nvme=(state_bytes + spilled_bytes) / read + state_bytes / write,
                optimizer=self.shape.num_parameters / adam if adam is not None else 0.0,
            ),
        )

    def without_states(self) -> PaperEquations:
        """The same with no parameters to move: P stands in no term but those of traffic and of the optimizer."""
        return replace(self, shape=replace(self.shape, num_parameters=0))
