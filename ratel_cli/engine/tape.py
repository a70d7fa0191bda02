"""Record a block's forward pass, then replay it in backward with as little work as possible.

`engine.step` runs each block's forward under a `Recorder`, which drops everything that autograd
wants to keep and notes, operator by operator, what would be needed. The resulting `Tape` is tiny.
In backward the block runs again under a `Replayer`: this rebuilds the autograd graph, and every
operator gets one of the decisions below. (Ratel §IV-D swaps or recomputes per operator; SWAP takes
its place in `Decision` when the plan that chooses it exists.)

    EXEC  run it again
    DEAD  nothing that autograd saved depends on its output: return an uninitialised tensor of the
          same shape (the last matrix product and residual add of every layer, for a start)

Invariants: (1) the replay meets the recorded operators in the recorded order, or it stops with an
error, never with wrong gradients; (2) random operators draw what they drew when recorded; (3) no
autograd graph outlives `Recorder`: its saved tensors are never stored.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ratel_cli.errors import RatelError
from ratel_cli.model.dispatch import Operator, tensors_in

_DETACH = torch.ops.aten.detach.default
"""Not an operator of the model: autograd calls it to save an output, unless hooks are there to take it."""


class Decision(enum.Enum):
    """What the replay does with one operator."""

    EXEC = enum.auto()
    DEAD = enum.auto()


@dataclass(frozen=True, slots=True)
class OutputShape:
    """All that is known of a tensor that will not be computed."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor. Its pages are never touched, so on the CPU it takes no memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Operator:
    """One recorded call: which storages it read and wrote, as serial numbers."""

    func: Operator
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: tuple[OutputShape, ...] | None
    """None where the operator must run: views, mutations, results that steer Python."""
    random_state: torch.Tensor | None
    needed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """What a block's forward did, and what of it the backward pass has to do again."""

    funcs: tuple[Operator, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[tuple[OutputShape, ...] | None, ...]
    random_states: dict[int, torch.Tensor]
    """State of the generator before each random operator, by position."""


class Recorder(TorchDispatchMode):
    """Runs a forward pass without keeping activations. Use as a context; then call `tape()`."""

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """`parameters`, and what shares their storage, do not count as activations."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._not_counted = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._operators: list[_Operator] = []
        self._serials: dict[int, int] = {}
        self._num_serials = 0
        self._saved: set[int] = set()
        self.saved_bytes = 0
        """What autograd would have kept of the forward, storages once, parameters not counted."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Grad mode stays on: without it some models run other operators, and attention drops its logsumexp."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._note_saved, _never_unpack), self:
            yield

    def tape(self) -> Tape:
        """Decide for every operator, from the last to the first, whether anything saved depends on it."""
        needed = set(self._saved)
        decisions: list[Decision] = []
        for operator in reversed(self._operators):
            alive = operator.needed or not needed.isdisjoint(operator.writes)
            if alive:
                needed.update(operator.reads)
            decisions.append(Decision.EXEC if alive or operator.outputs is None else Decision.DEAD)
        decisions.reverse()
        return Tape(
            funcs=tuple(operator.func for operator in self._operators),
            decisions=tuple(decisions),
            outputs=tuple(operator.outputs for operator in self._operators),
            random_states={
                position: operator.random_state
                for position, operator in enumerate(self._operators)
                if operator.random_state is not None
            },
        )

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is _DETACH:
            return func(*args, **kwargs)
        reads = self._serials_of(tensors_in((args, kwargs)))
        random_state = _random_state(func, args)
        result = func(*args, **kwargs)
        self._operators.append(self._describe(func, reads, result, random_state))
        return result

    def _describe(
        self, func: Operator, reads: tuple[int, ...], result: object, random_state: torch.Tensor | None
    ) -> _Operator:
        tensors = tensors_in(result)
        mutable = func._schema.is_mutable
        if func.is_view and not mutable:
            return _Operator(func, reads, (), None, None, False)
        if not mutable:
            # A fresh output: its storage may have the address of one that was freed, so it gets a new number.
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if self._serials.get(key) not in reads:
                    self._serials[key] = self._next_serial()
        writes = self._serials_of(tensors)
        if mutable:
            writes = writes + reads
        # Integers and booleans index, route and branch, and Python reads them past the dispatcher (tolist);
        # inside a custom autograd function grad mode is off and what it keeps for itself is not seen.
        steers = not tensors or any(not tensor.is_floating_point() for tensor in tensors)
        needed = steers or not torch.is_grad_enabled()
        shapes = None
        if not (needed or mutable):
            shapes = tuple(OutputShape(t.size(), t.stride(), t.dtype, t.device) for t in tensors)
        return _Operator(func, reads, writes, shapes, random_state, needed)

    def _serials_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        serials = []
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._serials:
                self._serials[key] = self._next_serial()
            serials.append(self._serials[key])
        return tuple(serials)

    def _next_serial(self) -> int:
        self._num_serials += 1
        return self._num_serials

    def _note_saved(self, tensor: torch.Tensor) -> None:
        (serial,) = self._serials_of((tensor,))
        if serial not in self._saved:
            self._saved.add(serial)
            storage = tensor.untyped_storage()
            if storage._cdata not in self._not_counted:
                self.saved_bytes += storage.nbytes()


class Replayer(TorchDispatchMode):
    """Runs the recorded forward again, doing only what its tape decided. Use as a context."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._position = 0

    def check_complete(self) -> None:
        """Raise unless every recorded operator was met."""
        if self._position != len(self._tape.funcs):
            raise _not_repeated(self._position, "the end", self._tape.funcs[self._position])

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is _DETACH:
            return func(*args)
        position, tape = self._position, self._tape
        if position >= len(tape.funcs) or tape.funcs[position] is not func:
            recorded = tape.funcs[position] if position < len(tape.funcs) else "the end"
            raise _not_repeated(position, func, recorded)
        self._position = position + 1
        if tape.decisions[position] is Decision.DEAD:
            shapes = tape.outputs[position]
            assert shapes is not None
            tensors = tuple(shape.empty() for shape in shapes)
            return tensors[0] if len(tensors) == 1 else tensors
        state = tape.random_states.get(position)
        if state is not None:
            _generator(args).set_state(state)
        return func(*args, **(kwargs or {}))


def _not_repeated(position: int, now: object, recorded: object) -> RatelError:
    return RatelError(
        f"the forward pass did not repeat itself: operator {position} was {recorded}, now it is {now}",
        "a model whose forward depends on anything but its inputs and seeds cannot be recomputed",
    )


def _random_state(func: Operator, args: tuple[object, ...]) -> torch.Tensor | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return _generator(args).get_state()


def _generator(args: tuple[object, ...]) -> torch.Generator:
    tensors = tensors_in(args)
    if tensors and tensors[0].device.type == "cuda":
        return torch.cuda.default_generators[tensors[0].device.index]
    return torch.default_generator


def _never_unpack(_packed: None) -> torch.Tensor:
    raise RatelError("the recorded forward's graph was used for a backward pass")
