"""Record a block's forward pass, then replay it in backward with as little work as possible.

`engine.step` runs each block's forward under a `Recorder`, which drops everything that autograd
wants to keep, notes, operator by operator, what would be needed, and offloads the outputs that the plan
swaps. The resulting `Tape` is tiny. In backward the block runs again under a `Replayer`: this rebuilds
the autograd graph, and every operator is run, answered with what was offloaded, or skipped, as
`planning.liveness` decided.

An operator's key is its name and how many calls of it came before in the block: `aten.mm.default#2`.
What cannot be swapped is not, whatever the plan says: views and mutations, what a mutation changes later,
and integers, which steer. Attention on a GPU returns a few for its own backward; those the tape keeps.

Invariants: (1) the replay meets the recorded operators in the recorded order, or it stops with an
error, never with wrong gradients; (2) random operators draw what they drew when recorded; (3) no
autograd graph outlives `Recorder`: its saved tensors are never stored.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ratel_cli.errors import RatelError
from ratel_cli.model.operators import OperatorMode, TorchOperator, tensors_in
from ratel_cli.planning.liveness import Decision, decide
from ratel_cli.sizes import PACKED_ALIGNMENT
from ratel_cli.units import align_up

_DETACH = torch.ops.aten.detach.default
"""Not an operator of the model: autograd calls it to save an output, unless hooks are there to take it."""
_ATTENTION_ON_GPU = frozenset(
    (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    )
)
"""They return output and log-sum-exp; and for their backward alone the generator's seed and offset, and lengths."""


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
class RecordedOperator:
    """One call: which storages it read and wrote, as serial numbers."""

    func: TorchOperator
    key: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    outputs: tuple[object, ...] | None
    """With a shape for each tensor that can be left out. None where the operator must run: views, mutations, results
    that steer Python."""
    output_bytes: int
    """Of storages that are its own, as they are packed; 0 where it cannot be swapped."""
    random_state: torch.Tensor | None
    is_needed: bool

    @property
    def can_be_skipped(self) -> bool:
        return self.outputs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """What a block's forward did, and what of it the backward pass has to do again."""

    funcs: tuple[TorchOperator, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[tuple[object, ...] | None, ...]
    random_states: dict[int, torch.Tensor]
    """State of the generator before each random operator, by position."""


class Recorder(OperatorMode):
    """Runs a forward pass without keeping activations. Use as a context; then call `finish()`."""

    def __init__(self, parameters: Sequence[torch.Tensor] = (), swapped: Collection[str] = ()) -> None:
        """`parameters`, and what shares their storage, do not count as activations; `swapped` are keys."""
        super().__init__()
        self._not_counted = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._swapped = swapped
        self.operators: list[RecordedOperator] = []
        self.saved: set[int] = set()
        """Storages that autograd would have kept."""
        self.saved_bytes = 0
        """Theirs, parameters not counted."""
        self._put_offloaded: dict[int, tuple[torch.Tensor, ...]] = {}
        self._num_calls: Counter[str] = Counter()
        self._serials: dict[int, int] = {}
        self._num_serials = 0
        self._mutated: set[int] = set()
        self._device = parameters[0].device if parameters else None
        """Where tensors must be to be swapped."""
        self._of_parameters = set(self._serials_of(parameters))
        """Storages of parameters, and of what is made of nothing else: weights are never swapped."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Grad mode stays on: without it some models run other operators, and attention drops its logsumexp."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._note_saved, _never_unpack), self:
            yield

    def finish(self) -> tuple[Tape, dict[int, tuple[torch.Tensor, ...]]]:
        """The tape, and the outputs that its replay needs to be given, by position."""
        offloaded = {
            position: tensors
            for position, tensors in self._put_offloaded.items()
            if self._mutated.isdisjoint(self.operators[position].writes)
        }
        self._put_offloaded = {}
        decisions = decide(self.operators, self.saved, offloaded.keys())
        tape = Tape(
            funcs=tuple(operator.func for operator in self.operators),
            decisions=tuple(decisions),
            outputs=tuple(operator.outputs for operator in self.operators),
            random_states={
                position: operator.random_state
                for position, operator in enumerate(self.operators)
                if operator.random_state is not None
            },
        )
        return tape, {
            position: tensors for position, tensors in offloaded.items() if decisions[position] is Decision.SWAP
        }

    def can_be_swapped(self, operator: RecordedOperator) -> bool:
        """Whether its outputs are its own and stay as they are. Known when all is recorded."""
        return operator.output_bytes > 0 and self._mutated.isdisjoint(operator.writes)

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func is _DETACH:
            return func(*args, **kwargs)
        reads = self._serials_of(tensors_in((args, kwargs)))
        random_state = _random_state(func, args, kwargs)
        result = self._call(func, args, kwargs)
        operator = self._describe(func, reads, result, random_state)
        if operator.output_bytes and operator.key in self._swapped:
            # Aliases without the graph that autograd will hang on the outputs themselves.
            self._put_offloaded[len(self.operators)] = tuple(
                tensor.detach() for tensor in tensors_in(result) if tensor.is_floating_point()
            )
        self.operators.append(operator)
        return result

    def _call(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return func(*args, **kwargs)

    def _describe(
        self, func: TorchOperator, reads: tuple[int, ...], result: object, random_state: torch.Tensor | None
    ) -> RecordedOperator:
        name = str(func)
        key = f"{name}#{self._num_calls[name]}"
        self._num_calls[name] += 1
        tensors = tensors_in(result)
        mutable = func._schema.is_mutable
        if func.is_view and not mutable:
            return RecordedOperator(func, key, reads, (), None, 0, None, False)
        if not mutable:
            # A fresh output: its storage may have the address of one that was freed, so it gets a new number.
            for tensor in tensors:
                storage = tensor.untyped_storage()._cdata
                if self._serials.get(storage) not in reads:
                    self._serials[storage] = self._next_serial()
        writes = self._serials_of(tensors)
        if mutable:
            writes = writes + reads
            self._mutated.update(writes)
        # Integers and booleans index, route and branch, and Python reads them past the dispatcher (tolist);
        # inside a custom autograd function grad mode is off and what it keeps for itself is not seen.
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        steers = not tensors or (len(floating) < len(tensors) and func not in _ATTENTION_ON_GPU)
        is_needed = steers or not torch.is_grad_enabled()
        outputs, own_bytes = None, 0
        if not (is_needed or mutable):
            outputs = tuple(
                _without_values(part) for part in (result if isinstance(result, tuple | list) else [result])
            )
            if reads and self._of_parameters.issuperset(reads):
                self._of_parameters.update(writes)
            elif set(writes).isdisjoint(reads) and all(t.device == (self._device or t.device) for t in floating):
                own_bytes = sum(align_up(num_bytes, PACKED_ALIGNMENT) for num_bytes in storage_bytes(floating))
        return RecordedOperator(func, key, reads, writes, outputs, own_bytes, random_state, is_needed)

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
        if serial not in self.saved:
            self.saved.add(serial)
            storage = tensor.untyped_storage()
            if storage._cdata not in self._not_counted:
                self.saved_bytes += storage.nbytes()


class Replayer(OperatorMode):
    """Runs the recorded forward again, doing only what its tape decided. Use as a context."""

    def __init__(self, tape: Tape, offloaded: Mapping[int, tuple[torch.Tensor, ...]] | None = None) -> None:
        """`offloaded` is what `Recorder.finish` gave with the tape; each output is used once."""
        super().__init__()
        self._tape = tape
        self._offloaded = dict(offloaded or {})
        self._position = 0

    def check_complete(self) -> None:
        """Raise unless every recorded operator was met."""
        if self._position != len(self._tape.funcs):
            raise _not_repeated(self._position, "the end", self._tape.funcs[self._position])

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func is _DETACH:
            return func(*args)
        position, tape = self._position, self._tape
        if position >= len(tape.funcs) or tape.funcs[position] is not func:
            recorded = tape.funcs[position] if position < len(tape.funcs) else "the end"
            raise _not_repeated(position, func, recorded)
        self._position = position + 1
        decision = tape.decisions[position]
        if decision is Decision.EXEC:
            state = tape.random_states.get(position)
            if state is not None:
                _generator(args, kwargs).set_state(state)
            return func(*args, **kwargs)
        outputs = tape.outputs[position]
        assert outputs is not None
        offloaded = iter(self._offloaded.pop(position)) if decision is Decision.SWAP else None
        result = tuple(
            (part.empty() if offloaded is None else next(offloaded)) if isinstance(part, OutputShape) else part
            for part in outputs
        )
        return result[0] if len(result) == 1 else result


def storage_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each storage behind them, once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage.nbytes() for storage in storages.values()]


def _not_repeated(position: int, now: object, recorded: object) -> RatelError:
    return RatelError(
        f"the forward pass did not repeat itself: operator {position} was {recorded}, now it is {now}",
        "a model whose forward depends on anything but its inputs and seeds cannot be recomputed",
    )


def _without_values(part: object) -> object:
    if isinstance(part, torch.Tensor) and part.is_floating_point():
        return OutputShape(part.size(), part.stride(), part.dtype, part.device)
    return part


def _random_state(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    return _generator(args, kwargs).get_state()


def _generator(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Generator:
    """The one that an operator draws from: of a GPU, if it works there or is to make its result there."""
    devices = [tensor.device for tensor in tensors_in((args, kwargs))]
    wanted = kwargs.get("device")
    if isinstance(wanted, torch.device):
        devices.append(wanted)
    for device in devices:
        if device.type == "cuda":
            return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _never_unpack(_packed: None) -> torch.Tensor:
    raise RatelError("the recorded forward's graph was used for a backward pass")
