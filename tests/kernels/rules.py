"""The update rules in plain PyTorch, as the oracles of the kernels, and the arrays of each rule's record.

Invariant: nothing here uses the kernels. A rule's reference is torch's own optimizer where there is one; Lion's is the
code of its authors, that of 8-bit moments what `docs/store-format.md` says. Muon's is what `torch.optim.Muon` does
element by element, along any direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Layout = Literal["bfloat16", "stochastic", "float32", "float16"]
LAYOUTS: tuple[Layout, ...] = ("bfloat16", "stochastic", "float32", "float16")
RuleName = Literal["adamw", "adamw_8bit", "lion", "sgd", "sgd_momentum", "muon"]
UNIT = 256
PAGE_BYTES = 4096
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class FieldOf:
    """One array of a record."""

    name: str
    dtype: torch.dtype
    per: int = 1

    def num_values(self, count: int, *, whole_pages: bool = False) -> int:
        """Values for `count` elements; of fields with less than two bytes an element up to the end of a page."""
        number = -(-count // self.per)
        if whole_pages and self.dtype.itemsize < 2 * self.per:
            per_page = PAGE_BYTES // self.dtype.itemsize
            number = -(-number // per_page) * per_page
        return number


_M32, _V32, _W32 = (FieldOf(name, torch.float32) for name in ("m32", "v32", "w32"))
_HALVES = (FieldOf("hi16", torch.bfloat16), FieldOf("lo16", torch.int16))
_TIES = FieldOf("tie8", torch.uint8, 8)
_BYTES = (
    FieldOf("m8", torch.uint8),
    FieldOf("v8", torch.uint8),
    FieldOf("m_scale", torch.float32, UNIT),
    FieldOf("v_scale", torch.float32, UNIT),
)
_MOMENTS: dict[RuleName, tuple[FieldOf, ...]] = {
    "adamw": (_M32, _V32),
    "adamw_8bit": _BYTES,
    "lion": (_M32,),
    "sgd": (),
    "sgd_momentum": (_M32,),
    "muon": (_M32,),
}
RULES = tuple(_MOMENTS)


def fields_of(rule: RuleName, layout: Layout) -> tuple[FieldOf, ...]:
    """Those of a rule's record, in their order."""
    halves = _HALVES if rule == "adamw" else (*_HALVES, _TIES)
    weights = {
        "bfloat16": halves,
        "stochastic": (FieldOf("p16", torch.bfloat16),),
        "float32": (_W32,),
        "float16": (FieldOf("w16", torch.float16), _W32),
    }
    return (*weights[layout], *_MOMENTS[rule])


# The dynamic maps, from their definition.


@cache
def signed_map() -> torch.Tensor:
    """The values of the codes of m, fp32."""
    positive = _positive(parts_of_first=1)
    return torch.cat([-positive[:-1].flip(0), torch.zeros(1), positive])


@cache
def unsigned_map() -> torch.Tensor:
    """Those of v."""
    return torch.cat([torch.zeros(1), _positive(parts_of_first=2)])


def _positive(parts_of_first: int) -> torch.Tensor:
    """The middles of equal parts of each decade from 1e-7 to 1, twice as many in each, and 1."""
    found = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, (parts_of_first << decade) + 1)
        found.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    return torch.cat([*found, torch.ones(1)])


