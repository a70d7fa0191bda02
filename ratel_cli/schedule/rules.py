"""Update rules: what a block keeps for each parameter, and which parameters have which rule. Pure.

A rule is one value: its fields, what it updates as one, and its update. It has a record for each compute dtype: the
fields that lie in the store, in their order, the compute weights (P16) first. Everything else follows from the fields:
their places and checksums (`ratel_cli/store/layout.py`), the bytes that a step moves (`ratel_cli/planning`), and what
the optimizer reads and writes. An update is a function in torch (`ratel_cli/schedule/updates.py`), or a kernel. The
kernels of a rule take the fields in the order of the record, and repeat their names (`kernels/`,
`ratel_cli/_native.pyi`); `ratel_cli/engine/optimizer/settings.py` chooses one by rule and compute dtype.

Every rule keeps master weights (P32) in fp32, and its moments (OS32) as its fields say. For bf16 the master is split
into its upper and lower half. The upper half is the weight that the device computes with (P16), so no separate copy of
it exists. Rounding loses one bit, which the sign of AdamW's v carries, and one bit for each element (`tie8`) where
there is no v (docs/store-format.md). Or bf16 keeps no master at all: each rule has a twin with stochastic
rounding: the bf16 weight is the master. A frozen block keeps its compute weights alone, or the bytes of
quantised ones.

Most rules update each element by itself, so the optimizer walks through a block in groups of any size. One that needs
whole parameters updates a block as one group, which one rank has. If it needs matrices, as Muon does, or keeps vectors,
as one with a value for each row and each column does, each parameter is a block of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from ratel_cli.schedule.muon import ORTHOGONAL
from ratel_cli.schedule.updates import Directed, InTorch
from ratel_cli.sizes import ValueType, WeightDtype
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

WEIGHT_FIELDS: Final = (HI16, LO16, TIE8, P16, W16, W32)
"""What a rule has of the weights themselves. All its other fields are its moments."""

Bf16Master = Literal["fp32", "stochastic"]
"""What is kept of weights in bf16: an fp32 master, or the weight alone, to which updates are rounded stochastically."""
STOCHASTIC: Final = "_stochastic"
"""How the names end of rules that have no fp32 master in bf16."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A field with fewer values than its parameter: one for each row, for each column, or one in all.

    A row is what the last dimension counts, a column what the one before counts, of each matrix of a stack.
    """

    name: str
    of_each: Literal["row", "column", "parameter"]
    dtype: ValueType = "float32"

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape for a parameter of this shape."""
        return {"row": parameter[:-1], "column": (*parameter[:-2], *parameter[-1:]), "parameter": ()}[self.of_each]


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
    """How long its update takes an element, where AdamW's takes 1: the machine's rate is AdamW's. As measured in bf16
    with AVX2 (2-core EPYC, 2026-11). An update in torch must say it: plans would be too short."""
    is_frozen: bool = False
    """True if nothing changes: such a block has no gradient, and lies in the store once for all generations."""
    update: InTorch | Directed | None = None
    """What torch computes; None: nothing, a kernel does it all."""
    takes_whole: bool = False
    """True if an update needs whole parameters: such a block is one group, and one rank has all of it."""
    vectors: tuple[Vector, ...] = ()
    """Fields behind those of the record."""

    @property
    def stands_alone(self) -> bool:
        """Whether each parameter is a block of its own."""
        return bool(self.vectors) or isinstance(self.update, Directed)

    def record(self, dtype: WeightDtype, parameter: tuple[int, ...] | None = None) -> Record:
        """The fields of a block that computes in `dtype`. `parameter`: the shape of its parameter; None: without
        vectors."""
        found = dict(self.records)[dtype]
        if parameter is None or not self.vectors:
            return found
        vectors = (Field(each.name, each.dtype, fixed=math.prod(each.shape(parameter))) for each in self.vectors)
        return Record((*found.fields, *vectors))

    def without_master(self) -> Rule:
        """The rule's twin, which in bf16 has no master."""
        moments = [each for each in self.record("bfloat16").fields if each not in (HI16, LO16, TIE8)]
        records = {**dict(self.records), "bfloat16": Record((P16, *moments))}
        return replace(self, name=self.name + STOCHASTIC, records=tuple(records.items()))


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """A parameter, as a choice of rules sees it."""

    shape: tuple[int, ...]
    is_embedding: bool = False
    """Whether rows of it are looked up."""
    is_weight_of_layer: bool = False
    """Whether it is a module's `weight`, of neither the first segment nor the last one. What has another name is a
    bias, or a table of some kind."""


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """Which rule each trained parameter of a model has."""

    main: Rule
    others: tuple[tuple[Callable[[ParameterKind], bool], Rule], ...] = ()
    """The first of these that takes a parameter has it, before the main rule."""

    def of(self, kind: ParameterKind) -> Rule:
        """The rule of a parameter."""
        return next((rule for takes, rule in self.others if takes(kind)), self.main)

    def without_master(self) -> RuleChoice:
        """Return this choice among the rules' twins."""
        others = tuple((takes, rule.without_master()) for takes, rule in self.others)
        return RuleChoice(self.main.without_master(), others)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules of the choice, the main one first."""
        return (self.main, *(rule for _, rule in self.others))


def records(*moments: Field, halves: tuple[Field, ...] = (HI16, LO16, TIE8)) -> tuple[tuple[WeightDtype, Record], ...]:
    """The records of a rule with these moments. `halves`: how bf16 keeps the master."""
    return (
        ("bfloat16", Record((*halves, *moments))),
        ("float32", Record((W32, *moments))),
        ("float16", Record((W16, W32, *moments))),
    )


ADAMW: Final = Rule("adamw", records(M32, V32, halves=(HI16, LO16)), "AdamW")
ADAMW_8BIT: Final = Rule("adamw_8bit", records(M8, V8, M_SCALE, V_SCALE), "8-bit AdamW", UNIT_8BIT, relative_time=2.5)
LION: Final = Rule("lion", records(M32), "Lion", relative_time=0.5)
SGD: Final = Rule("sgd", records(), "SGD", relative_time=0.4)
SGD_MOMENTUM: Final = Rule("sgd_momentum", records(M32), "SGD with momentum", relative_time=0.5)
MUON: Final = Rule("muon", records(M32), "Muon", relative_time=0.5, update=ORTHOGONAL, takes_whole=True)
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


def _is_small_or_embedding(kind: ParameterKind) -> bool:
    """Gradients of embeddings are too uneven for 8 bit: transformers' Trainer keeps their moments in fp32, too."""
    return kind.is_embedding or math.prod(kind.shape) < LEAST_8BIT


