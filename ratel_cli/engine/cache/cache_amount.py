"""How much of a pass goes to one place, the drives or RAM, where the tensor cache finds that itself (SSDTrain, section
III-A). Pure.

    1. find     the first pass shows at which rate the drives write: what they write while forward computes; for RAM,
                what the link moved meanwhile
    2. reduce   where backward waits for what comes back, a quarter less, until it does not
    3. regrow   after a while without waiting, a little more, up to what was found

The drives' rate of writing alone would not do: backward takes longer than forward, but the blocks that were offloaded
are the last ones of backward, and what cannot be read ahead into buffers must be read while these blocks compute.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_STALL = 0.03
"""The share of forward's time, or 1 % of a step's, for which backward may wait."""
_LESS, _MORE = 0.75, 1.05
_CALM_PASSES = 16
"""Passes without waiting before the amount grows, so that one slow moment of a drive costs little for long."""


class FoundAmount:
    """Bytes of a pass that may go to one place."""

    def __init__(self) -> None:
        self.most_bytes: int | None = None
        """None: not known yet."""
        self._found_bytes = 0
        self._num_calm = 0

    def find(self, num_bytes: int, spans: Sequence[tuple[float, float]], *, forward_seconds: float) -> None:
        """A pass wrote `num_bytes` at these times; its forward took so long."""
        if self.most_bytes is None and spans and forward_seconds > 0:
            seconds = max(ended for _, ended in spans) - min(began for began, _ in spans)
            self._found_bytes = self.most_bytes = int(num_bytes / max(1e-9, seconds) * forward_seconds)

    def allows(self, num_bytes: int) -> bool:
        """Whether this many bytes of a pass may go."""
        return self.most_bytes is None or num_bytes <= self.most_bytes

    def adapt(self, num_bytes: int, stalled_seconds: float, *, forward_seconds: float) -> None:
        """`num_bytes` of a pass went, and its backward waited for them for so long."""
        if self.most_bytes is None:
            if not num_bytes:
                return
            self._found_bytes = self.most_bytes = num_bytes
        if stalled_seconds > _MOST_STALL * forward_seconds:
            self.most_bytes = int(_LESS * self.most_bytes)
            self._num_calm = 0
            return
        self._num_calm += 1
        if self._num_calm == _CALM_PASSES:
            self.most_bytes = min(self._found_bytes, int(_MORE * self.most_bytes))
            self._num_calm = 0
