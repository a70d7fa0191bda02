"""The settings of update rules: what a rule computes with in a whole run, and the kernel's numbers of one update.

The numbers that a rule derives from the step are computed here in Python floats, exactly as the optimizers of torch do;
the kernel rounds them to fp32 once. A rule in torch derives them itself. Which fields a rule has says
`ratel_cli/schedule/rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ratel_cli import _native
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.rules import P16, STOCHASTIC, Rule
from ratel_cli.schedule.updates import Numbers
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
    learning_rate: float | None
    """The run's; None: it is not known yet."""
    gradient_scale: float
    """Every gradient is multiplied by this first: the inverse loss scale times the clip coefficient."""
    group_rates: tuple[float, ...] = ()
    """Learning rates of the groups that have their own, from group 1 on."""

    def rate_of(self, block: BlockSpec) -> float:
        """The block's learning rate."""
        assert self.learning_rate is not None
        return self.group_rates[block.rate - 1] if block.rate else self.learning_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """The settings of all rules of a run."""

    weight_decay: float
    options: Mapping[str, Any]
    """By name: what else rules read."""

    def scalars(self, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot) -> Scalars:
        """The kernel's numbers of one update of this block."""
        return _SCALARS[block.rule.name.removesuffix(STOCHASTIC)](self, update, block, square_root)

    def numbers(self, update: UpdateNumbers, block: BlockSpec, *, decays: bool) -> Numbers:
        """What torch computes with in one update of a parameter of this block."""
        return Numbers(
            number=update.number,
            learning_rate=update.rate_of(block),
            weight_decay=self.weight_decay if decays else 0.0,
            options=self.options,
        )


def adamw_settings(*, beta1: float, beta2: float, epsilon: float, weight_decay: float) -> OptimizerSettings:
    """AdamW's settings for a whole run, whatever its moments are kept in."""
    return OptimizerSettings(weight_decay=weight_decay, options={"beta1": beta1, "beta2": beta2, "epsilon": epsilon})


def _adamw(
    settings: OptimizerSettings, update: UpdateNumbers, block: BlockSpec, square_root: SquareRoot
) -> _native.AdamWScalars:
    """Return the scalars as `torch.optim.AdamW` computes them."""
    learning_rate, options = update.rate_of(block), settings.options
    bias_correction1 = 1 - options["beta1"] ** update.number
    bias_correction2 = 1 - options["beta2"] ** update.number
    return _native.AdamWScalars(
        decay_factor=1 - learning_rate * settings.weight_decay,
        beta1=options["beta1"],
        one_minus_beta1=1 - options["beta1"],
        beta2=options["beta2"],
        one_minus_beta2=1 - options["beta2"],
        step_size=learning_rate / bias_correction1,
        bias_correction2_sqrt=bias_correction2**0.5,
        epsilon=options["epsilon"],
        gradient_scale=update.gradient_scale,
        square_root=square_root,
    )


def _lion(settings: OptimizerSettings, update: UpdateNumbers, block: BlockSpec, _: SquareRoot) -> _native.LionScalars:
    """Return the scalars as the code of Lion's authors computes them."""
    learning_rate, options = update.rate_of(block), settings.options
    return _native.LionScalars(
        decay_factor=1 - learning_rate * settings.weight_decay,
        beta1=options["beta1"],
        one_minus_beta1=1 - options["beta1"],
        beta2=options["beta2"],
        one_minus_beta2=1 - options["beta2"],
        learning_rate=learning_rate,
        gradient_scale=update.gradient_scale,
    )


def _sgd(settings: OptimizerSettings, update: UpdateNumbers, block: BlockSpec, _: SquareRoot) -> _native.SgdScalars:
    """Return the scalars as `torch.optim.SGD` computes them."""
    return _native.SgdScalars(
        weight_decay=settings.weight_decay,
        momentum=settings.options["momentum"],
        learning_rate=update.rate_of(block),
        gradient_scale=update.gradient_scale,
        is_first=update.number == 1,
        is_nesterov=settings.options["nesterov"],
    )


def _muon(settings: OptimizerSettings, update: UpdateNumbers, block: BlockSpec, _: SquareRoot) -> _native.MuonScalars:
    """Return the scalars as `torch.optim.Muon` computes them."""
    learning_rate = update.rate_of(block)
    num_rows, num_columns = block.parameters[0].shape
    ratio = 0.2 * math.sqrt(max(num_rows, num_columns))  # Liu et al., 2025, arXiv 2502.16982, equation 4
    if settings.options["adjust_lr_fn"] == "original":  # Jordan et al., 2024
        ratio = math.sqrt(max(1, num_rows / num_columns))
    return _native.MuonScalars(
        decay_factor=1 - learning_rate * settings.weight_decay,
        one_minus_momentum=1 - settings.options["momentum"],
        step_size=learning_rate * ratio,
        gradient_scale=update.gradient_scale,
    )


_SCALARS: Final[Mapping[str, Callable[[OptimizerSettings, UpdateNumbers, BlockSpec, SquareRoot], Scalars]]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "sgd_momentum": _sgd,
    "muon": _muon,
}
"""By rule, master or not: what its kernel computes with."""
