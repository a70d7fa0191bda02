"""The sums of a segment's gradients: one for each of its trained blocks, addressed by their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Self

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.optimizer.gradients import GradientSum


class SegmentSum(Closing):
    """Adds up the gradients of a segment's trained parameters."""

    def __init__(self, blocks: Sequence[GradientSum]) -> None:
        """`blocks`: the sum of each trained block, in the order of the segment."""
        self.blocks = tuple(blocks)
        self.places = [(each, index) for each in blocks for index in range(each.num_parameters)]
        """For each of their parameters: its block's sum, and its number there."""

    @classmethod
    def of(cls, sums: Iterable[GradientSum]) -> Self:
        """Open the sums of blocks one after another, as the sum of their segment. If one cannot be opened, none stays
        open."""
        with ExitStack() as opened:
            found = cls([opened.enter_context(each) for each in sums])
            opened.pop_all()
        return found

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one contribution: for each of the parameters a gradient in its shape, or None."""
        left = iter(gradients)
        for each in self.blocks:
            each.add(tuple(islice(left, each.num_parameters)))

    def add_one(self, index: int, gradient: torch.Tensor, *, is_last: bool = False) -> None:
        """Add a contribution to the parameter at `index`; see `GradientSum.add_one`."""
        total, number = self.places[index]
        total.add_one(number, gradient, is_last=is_last)

    def expect_last(self) -> None:
        """The last micro-batch comes; see `Accumulator.expect_last`."""
        for each in self.blocks:
            each.sums.expect_last()

    def close(self) -> None:
        """Give back the memory of what is not finished. Idempotent."""
        for each in self.blocks:
            each.close()


@contextmanager
def adding_to(parameters: Sequence[torch.nn.Parameter], total: SegmentSum, *, is_last: bool) -> Iterator[None]:
    """While a backward runs inside: add each parameter's gradient to `total` as soon as autograd has made it.

    So no more than one parameter's gradient is waiting. With `is_last`, each leaves at once.
    """
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(each.add_made, index, is_last=is_last))
        for parameter, (each, index) in zip(parameters, total.places, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
