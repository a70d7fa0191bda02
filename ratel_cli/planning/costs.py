"""Predicted time of a step as its parts run today: one after another. Used by `planning.plan`. Pure.

The overlapped model of the paper (Eq. 1-5) takes the place of `serial_step` when the parts overlap;
until then a sum is the truth. FLOPs follow papers.md section 2: `24 b s h^2` per layer generalises to two
per matrix element and token, and attention adds `4 b s^2 h`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage by resource."""

    compute: float
    nvme_read: float
    nvme_write: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.compute + self.nvme_read + self.nvme_write + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    forward: StageTime
    """From the embedding to the last layer."""
    backward: StageTime
    """Head, backward and update."""

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def bottleneck(self) -> str:
        """The resource that takes longest, in the words of the step line."""
        forward, backward = self.forward, self.backward
        by_name = {
            "compute": forward.compute + backward.compute,
            "nvme read": forward.nvme_read + backward.nvme_read,
            "nvme write": forward.nvme_write + backward.nvme_write,
            "optimizer": forward.optimizer + backward.optimizer,
        }
        return max(by_name, key=lambda name: by_name[name])


def forward_flops(spec: ModelSpec, workload: Workload) -> int:
    """Floating point operations of the forward pass of a full step."""
    return layer_flops(spec, workload) + _head_flops(spec, workload)


def layer_flops(spec: ModelSpec, workload: Workload) -> int:
    """The layers' part: what backward recomputes. The head's is done once (papers.md section 2, fault 4).

    Every matrix counts for every token: too much for a mixture of experts, whose share of active ones no
    shape tells. Attention is counted over the whole row, masked or not, as the papers do.
    """
    matrices = sum(_matrix_elements(block) for block in spec.blocks[1:-1])
    attention = 4 * spec.num_layers * workload.sequence_len * spec.hidden_size
    return workload.tokens * (2 * matrices + attention)


def serial_step(spec: ModelSpec, workload: Workload, traffic: Traffic, hardware: HardwareProfile) -> StepTime:
    """Forward; then recomputation and backward (two forwards), NVMe and AdamW on top."""
    layers, head = layer_flops(spec, workload), _head_flops(spec, workload)
    flops_per_second, nvme = hardware.gpu.flops_per_second, hardware.nvme
    return StepTime(
        forward=StageTime(
            compute=layers / flops_per_second,
            nvme_read=traffic.forward_read_bytes / nvme.read_bytes_per_second,
            nvme_write=0.0,
            optimizer=0.0,
        ),
        backward=StageTime(
            compute=3 * (layers + head) / flops_per_second,
            nvme_read=traffic.backward_read_bytes / nvme.read_bytes_per_second,
            nvme_write=traffic.written_bytes / nvme.write_bytes_per_second,
            optimizer=spec.num_parameters / hardware.host.adam_parameters_per_second,
        ),
    )


def _head_flops(spec: ModelSpec, workload: Workload) -> int:
    matrices = _matrix_elements(spec.blocks[-1])
    if spec.tied:
        matrices += spec.vocab_size * spec.hidden_size
    return 2 * workload.tokens * matrices


def _matrix_elements(block: BlockSpec) -> int:
    return sum(math.prod(parameter.shape) for parameter in block.parameters if len(parameter.shape) > 1)
