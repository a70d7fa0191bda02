"""The gradient of one block: summed over micro-batches, rounded once, brought to host memory.

In backward a `GradientSum` adds up a block's gradients and becomes a `BlockGradient` (G16), which the update takes
(engine/optimizer/block_gradient.py). It has two halves: where the sums are (engine/optimizer/accumulators.py), and how
they leave (engine/optimizer/leaving.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.optimizer.accumulators import Accumulator
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.leaving import Leaving


class GradientSum(Closing):
    """Adds up one block's gradients, parameter by parameter.

    Each parameter goes through these phases:

        1. add     in fp32, in the order in which the contributions come
        2. leave   with the last contribution: round to the gradient dtype, take the norm, and start the download
        3. finish  every parameter that has not left does so now

    On a GPU a parameter takes memory from its first contribution until its download has ended.
    """

    def __init__(self, sums: Accumulator, leaving: Leaving) -> None:
        """Both are closed with this."""
        self.sums = sums
        self._leaving = leaving

    @property
    def num_parameters(self) -> int:
        """Number of the block's parameters."""
        return len(self._leaving.has_left)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the block's parameters, in their order, a gradient or None.

        A gradient has its parameter's shape, on the compute device.
        """
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.add_one(index, gradient)
        self.sums.end_contribution()

    def add_one(self, index: int, gradient: torch.Tensor, *, is_last: bool = False) -> None:
        """Add a contribution, in the parameter's shape, to the parameter at `index`.

        With `is_last` it has all its contributions: round them, and bring the result to host memory. The contribution
        may be overwritten then.
        """
        assert not self._leaving.has_left[index], "a contribution comes after the last one"
        if is_last:
            self._send(index, self._leaving.round(index, self.sums, gradient))
        else:
            self.sums.add(index, gradient)

    def expect_last(self) -> None:
        """The last micro-batch comes."""
        self.sums.expect_last()

    def finish(self) -> BlockGradient:
        """The gradient, once all contributions have been added."""
        leaving = self._leaving
        for index, has_left in enumerate(leaving.has_left):
            if not has_left and index in self.sums:
                with leaving.device.computing(leaving.label):
                    rounded = leaving.round(index, self.sums, None)
                self._send(index, rounded)
                del rounded
        gradient = leaving.finish()
        self.close()
        return gradient

    def close(self) -> None:
        """Give the memory back, unless `finish` has handed it on. Idempotent."""
        with ExitStack() as closing:
            closing.callback(self._leaving.close)
            closing.callback(self.sums.close)

    def _send(self, index: int, rounded: torch.Tensor) -> None:
        self.sums.reuse()
        self._leaving.send(index, rounded)


@contextmanager
def gradient_of_input(leaf: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    """A context of a backward in which a layer's input gets its gradient; it gives what takes that gradient.

    A leaf's gradient has the leaf's strides, where autograd would hand the code before the layer the strides that it
    comes with, and kernels choose by these. So of a leaf whose elements do not lie in their order, the gradient is
    taken before it becomes the leaf's. A leaf that needs no gradient gets none.
    """
    made: list[torch.Tensor] = []
    hook = leaf.register_hook(made.append) if leaf.requires_grad and not leaf.is_contiguous() else None

    def taken() -> torch.Tensor:
        gradient = taken_gradient(leaf)
        return made.pop() if made else gradient

    try:
        yield taken
    finally:
        if hook is not None:
            hook.remove()


def taken_gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf, which has none afterwards."""
    gradient = leaf.grad
    assert gradient is not None
    leaf.grad = None
    return gradient


NormParts: TypeAlias = Mapping[str, Sequence[float | torch.Tensor]]
"""2-norms of gradients by parameter name: one, or of a parameter that lies in several slices one for each part."""


def one_part(norms: Norms) -> NormParts:
    """Return the norms of whole gradients as parts: one for each parameter."""
    return {name: (norm,) for name, norm in norms.items()}


def total_norm(norms: NormParts, order: Sequence[str]) -> torch.Tensor:
    """The global norm from the norms by parameter name, stacked in `order` as torch does. A CPU scalar in fp32."""
    present = [norm for name in order for norm in norms.get(name, ())]
    on_device = [norm for norm in present if isinstance(norm, torch.Tensor)]
    stacked = torch.stack(on_device) if on_device else torch.tensor(present, dtype=torch.float32, device="cpu")
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return norm.cpu()


def first_not_finite(norms: NormParts, order: Sequence[str]) -> str | None:
    """Name of the first parameter in `order` whose gradient is not finite; None if all are."""
    return next((name for name in order if not all(map(math.isfinite, norms.get(name, ())))), None)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """The factor that `clip_grad_norm_` applies to gradients: max_norm / (norm + 1e-6), at most 1, in fp32."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
