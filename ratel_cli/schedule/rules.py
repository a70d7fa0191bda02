"""Update rules: what a block keeps for each parameter, and which parameters have which rule. Pure.

A rule has a record for each compute dtype: the fields that lie in the store, in their order, the compute weights (P16)
first. Everything else follows from the fields: their places and checksums (`ratel_cli/store/layout.py`), the bytes that
a step moves (`ratel_cli/planning`), and what the optimizer reads and writes. The kernels of a rule take the fields in
the order of the record, and repeat their names (`kernels/`, `ratel_cli/_native.pyi`);
`ratel_cli/engine/optimizer/settings.py` chooses one by rule and compute dtype.

Every rule keeps master weights (P32) in fp32, and its moments (OS32) as its fields say. For bf16 the master is split
into its upper and lower half. The upper half is the weight that the device computes with (P16), so no separate copy of
it exists. Rounding loses one bit, which the sign of AdamW's v carries, and one bit for each element (`tie8`) where
there is no v (docs/store-format.md). Or bf16 keeps no master at all: each rule has a twin with stochastic
rounding: the bf16 weight is the master. A frozen block keeps its compute weights alone, or the bytes of
quantised ones.

Most rules update each element by itself, so the optimizer walks through a block in groups of any size. One that needs
a matrix as a whole, such as Muon, gets each matrix as a block of its own, and updates it as one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from ratel_cli.sizes import WeightDtype
from ratel_cli.store.layout import Field, Record

HI16: Final = Field("hi16", "bfloat16")
"""The upper half of the master, rounded to nearest even."""
LO16: Final = Field("lo16", "int16")
TIE8: Final = Field("tie8", "uint8", per=8)
"""Bits: how a tie of the master was rounded. The lowest bit of a byte is that of its first element."""
P16: Final = Field("p16", "bfloat16")
"""The weight that the device computes with, where there is no master."""
W16: Final = Field("w16", "float16")
W32: Final = Field("w32", "float32")
"""The master."""
M32: Final = Field("m32", "float32")
V32: Final = Field("v32", "float32")
UNIT_8BIT: Final = 256
"""Elements of a parameter whose moments in 8 bit share a scale."""
M8: Final = Field("m8", "uint8")
V8: Final = Field("v8", "uint8")
M_SCALE: Final = Field("m_scale", "float32", per=UNIT_8BIT)
V_SCALE: Final = Field("v_scale", "float32", per=UNIT_8BIT)
LEAST_8BIT: Final = 4096
"""Elements of the smallest parameter whose moments are in 8 bit, as in bitsandbytes."""

OptimizerName = Literal["adamw", "adamw_8bit", "lion", "sgd", "muon"]
Bf16Master = Literal["fp32", "stochastic"]
"""What is kept of weights in bf16: an fp32 master, or the weight alone, to which updates are rounded stochastically."""
STOCHASTIC: Final = "_stochastic"
"""How the names end of rules that have no fp32 master in bf16."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the parameters of a block change in a step."""

    name: str
    records: tuple[tuple[WeightDtype, Record], ...]
    """By compute dtype: the fields of a block."""
    title: str = ""
    """Its name in the field's literature."""
    unit_elements: int = 1
    """Elements of a parameter that belong together: a parameter begins with a unit, and nothing cuts one."""
    relative_time: float = 1.0
    """How long its kernel takes an element, where AdamW's takes 1: the machine's rate is AdamW's. As measured in bf16
    with AVX2 (2-core EPYC, 2026-11)."""
    is_frozen: bool = False
    """True if nothing changes: such a block has no gradient, and lies in the store once for all generations."""
    takes_matrices: bool = False
    """True if an update needs a whole matrix: such a block has one parameter, and one group."""

    def record(self, dtype: WeightDtype) -> Record:
        """The fields of a block that computes in `dtype`."""
        return dict(self.records)[dtype]

    def without_master(self) -> Rule:
        """The rule's twin, which in bf16 has no master."""
        moments = [each for each in self.record("bfloat16").fields if each not in (HI16, LO16, TIE8)]
        records = {**dict(self.records), "bfloat16": Record((P16, *moments))}
        return replace(self, name=self.name + STOCHASTIC, records=tuple(records.items()))


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """Which rule each trained parameter of a model has."""

    main: Rule
    of_small: Rule
    """Rule of parameters with fewer elements than `least_elements`."""
    least_elements: int = 0
    of_embeddings: Rule | None = None
    """Rule of what is looked up; None: as of any other."""
    of_matrices: Rule | None = None
    """Rule of matrices that layers multiply by, looked-up ones left out; None: as of any other."""

    def of(self, shape: tuple[int, ...], *, is_embedding: bool = False, is_weight_of_layer: bool = False) -> Rule:
        """The rule of a parameter. `is_weight_of_layer`: a module's `weight`, of neither the first segment nor the
        last one. What has another name is a bias, or a table of some kind."""
        if is_embedding and self.of_embeddings is not None:
            return self.of_embeddings
        if self.of_matrices is not None and is_weight_of_layer and not is_embedding and len(shape) == 2:
            return self.of_matrices
        return self.main if math.prod(shape) >= self.least_elements else self.of_small

    def without_master(self) -> RuleChoice:
        """Return this choice among the rules' twins."""
        main, of_small, of_embeddings, of_matrices = (
            None if rule is None else rule.without_master()
            for rule in (self.main, self.of_small, self.of_embeddings, self.of_matrices)
        )
        assert main is not None and of_small is not None
        return RuleChoice(main, of_small, self.least_elements, of_embeddings, of_matrices)


