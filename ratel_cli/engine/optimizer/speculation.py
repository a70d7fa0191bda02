"""Whether a step that may have to be clipped updates its blocks before its norm is known.

The norm of all gradients decides whether a step is clipped, and it is known only at the end of backward. To speculate
is to update each block as its gradient arrives, as if nothing were clipped, and to hold the gradients as well. The
square of the norm only grows as backward goes on. So as soon as the gradients that have arrived exceed the limit,
clipping is certain and the speculation ends. Only the blocks that were updated until then were updated in vain.

A step that is not clipped gains the time of its update in backward. A step that is clipped loses the time and the
writes of those updates that were done before clipping was certain. What the last steps would have gained and lost, as
the plan predicts it (planning/search/clipping.py), decides about the next. The first step speculates.

Invariant: clipping that is called certain is what the decision of the step finds too.
"""

from __future__ import annotations

import math
from collections import deque

from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.planning.search.clipping import SpeculationCosts

_NUM_STEPS = 8
"""Steps that are looked back on."""
_CERTAIN = 1.001
"""Rounding of a norm in fp32 is far smaller than this."""


class Speculation:
    """Follows the norm of one step after another, and remembers where in backward clipping became certain."""

    def __init__(self, max_norm: float, costs: SpeculationCosts, *, num_elements: int) -> None:
        """`num_elements`: those of all gradients of a step."""
        self.costs = costs
        """What speculating gains and loses under the plan that is followed."""
        self._max_norm = max_norm
        self._num_elements = num_elements
        self._lost: deque[float] = deque(maxlen=_NUM_STEPS)
        """For each step: the share of its update that speculating would have done in vain; 0 if it was not clipped.
        A clipped step has lost something, since the gradient that made clipping certain counts."""
        self.begin()

    @property
    def is_worthwhile(self) -> bool:
        """True if speculating would have gained at least as much as it lost, over the last steps."""
        return self.costs.is_worthwhile(num_unclipped=self._lost.count(0.0), vain_shares=sum(self._lost))

    @property
    def is_clipping_certain(self) -> bool:
        """True if the gradients that have arrived exceed the limit already."""
        return math.sqrt(self._square) > _CERTAIN * self._max_norm

    def begin(self) -> None:
        """Begin a step."""
        self._square = 0.0
        self._arrived_elements = 0
        self._unknown = deque[BlockGradient]()
        """Gradients whose norms are not in host memory yet."""

    def watch(self, gradient: BlockGradient) -> None:
        """A block's gradient has been handed over. It is added once it has arrived in host memory."""
        self._unknown.append(gradient)
        while self._unknown and self._unknown[0].is_in_host_memory:
            known = self._unknown.popleft()
            self.add(known.squared_norm, known.block.num_elements)

    def add(self, square: float, num_elements: int) -> None:
        """A block's gradient has arrived: the square of its norm, and its size."""
        if not self.is_clipping_certain:
            self._square += square
            self._arrived_elements += num_elements

    def end(self, *, is_clipped: bool) -> None:
        """The step is decided."""
        share = self._arrived_elements / self._num_elements if self.is_clipping_certain else 1.0
        self._lost.append(share if is_clipped else 0.0)
