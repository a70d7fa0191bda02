"""Runs units that are alike as one that was recorded, without recording them again.

Most units repeat one that came before: a layer on a micro-batch of the same shapes. What has to be noted of such a unit
is what differs: draws, offloaded outputs, attention's integers. A `Repeater` follows the template operator by operator
for that, in a third of the time that recording takes (scripts/bench/unit_python.py). Where there is nothing to note, an
`UnwatchedRepeater` runs the unit as plain PyTorch does.

Invariant: a unit that may take another course is not repeated. What a layer reads into Python may decide what it does
with its tensors, so layers with such operators (routers of experts) have no template.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ratel_cli.engine.replay.tape import (
    DETACH,
    OutputShape,
    Recorder,
    Tape,
    generator_of,
    has_only_shapes,
    never_unpack,
    without_values,
)
from ratel_cli.model.values.operators import OperatorMode, TorchOperator
from ratel_cli.planning.profile.liveness import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The tape of a unit that others will repeat."""

    funcs: tuple[TorchOperator, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[tuple[object, ...] | None, ...]
    """Outputs of each operator, as in `RecordedOperator`; None in place of what is of one call."""
    swapped_bytes: dict[int, int]
    """By position: bytes of the outputs that are offloaded."""
    drawing: frozenset[int]
    """Positions of random operators."""
    with_values: frozenset[int]
    """Positions of operators whose outputs are not only shapes."""
    mutates: bool
    """Whether an operator writes to its arguments."""

    @property
    def needs_watching(self) -> bool:
        """Whether something must be noted of a unit that repeats this."""
        return self.mutates or bool(self.swapped_bytes or self.drawing or self.with_values)


class Unrepeated(BaseException):  # so that no code of a model takes it for an error of its own
    """A unit did not repeat its template, and must be recorded."""


def template_of(recorder: Recorder, tape: Tape) -> Template | None:
    """What units repeat that are like the recorded one, whose tape this is; None if one might take another course."""
    if recorder.reads_values or any(operator.is_needed for operator in recorder.operators):
        return None
    swapped = [position for position, each in enumerate(tape.decisions) if each is Decision.SWAP]
    with_values = frozenset(position for position, each in enumerate(tape.outputs) if not has_only_shapes(each))
    outputs = tape.outputs
    if with_values:
        outputs = tuple(
            each if each is None else tuple(part if isinstance(part, OutputShape) else None for part in each)
            for each in tape.outputs
        )
    return Template(
        funcs=tape.funcs,
        decisions=tape.decisions,
        outputs=outputs,
        swapped_bytes={position: recorder.operators[position].output_bytes for position in swapped},
        drawing=frozenset(tape.random_states),
        mutates=any(func._schema.is_mutable for func in tape.funcs),
        with_values=with_values,
    )


class Repeater(OperatorMode):
    """Runs a forward pass that a template foresees, without saving activations. Use as a `Recorder`.

    Anything else than the template's operators, in their order and with their shapes, raises Unrepeated.
    """

    def __init__(self, template: Template, on_output: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`on_output`: as in `Recorder`."""
        super().__init__()
        self._template = template
        self._funcs, self._outputs = template.funcs, template.outputs
        self._on_output = on_output
        self._position = 0
        self._random_states: dict[int, torch.Tensor] = {}
        self._with_values: dict[int, tuple[object, ...]] = {}
        self._offloaded_outputs: dict[int, tuple[torch.Tensor, ...]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """See `Recorder`."""
        with _dropping_graph(), self:
            yield

    def finish(self) -> tuple[Tape, dict[int, tuple[torch.Tensor, ...]]]:
        """See `Recorder`."""
        if self._position != len(self._funcs):
            raise Unrepeated
        outputs = self._outputs
        if self._with_values:
            outputs = tuple(self._with_values.get(position, each) for position, each in enumerate(outputs))
        tape = Tape(
            funcs=self._funcs,
            decisions=self._template.decisions,
            outputs=outputs,
            random_states=self._random_states,
        )
        return tape, self._offloaded_outputs

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func is DETACH:
            return func(*args, **kwargs)
        position = self._position
        if position >= len(self._funcs) or self._funcs[position] is not func:
            raise Unrepeated
        self._position = position + 1
        if position in self._template.drawing:
            self._random_states[position] = generator_of(args, kwargs).get_state()
        result = func(*args, **kwargs)
        expected = self._outputs[position]
        if expected is not None:
            parts = result if isinstance(result, tuple | list) else (result,)
            if len(parts) != len(expected) or not all(map(_has_shape, parts, expected)):
                raise Unrepeated
            if position in self._template.with_values:
                self._with_values[position] = tuple(map(without_values, parts))
            if position in self._template.swapped_bytes:
                # Aliases, as in a `Recorder`.
                self._offloaded_outputs[position] = tuple(
                    part.detach() for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()
                )
                self._on_output(self._template.swapped_bytes[position])
        return result


class UnwatchedRepeater:
    """A `Repeater` for a template that does not need watching. Only the replay checks that the unit repeats it."""

    def __init__(self, template: Template) -> None:
        assert not template.needs_watching
        self._template = template

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """See `Recorder`."""
        with _dropping_graph():
            yield

    def finish(self) -> tuple[Tape, dict[int, tuple[torch.Tensor, ...]]]:
        """See `Recorder`."""
        template = self._template
        tape = Tape(funcs=template.funcs, decisions=template.decisions, outputs=template.outputs, random_states={})
        return tape, {}


AnyRecorder: TypeAlias = "Recorder | Repeater | UnwatchedRepeater"


def repeater_of(
    template: Template, on_output: Callable[[int], None] = lambda num_bytes: None
) -> Repeater | UnwatchedRepeater:
    """What runs the next unit like this. `on_output`: as in `Recorder`."""
    return Repeater(template, on_output) if template.needs_watching else UnwatchedRepeater(template)


@contextlib.contextmanager
def _dropping_graph() -> Iterator[None]:
    """A context in which autograd saves no tensor. Grad mode is on, as in a recording."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, never_unpack):
        yield


def _has_shape(part: object, expected: object) -> bool:
    if not isinstance(expected, OutputShape):
        return True
    return (
        isinstance(part, torch.Tensor)
        and part.shape == expected.size
        and part.dtype is expected.dtype
        and part.stride() == expected.stride
        and part.device == expected.device
    )


def _drop(_saved: torch.Tensor) -> None:
    return None