def _records(*moments: Field, halves: tuple[Field, ...] = (HI16, LO16, TIE8)) -> tuple[tuple[WeightDtype, Record], ...]:
    """The records of a rule with these moments. `halves`: how bf16 keeps the master."""
    return (
        ("bfloat16", Record((*halves, *moments))),
        ("float32", Record((W32, *moments))),
        ("float16", Record((W16, W32, *moments))),
    )


ADAMW: Final = Rule("adamw", _records(M32, V32, halves=(HI16, LO16)), "AdamW")
ADAMW_8BIT: Final = Rule("adamw_8bit", _records(M8, V8, M_SCALE, V_SCALE), "8-bit AdamW", UNIT_8BIT, relative_time=2.5)
LION: Final = Rule("lion", _records(M32), "Lion", relative_time=0.5)
SGD: Final = Rule("sgd", _records(), "SGD", relative_time=0.4)
SGD_MOMENTUM: Final = Rule("sgd_momentum", _records(M32), "SGD with momentum", relative_time=0.5)
NEWTON_SCHULZ_STEPS: Final = 5
"""Steps of Muon's iteration (engine/optimizer/muon.py)."""
MUON: Final = Rule("muon", _records(M32), "Muon", relative_time=0.5, takes_matrices=True)
FROZEN: Final = Rule(
    "frozen",
    (
        ("bfloat16", Record((Field("frozen", "bfloat16"),))),
        ("float32", Record((Field("frozen", "float32"),))),
        ("float16", Record((Field("frozen", "float16"),))),
        ("uint8", Record((Field("frozen", "uint8"),))),
    ),
    is_frozen=True,
)
_WITH_MASTER: Final = (ADAMW, ADAMW_8BIT, LION, SGD, SGD_MOMENTUM, MUON)
RULES: Final = {rule.name: rule for rule in (*_WITH_MASTER, *(each.without_master() for each in _WITH_MASTER), FROZEN)}
ALL_ADAMW: Final = RuleChoice(ADAMW, ADAMW)
_CHOICES: Final[Mapping[str, RuleChoice]] = {
    "adamw": ALL_ADAMW,
    # Gradients of embeddings are too uneven for 8 bit: transformers' Trainer keeps their moments in fp32, too.
    "adamw_8bit": RuleChoice(ADAMW_8BIT, ADAMW, LEAST_8BIT, of_embeddings=ADAMW),
    "lion": RuleChoice(LION, LION),
    "sgd": RuleChoice(SGD, SGD),
    "muon": RuleChoice(ADAMW, ADAMW, of_matrices=MUON),  # its authors leave embeddings, heads and vectors to AdamW
}


def rules_of(optimizer: OptimizerName, *, has_momentum: bool = False, bf16_master: Bf16Master = "fp32") -> RuleChoice:
    """The rules of an optimizer. `has_momentum`: of `sgd`, whether it keeps a sum of the gradients."""
    found = _CHOICES[optimizer]
    if optimizer == "sgd" and has_momentum:
        found = RuleChoice(SGD_MOMENTUM, SGD_MOMENTUM)
    return found if bf16_master == "fp32" else found.without_master()
