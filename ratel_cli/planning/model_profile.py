"""What a model's layers cost, operator by operator: recorded in a step that swaps nothing, or estimated from shapes.

`estimate.analytic` estimates one, `recorded` makes one from what the engine noted; `swap` chooses
from it what to swap. Pure. All numbers are for one micro-batch, and layers that are alike share one profile.

Invariant: a layer's candidates come with the greatest benefit first; what each saves is counted with those
before it swapped already, so that the savings of a prefix add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self

FORMAT_VERSION = 1
Source = Literal["analytic", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCandidate:
    """An operator whose output may be swapped out in forward and fetched in backward, in place of running again."""

    operator: str
    """For people: the module's path within the layer and the operator, `mlp.up_proj mm`."""
    key: str
    """For the engine: the operator and calls of it before in the layer: `aten.mm.default#5`. Empty in an estimate."""
    num_bytes: int
    """Of its outputs, less those of candidates before it that need not be offloaded any more."""
    flops: int
    """What need not be recomputed any more."""
    seconds: float | None = None
    """The time of that, where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One decoder layer and one micro-batch."""

    input_bytes: int
    """Always swapped: all else can be recomputed from it (the papers' A_interBlock)."""
    saved_bytes: int
    """All that autograd would keep, the input included (the papers' A_all)."""
    flops_forward: int
    flops_recomputed: int
    """With nothing but the input swapped; dead work is left out."""
    candidates: tuple[SwapCandidate, ...]
    forward_seconds: float | None = None
    recomputed_seconds: float | None = None
    backward_seconds: float | None = None
    """Recomputation not included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The layers of a model, and what is before and after them."""

    source: Source
    profiles: tuple[LayerProfile, ...]
    """Those that differ."""
    layers: tuple[int, ...]
    """For each layer, in forward order, its place in `profiles`."""
    micro_batch_tokens: int
    sequence_len: int
    flops_head: int
    """Forward, final norm and head, one micro-batch."""
    embedding_seconds: float | None = None
    """Forward and backward."""
    head_seconds: float | None = None
    """Forward and backward, and the loss."""

    def to_json(self) -> dict[str, object]:
        """A part of `run/model.json`."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """What `to_json` gave. Raises ValueError."""
        row = _Row(content)
        if row.integer("format_version") != FORMAT_VERSION:
            raise ValueError("made by another version")
        sources: dict[str, Source] = {"analytic": "analytic", "recorded": "recorded"}
        if row.text("source") not in sources:
            raise ValueError(f"source is {row.text('source')!r}")
        profiles = tuple(_layer(item) for item in row.items("profiles"))
        layers = tuple(row.integers("layers"))
        if not set(layers) <= set(range(len(profiles))):
            raise ValueError("layers without a profile")
        return cls(
            source=sources[row.text("source")],
            profiles=profiles,
            layers=layers,
            micro_batch_tokens=row.integer("micro_batch_tokens"),
            sequence_len=row.integer("sequence_len"),
            flops_head=row.integer("flops_head"),
            embedding_seconds=row.seconds("embedding_seconds"),
            head_seconds=row.seconds("head_seconds"),
        )


def _layer(content: object) -> LayerProfile:
    row = _Row(content)
    return LayerProfile(
        input_bytes=row.integer("input_bytes"),
        saved_bytes=row.integer("saved_bytes"),
        flops_forward=row.integer("flops_forward"),
        flops_recomputed=row.integer("flops_recomputed"),
        candidates=tuple(_candidate(item) for item in row.items("candidates")),
        forward_seconds=row.seconds("forward_seconds"),
        recomputed_seconds=row.seconds("recomputed_seconds"),
        backward_seconds=row.seconds("backward_seconds"),
    )


def _candidate(content: object) -> SwapCandidate:
    row = _Row(content)
    return SwapCandidate(
        operator=row.text("operator"),
        key=row.text("key"),
        num_bytes=row.integer("num_bytes"),
        flops=row.integer("flops"),
        seconds=row.seconds("seconds"),
    )


class _Row:
    """Typed access to a JSON object; raises ValueError naming the key."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ValueError("expected an object")
        self._values: Mapping[str, object] = values

    def integer(self, key: str) -> int:
        return _checked_integer(self._value(key), key)

    def integers(self, key: str) -> list[int]:
        return [_checked_integer(item, key) for item in self.items(key)]

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise ValueError(f"{key} is not a text")
        return value

    def seconds(self, key: str) -> float | None:
        """None if they were not measured."""
        value = self._value(key)
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{key} is not a number")
        return value

    def items(self, key: str) -> Sequence[object]:
        value = self._value(key)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{key} is not a list")
        return value

    def _value(self, key: str) -> object:
        if key not in self._values:
            raise ValueError(f"{key} is missing")
        return self._values[key]


def _checked_integer(value: object, name: str) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{name} is not a whole number")
    return value
