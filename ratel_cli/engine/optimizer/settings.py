"""The settings of update rules: what a rule computes with in a whole run, and the kernel's numbers of one update.

The numbers that a rule derives from the step are computed here in Python floats, exactly as the optimizers of torch do;
the kernel rounds them to fp32 once. Which fields a rule has says `ratel_cli/schedule/rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ratel_cli import _native
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.rules import P16, STOCHASTIC, Rule
from ratel_cli.sizes import WeightDtype

SquareRoot = Literal["correct", "mkl_avx512", "mkl_sse"]
Scalars = _native.AdamWScalars | _native.LionScalars | _native.SgdScalars | _native.MuonScalars
Kernel = Callable[..., list[tuple[int, int]]]
"""A kernel such as `_native._Update`, with the scalars of its own rule."""


def kernel_name(rule: Rule, dtype: WeightDtype) -> str:
    """What the kernels of a rule are called for that compute dtype: the plain update, behind `update_` the one with
    checksums, and behind `stream_` the limit."""
    return rule.name if P16 in rule.record(dtype).fields else f"{rule.name.removesuffix(STOCHASTIC)}_{dtype}"


def kernel_of(rule: Rule, dtype: WeightDtype) -> Kernel:
    """The kernel that takes the fields of the rule's record for that compute dtype, in their order."""
    kernel: Kernel = getattr(_native, f"update_{kernel_name(rule, dtype)}")
    return kernel


def square_root_of_torch() -> SquareRoot:
    """How torch rounds square roots on this processor: MKL's are sometimes 1 ulp off (kernels/README.md)."""
    values = torch.arange(0x3F800000, 0x40800000, 4099, dtype=torch.int32, device="cpu").view(torch.float32)  # [1, 4)
    kinds: tuple[SquareRoot, ...] = (_native.native_square_root(), "correct", "mkl_avx512")
    for kind in kinds:
        roots = values.clone()
        _native.square_root(roots, square_root=kind)
        if torch.equal(roots, values.sqrt()):
            return kind
    return "correct"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNumbers:
    """What a rule needs to know of one update."""

    number: int
    """Counts applied updates, from 1."""
    learning_rate: float
    """The run's."""
    gradient_scale: float
    """Every gradient is multiplied by this first: the inverse loss scale times the clip coefficient."""
    group_rates: tuple[float, ...] = ()
    """Learning rates of the groups that have their own, from group 1 on."""

    def rate_of(self, block: BlockSpec) -> float:
        """The block's learning rate."""
        return self.group_rates[block.rate - 1] if block.rate else self.learning_rate


class OptimizerSettings(Protocol):
    """The settings of all rules of a run."""

    def scalars(self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot) -> Scalars:
        """The kernel's numbers of one update of this block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """AdamW's settings for a whole run, whatever its moments are kept in."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def scalars(self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot) -> _native.AdamWScalars:
        """Return the scalars as `torch.optim.AdamW` computes them."""
        learning_rate = update.rate_of(block)
        bias_correction1 = 1 - self.beta1**update.number
        bias_correction2 = 1 - self.beta2**update.number
        return _native.AdamWScalars(
            decay_factor=1 - learning_rate * self.weight_decay,
            beta1=self.beta1,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            step_size=learning_rate / bias_correction1,
            bias_correction2_sqrt=bias_correction2**0.5,
            epsilon=self.epsilon,
            gradient_scale=update.gradient_scale,
            square_root=square_root,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LionSettings:
    """Lion's settings for a whole run."""

    beta1: float
    beta2: float
    weight_decay: float

    def scalars(self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot) -> _native.LionScalars:  # noqa: ARG002
        """Return the scalars as the code of Lion's authors computes them."""
        learning_rate = update.rate_of(block)
        return _native.LionScalars(
            decay_factor=1 - learning_rate * self.weight_decay,
            beta1=self.beta1,
            one_minus_beta1=1 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1 - self.beta2,
            learning_rate=learning_rate,
            gradient_scale=update.gradient_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdSettings:
    """The settings of gradient descent for a whole run."""

    momentum: float
    nesterov: bool
    weight_decay: float

    def scalars(self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot) -> _native.SgdScalars:  # noqa: ARG002
        """Return the scalars as `torch.optim.SGD` computes them."""
        return _native.SgdScalars(
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            learning_rate=update.rate_of(block),
            gradient_scale=update.gradient_scale,
            is_first=update.number == 1,
            is_nesterov=self.nesterov,
        )


RateAdjustment = Literal["match_rms_adamw", "original"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """The settings of Muon for a whole run, and those of AdamW, which updates what is no matrix of a layer."""

    adamw: AdamWSettings
    momentum: float
    nesterov: bool
    adjust_lr_fn: RateAdjustment
    """How a matrix's shape changes its learning rate (`torch.optim.Muon`)."""

    def scalars(
        self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot
    ) -> _native.AdamWScalars | _native.MuonScalars:
        """Return the scalars as `torch.optim.Muon` computes them, or `torch.optim.AdamW`."""
        if block.matrix is None:
            return self.adamw.scalars(update, block, square_root)
        learning_rate = update.rate_of(block)
        return _native.MuonScalars(
            decay_factor=1 - learning_rate * self.adamw.weight_decay,
            one_minus_momentum=1 - self.momentum,
            step_size=learning_rate * self._ratio(*block.matrix.shape),
            gradient_scale=update.gradient_scale,
        )

    def _ratio(self, num_rows: int, num_columns: int) -> float:
        if self.adjust_lr_fn == "original":  # Jordan et al., 2024
            return math.sqrt(max(1, num_rows / num_columns))
        return 0.2 * math.sqrt(max(num_rows, num_columns))  # Liu et al., 2025, arXiv 2502.16982, equation 4