def _is_matrix_of_layer(kind: ParameterKind) -> bool:
    """Muon's authors leave embeddings, heads and vectors to AdamW."""
    return kind.is_weight_of_layer and not kind.is_embedding and len(kind.shape) == 2


ALL_ADAMW: Final = RuleChoice(ADAMW)
CHOICES: Final = {
    "adamw": ALL_ADAMW,
    "adamw_8bit": RuleChoice(ADAMW_8BIT, ((_is_small_or_embedding, ADAMW),)),
    "lion": RuleChoice(LION),
    "sgd": RuleChoice(SGD),
    "sgd with momentum": RuleChoice(SGD_MOMENTUM),
    "muon": RuleChoice(ADAMW, ((_is_matrix_of_layer, MUON),)),
}
"""By the name of an optimizer: its rules. Their twins without a master follow."""


def rules_by_name() -> dict[str, Rule]:
    """All rules that a block may have."""
    choices = [*CHOICES.values(), *(each.without_master() for each in CHOICES.values())]
    return {rule.name: rule for rule in (FROZEN, *(rule for each in choices for rule in each.rules))}


def rules_of(optimizer: str, *, has_momentum: bool = False, bf16_master: Bf16Master = "fp32") -> RuleChoice:
    """The rules of an optimizer. `has_momentum`: of `sgd`, whether it keeps a sum of the gradients."""
    found = CHOICES[f"{optimizer} with momentum" if optimizer == "sgd" and has_momentum else optimizer]
    return found if bf16_master == "fp32" else found.without_master()
