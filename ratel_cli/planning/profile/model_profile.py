"""What a model's layers cost, operator by operator. Pure.

A profile is recorded in a step that swaps nothing, or estimated from shapes. All numbers are for one full micro-batch.
Seconds are those of as many tokens in rows as long as the data's: short rows take more for each token.
Layers that are alike share one profile.

Invariant: a layer's candidates come with the greatest benefit first. What each one saves is counted with those before
it swapped already, so that the savings of a prefix add up.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Literal, Self, TypeVar

from ratel_cli.json_fields import JsonFields, read_as

FORMAT_VERSION = 8
Source = Literal["analytic", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCandidate:
    """An operator whose output may be offloaded in forward and fetched in backward, instead of being recomputed."""

    operator: str
    """The name that people read: the module's path within the layer and the operator, `mlp.up_proj mm`."""
    key: str
    """For the engine: the operator and how many calls of it came before in the layer, `aten.mm.default#5`. Empty in an
    estimate."""
    num_bytes: int
    """Bytes of its outputs, less those of candidates before it that need not be offloaded any more."""
    flops: int
    """FLOPs that need not be recomputed any more."""
    seconds: float | None = None
    """Measured seconds of recomputation that are saved; None if not measured."""
    saved_bytes: int = 0
    """The part of `num_bytes` that autograd saves: `LayerProfile.backward_bytes` counts it, swapped or not."""
    held_bytes: int = 0
    """The part of `num_bytes` that `LayerProfile.forward_held_bytes` counts, swapped or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestCosts:
    """Backward of a layer from the gradient of one parameter on."""

    after: str
    """The parameter's name within the layer."""
    num_bytes: int
    """What activations take at most from then on, counted as in `LayerProfile.backward_bytes`."""
    flops: int
    """FLOPs of backward from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One decoder layer and one micro-batch. Seconds are None if they were not measured."""

    input_bytes: int
    """The input [batch, tokens, hidden_size]; always offloaded, since all else can be recomputed from it (the papers'
    A_interBlock)."""
    saved_bytes: int
    """Everything that autograd would save, the input included (the papers' A_all)."""
    forward_bytes: int
    """What activations take at the peak of forward, which saves nothing; the layer's input is not counted."""
    forward_held_bytes: int
    """What activations take at the peak of forward if the results of all products, and of attention, stay to the end,
    as swapped outputs do."""
    backward_bytes: int
    """What activations take at the peak of backward, next to the layer's input: what autograd saves, swapped or
    recomputed, and gradients of activations."""
    making_bytes: int
    """Peak of backward's activations while the gradient of a weight is made, counted as in `backward_bytes`."""
    replay_bytes: int
    """What activations take at the peak of recomputing, next to the unit, if that is the layer's input alone."""
    replay_held_bytes: int
    """Peak of recomputing with all that autograd saves there from the beginning, as swapped outputs are."""
    flops_forward: int
    flops_recomputed: int
    """FLOPs that backward recomputes when nothing but the input is offloaded; dead work is left out."""
    candidates: tuple[SwapCandidate, ...]
    rests: tuple[RestCosts, ...] = ()
    """Where backward begins to take less, in its order."""
    frozen_flops: int = 0
    """What backward leaves out of twice the FLOPs of forward: gradients of matrices that are frozen, or all of it."""
    forward_moved_bytes: int = 0
    """Bytes that forward moves in the device's memory besides products, as far as they are known."""
    backward_moved_bytes: int = 0
    """Bytes that backward moves in the device's memory besides products and what it recomputes, as far as they are
    known."""
    forward_seconds: float | None = None
    recomputed_seconds: float | None = None
    backward_seconds: float | None = None
    """Recomputation not included."""

    @property
    def flops_backward(self) -> int:
        """Recomputation not included."""
        return 2 * self.flops_forward - self.frozen_flops

    def forward_only(self) -> LayerProfile:
        """Return the costs of a layer that backward does not reach: nothing is kept for it."""
        return replace(
            self,
            input_bytes=0,
            saved_bytes=0,
            backward_bytes=0,
            making_bytes=0,
            replay_bytes=0,
            replay_held_bytes=0,
            flops_recomputed=0,
            candidates=(),
            rests=(),
            frozen_flops=2 * self.flops_forward,
            backward_moved_bytes=0,
            recomputed_seconds=None if self.recomputed_seconds is None else 0.0,
            backward_seconds=None if self.backward_seconds is None else 0.0,
        )

    def timed_by(self, other: LayerProfile) -> LayerProfile:
        """This layer with another one's seconds. Operators keep their shares of what is recomputed."""
        share = (other.recomputed_seconds or 0.0) / self.recomputed_seconds if self.recomputed_seconds else 1.0
        return replace(
            self,
            forward_seconds=other.forward_seconds,
            recomputed_seconds=other.recomputed_seconds,
            backward_seconds=other.backward_seconds,
            candidates=tuple(
                replace(each, seconds=None if each.seconds is None else share * each.seconds)
                for each in self.candidates
            ),
        )


