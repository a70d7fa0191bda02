"""Warnings of what steps show to be wrong.

Invariant: a warning is said once, or once for each run of such steps.
"""

from __future__ import annotations

from collections.abc import Callable

from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import counted

_NO_GRADIENT_STEPS = 10
"""A single step may have no gradient at all, as one whose rows are all cut off before their answers."""


class StepWarnings:
    """Warns of what steps show to be wrong.

    Of GPU memory once, at the first step for which torch had to give its cache back; of gradients when as many steps in
    a row had none as no healthy run has.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned_of_memory = False
        self._num_without_gradient = 0
        """Steps since the last one that had a gradient."""

    def note(self, metrics: StepMetrics) -> None:
        """Look at one step."""
        self._num_without_gradient = 0 if metrics.grad_norm else self._num_without_gradient + 1
        if self._num_without_gradient == _NO_GRADIENT_STEPS:
            self._warn(
                f"step {metrics.step}: the gradient norm was 0 in the last {_NO_GRADIENT_STEPS} steps, so the model "
                "learns nothing; `ratel data CONFIG` shows which tokens have loss, and the config what is frozen"
            )
        if metrics.num_alloc_retries and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            self._warn(
                f"step {metrics.step}: GPU memory was full or fragmented, and the GPU paused "
                f"{counted(metrics.num_alloc_retries, 'time')} until some was free; lower limits.gpu_memory if other "
                "programs use this GPU, otherwise micro_batch_size"
            )
