"""A rule's record in memory, updated by the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ratel_cli import _native
from tests.kernels.oracle import assert_same_bits, scalars
from tests.kernels.rules import LEARNING_RATE, UNIT, Layout, Numbers, Reference, RuleName, direction_of, fields_of

AnyScalars = _native.AdamWScalars | _native.LionScalars | _native.SgdScalars | _native.MuonScalars


def kernel(rule: RuleName, layout: Layout, *, prefix: str = "") -> Callable[..., object]:
    """The kernel of this name: without a prefix the update itself, or `stream_`, or `update_`."""
    found: Callable[..., object] = getattr(_native, f"{prefix}{rule}_{layout}")
    return found


def scalars_of(rule: RuleName, numbers: Numbers, step: int, *, gradient_scale: float = 1.0) -> AnyScalars:
    """What the kernels of a rule get for update number `step`, which counts from 1."""
    rate, beta1, beta2 = LEARNING_RATE, numbers.beta1, numbers.beta2
    if rule == "lion":
        return _native.LionScalars(
            decay_factor=1 - rate * numbers.weight_decay,
            beta1=beta1,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            learning_rate=rate,
            gradient_scale=gradient_scale,
        )
    if rule in ("sgd", "sgd_momentum"):
        return _native.SgdScalars(
            weight_decay=numbers.weight_decay,
            momentum=numbers.momentum,
            learning_rate=rate,
            gradient_scale=gradient_scale,
            is_first=step == 1,
            is_nesterov=numbers.nesterov,
        )
    if rule == "muon":
        return _native.MuonScalars(
            decay_factor=1 - rate * numbers.weight_decay,
            one_minus_momentum=1 - numbers.momentum,
            step_size=rate,
            gradient_scale=gradient_scale,
        )
    of_adamw = scalars(
        step,
        beta1=beta1,
        beta2=beta2,
        epsilon=numbers.epsilon,
        weight_decay=numbers.weight_decay,
        gradient_scale=gradient_scale,
    )
    return _native.AdamWScalars(**of_adamw)


class Native:
    """One parameter in the record of a rule and layout."""

    def __init__(self, rule: RuleName, layout: Layout, weight: torch.Tensor, *, isa: str) -> None:
        self.rule: RuleName = rule
        self.layout: Layout = layout
        self._isa = isa
        size = weight.numel()
        self.fields = {
            each.name: torch.zeros(each.num_values(size), dtype=each.dtype) for each in fields_of(rule, layout)
        }
        if layout == "bfloat16":
            ends = (self.fields["hi16"], self.fields["lo16"])
            if rule == "adamw":
                _native.split_bfloat16(weight, *ends, self.fields["v32"], isa=isa)
            else:
                _native.split_tied_bfloat16(weight, *ends, self.fields["tie8"], isa=isa)
        elif layout == "stochastic":
            self.fields["p16"].copy_(weight)
        else:
            self.fields["w32"].copy_(weight)
        if "m8" in self.fields:
            self.fields["m8"].fill_(127)
            assert self.fields["m_scale"].numel() == -(-size // UNIT)

    def step(self, gradient: torch.Tensor, scalars: AnyScalars, *, rounding: tuple[int, int] = (0, 0)) -> None:
        """One update. `rounding`: key and first element, of the stochastic layout alone."""
        given = (direction_of(gradient), gradient) if self.rule == "muon" else (gradient,)
        roundings = [rounding] if self.layout == "stochastic" else []
        kernel(self.rule, self.layout)(
            *self.fields.values(), *given, scalars=scalars, roundings=roundings, isa=self._isa
        )

    @property
    def master(self) -> torch.Tensor:
        """The fp32 master."""
        if self.layout == "stochastic":
            return self.fields["p16"].float()
        if self.layout != "bfloat16":
            return self.fields["w32"]
        hi16, lo16 = self.fields["hi16"], self.fields["lo16"]
        joined = torch.empty(hi16.numel())
        if self.rule == "adamw":
            _native.join_bfloat16(hi16, lo16, self.fields["v32"], joined, isa=self._isa)
        else:
            _native.join_tied_bfloat16(hi16, lo16, self.fields["tie8"], joined, isa=self._isa)
        return joined

    @property
    def compute(self) -> torch.Tensor:
        """The weight that a model computes with."""
        return next(iter(self.fields.values()))


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.dtype == torch.uint8:
        assert torch.equal(actual, expected), f"{what}: {int((actual != expected).sum())} differ"
    else:
        assert_same_bits(actual, expected, what)


def assert_equal_states(native: Native, reference: Reference, what: str) -> None:
    """Weight, moments, and the weight that a model computes with."""
    assert_same(native.master, reference.weight.detach(), f"{what}, weight")
    for name, expected in reference.moments.items():
        found = native.fields[name]
        has_signs = name == "v32" and native.layout == "bfloat16"
        assert_same(found.abs() if has_signs else found, expected, f"{what}, {name}")
    if native.layout != "float32":
        assert_same(native.compute, reference.weight.detach().to(native.compute.dtype), f"{what}, compute weight")