_Costs = TypeVar("_Costs", "ModelProfile", LayerProfile, SwapCandidate, RestCosts)
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The layers of a model, and what is before and after them."""

    source: Source
    profiles: tuple[LayerProfile, ...]
    """One for each kind of layer."""
    layers: tuple[int, ...]
    """For each layer, in forward order, its place in `profiles`."""
    micro_batch_tokens: int
    sequence_len: int
    flops_head: int
    """Forward of the final norm and the head."""
    norm_held_bytes: int
    """What activations of the final norm take while the head runs; the norm's input is not counted."""
    norm_bytes: int
    """What they take at the peak of its forward or backward."""
    embedding_seconds: float | None = None
    """Forward and backward."""
    head_seconds: float | None = None
    """Forward and backward, and the loss."""
    frozen_head_flops: int = 0
    """`LayerProfile.frozen_flops` of the final norm and the head."""
    head_moved_bytes: int = 0
    """Bytes that forward and backward of the final norm and the loss move, besides products."""
    adamw_share: float | None = None
    """Where the CPU computes: seconds of computing that are lost to a second of AdamW on one thread. None if that was
    not measured."""

    def of_tokens(self, micro_batch_tokens: int) -> ModelProfile:
        """The profile of a micro-batch of this many tokens: all bytes, FLOPs and seconds grow with its rows."""
        if micro_batch_tokens == self.micro_batch_tokens:
            return self
        share = Fraction(micro_batch_tokens, self.micro_batch_tokens)
        profiles = (
            replace(
                _scaled(layer, share),
                candidates=tuple(_scaled(each, share) for each in layer.candidates),
                rests=tuple(_scaled(each, share) for each in layer.rests),
            )
            for layer in self.profiles
        )
        scaled = replace(_scaled(self, share), sequence_len=self.sequence_len, adamw_share=self.adamw_share)
        return replace(scaled, profiles=tuple(profiles))

    def timed_by(self, other: ModelProfile) -> ModelProfile:
        """This profile with the seconds of another one of the same model and as many tokens."""
        pairs = list(zip(self.layers, other.layers, strict=True))
        number_of = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        return replace(
            self,
            profiles=tuple(self.profiles[own].timed_by(other.profiles[its]) for own, its in number_of),
            layers=tuple(number_of[pair] for pair in pairs),
            embedding_seconds=other.embedding_seconds,
            head_seconds=other.head_seconds,
        )

    def to_json(self) -> dict[str, object]:
        """A part of `run/model.json`."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The profile that `to_json` gave this content for. Raises ValueError."""
        if JsonFields(content).integer("format_version") != FORMAT_VERSION:
            raise ValueError("made by another version")
        found = read_as(cls, content)
        if not set(found.layers) <= set(range(len(found.profiles))):
            raise ValueError("layers without a profile")
        return found


def _scaled(costs: _Costs, share: Fraction) -> _Costs:
    """Return the costs with this share of their bytes, FLOPs and seconds."""
    names = [each.name for each in fields(costs) if isinstance(getattr(costs, each.name), int | float)]
    return replace(costs, **{name: _share_of(getattr(costs, name), share) for name in names})


def _share_of(number: _Number, share: Fraction) -> _Number:
    """Bytes and FLOPs are rounded up."""
    return math.ceil(share * number) if isinstance(number, int) else float(share) * number
