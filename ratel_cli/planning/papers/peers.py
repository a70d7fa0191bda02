"""Three figures that other papers give for their own systems, each on its own terms. Pure.

Used by `ratel plan --compare` beside `strategies`, where the same systems' choices are held against ours
under one set of equations: G10 as Ratel's section III-C simulates it, FlashNeuron's capacity, SSDTrain's estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.planning.papers.paper import (
    STATE_BYTES,
    WEIGHT_BYTES,
    PaperEquations,
    PaperHardware,
    PaperShape,
    StageTerms,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class G10Time:
    """A step whose optimizer runs on the GPU, after backward."""

    forward: StageTerms
    backward: StageTerms
    optimizer: StageTerms

    @property
    def seconds(self) -> float:
        """Of the three stages, one after the other."""
        return self.forward.seconds + self.backward.seconds + self.optimizer.seconds

    @property
    def optimizer_share(self) -> float:
        """Of the step."""
        return self.optimizer.seconds / self.seconds

    @property
    def forward_utilisation(self) -> float:
        """The share of forward in which the GPU computes."""
        return self.forward.compute / self.forward.seconds


def g10_time(shape: PaperShape, hardware: PaperHardware) -> G10Time:
    """All activations and gradients to NVMe; then all states to the GPU and back, whose computing is left out.

    The paper measures 0.1 s of it, beneath 13 s of transfers.
    """
    activations, weights = shape.activation_bytes, WEIGHT_BYTES * shape.num_parameters
    states = STATE_BYTES * shape.num_parameters
    link, read, write = (
        hardware.link_bytes_per_second,
        hardware.read_bytes_per_second,
        hardware.write_bytes_per_second,
    )
    ours = PaperEquations(shape=shape, hardware=hardware).time(
        swapped_bytes=activations, spilled_bytes=activations, recomputed_flops=0
    )
    return G10Time(
        forward=ours.forward,
        backward=StageTerms(
            compute=ours.backward.compute,
            down=ours.backward.down,
            up=ours.backward.up,
            nvme=(weights + activations) / read + weights / write,
        ),
        optimizer=StageTerms(compute=0.0, down=states / link, up=states / link, nvme=states / read + states / write),
    )


def flash_neuron_parameters(gpu_memory_bytes: int) -> int:
    """The largest model of FlashNeuron, which keeps states in the GPU: 16 bytes per parameter."""
    return gpu_memory_bytes // 16


def ssdtrain_offloaded_bytes(*, num_layers: int, hidden_size: int, batch_size: int, sequence_len: int) -> int:
    """SSDTrain's estimate (Table III) of what each of two tensor-parallel GPUs offloads in a step of BERT."""
    return (20 * num_layers + 3) * batch_size * sequence_len * hidden_size