def quantised(values: torch.Tensor, values_of_codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, uint8, and the scale of each block of 256, fp32."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values, (0, -count % UNIT)).view(-1, UNIT)
    scales = blocks.abs().amax(1) if count else torch.zeros(0)
    scaled = blocks * (1.0 / scales.clamp(min=1e-38))[:, None]
    bounds = (values_of_codes[:-1] + values_of_codes[1:]) / 2
    return torch.bucketize(scaled.flatten()[:count].contiguous(), bounds).to(torch.uint8), scales


def restored(codes: torch.Tensor, scales: torch.Tensor, values_of_codes: torch.Tensor) -> torch.Tensor:
    """What codes and scales stand for, fp32."""
    return values_of_codes[codes.long()] * scales.repeat_interleave(UNIT)[: codes.numel()]


def random_halves(key: int, elements: torch.Tensor) -> torch.Tensor:
    """The 16 random bits of these elements of a parameter, int64, from its 64-bit key in an update."""

    def times(bits: torch.Tensor, factor: int) -> torch.Tensor:  # by halves, which do not overflow
        return ((bits >> 16) * factor % 2**16 * 2**16 + (bits & 0xFFFF) * factor) % 2**32

    bits = (elements & 0xFFFFFFFF) ^ (key & 0xFFFFFFFF)
    bits = times(bits ^ bits >> 17, 0xED5AD4BB)
    bits = times(((bits ^ bits >> 11) + (key >> 32) + (elements >> 32)) % 2**32, 0xAC4C1B51)
    bits = times(bits ^ bits >> 15, 0x31848BAB)
    return (bits ^ bits >> 14) >> 16


def rounded_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Each value as the bf16 towards zero, or the next one away from it: as often as it is near, in 2**-16."""
    word = values.view(torch.int32).long() & 0xFFFFFFFF
    truncated, rest = word >> 16, word & 0xFFFF
    found = truncated + (random >= 2**16 - rest).long()
    return torch.where(values.isnan(), 0x7FC0, found).to(torch.int32).to(torch.int16).view(torch.bfloat16)


@dataclass
class Numbers:
    """The settings of a rule, for all its updates."""

    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False


def direction_of(gradient: torch.Tensor) -> torch.Tensor:
    """Some direction, bf16, in an update by this gradient: what makes the right one is for other tests."""
    return gradient.float().flip(0).sin().bfloat16()


class Reference:
    """One fp32 parameter, updated in plain PyTorch. `moments` are named as in the record."""

    def __init__(self, rule: RuleName, weight: torch.Tensor, numbers: Numbers) -> None:
        self.numbers = numbers
        self._step = 0
        self.weight = weight.clone()
        size = weight.numel()
        zeros = {"m32": torch.zeros(size), "v32": torch.zeros(size)}
        self.moments = {each.name: zeros[each.name] for each in _MOMENTS[rule] if each.name in zeros}
        if rule == "adamw_8bit":
            number = -(-size // UNIT)
            self.moments = {
                "m8": torch.full((size,), 127, dtype=torch.uint8),
                "v8": torch.zeros(size, dtype=torch.uint8),
                "m_scale": torch.zeros(number),
                "v_scale": torch.zeros(number),
            }
        updates: dict[RuleName, Callable[[torch.Tensor], None]] = {
            "adamw": self._adamw,
            "adamw_8bit": self._adamw_8bit,
            "lion": self._lion,
            "sgd": self._sgd,
            "sgd_momentum": self._sgd,
            "muon": self._muon,
        }
        self._update = updates[rule]
        self._parameter = torch.nn.Parameter(self.weight)
        momentum = numbers.momentum if rule == "sgd_momentum" else 0.0
        self._torch_adamw = torch.optim.AdamW(
            [self._parameter],
            lr=LEARNING_RATE,
            betas=(numbers.beta1, numbers.beta2),
            eps=numbers.epsilon,
            weight_decay=numbers.weight_decay,
            foreach=False,
            fused=False,
        )
        self._torch_sgd = torch.optim.SGD(
            [self._parameter],
            lr=LEARNING_RATE,
            momentum=momentum,
            weight_decay=numbers.weight_decay,
            nesterov=numbers.nesterov and momentum > 0,
            foreach=False,
            fused=False,
        )

    def step(self, gradient: torch.Tensor) -> None:
        """One update by a gradient of any dtype."""
        self._step += 1
        self._update(gradient.float())

    def _adamw(self, gradient: torch.Tensor) -> None:
        self._parameter.grad = gradient
        self._torch_adamw.step()
        state = self._torch_adamw.state[self._parameter]
        self.moments = {"m32": state["exp_avg"], "v32": state["exp_avg_sq"]}

    def _adamw_8bit(self, gradient: torch.Tensor) -> None:
        numbers, moments, of_m, of_v = self.numbers, self.moments, signed_map(), unsigned_map()
        m = restored(moments["m8"], moments["m_scale"], of_m)
        v = restored(moments["v8"], moments["v_scale"], of_v)
        m.mul_(numbers.beta1).add_(gradient, alpha=1 - numbers.beta1)
        v.mul_(numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
        denominator = (v.sqrt() / (1 - numbers.beta2**self._step) ** 0.5).add_(numbers.epsilon)
        self.weight.mul_(1 - LEARNING_RATE * numbers.weight_decay)
        self.weight.addcdiv_(m, denominator, value=-LEARNING_RATE / (1 - numbers.beta1**self._step))
        moments["m8"], moments["m_scale"] = quantised(m, of_m)
        moments["v8"], moments["v_scale"] = quantised(v, of_v)

    def _lion(self, gradient: torch.Tensor) -> None:
        """As Lion's authors wrote it for torch."""
        numbers, m = self.numbers, self.moments["m32"]
        self.weight.mul_(1 - LEARNING_RATE * numbers.weight_decay)
        update = m * numbers.beta1 + gradient * (1 - numbers.beta1)
        self.weight.add_(update.sign_(), alpha=-LEARNING_RATE)
        m.mul_(numbers.beta2).add_(gradient, alpha=1 - numbers.beta2)

    def _muon(self, gradient: torch.Tensor) -> None:
        self.moments["m32"].lerp_(gradient, 1 - self.numbers.momentum)
        self.weight.mul_(1 - LEARNING_RATE * self.numbers.weight_decay)
        self.weight.add_(direction_of(gradient), alpha=-LEARNING_RATE)

    def _sgd(self, gradient: torch.Tensor) -> None:
        self._parameter.grad = gradient
        self._torch_sgd.step()
        if "m32" in self.moments:
            self.moments["m32"] = self._torch_sgd.state[self._parameter]["momentum_buffer"]
