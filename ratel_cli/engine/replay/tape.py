"""Records a layer's forward pass, and replays it in backward with as little work as possible.

Forward runs under a `Recorder`. It drops every tensor that autograd saves, notes for each operator what backward would
need of it, and collects the outputs that the plan swaps. The resulting `Tape` is tiny. In backward the layer runs again
under a `Replayer`, which rebuilds the autograd graph: each operator is run again, answered with its offloaded output,
or skipped, as `planning/profile/liveness.py` decided.

An operator's key is its name and the number of its earlier calls in the layer, such as `aten.mm.default#2`. Some
outputs are never swapped, whatever the plan says: views, mutated tensors, what a custom autograd function gets and may
write to, and integers, which may decide what the model computes. Attention on a GPU returns a few integers for its own
backward; the tape holds those.

Invariants: (1) the replay meets the recorded operators in the recorded order, or it stops with an error, never with
wrong gradients; (2) random operators draw what they drew when they were recorded; (3) no autograd graph outlives the
recording: its saved tensors are never stored.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from ratel_cli.errors import RatelError
from ratel_cli.model.values.operators import OperatorMode, TorchOperator, tensors_in
from ratel_cli.planning.profile.liveness import Decision, Recorded, decide
from ratel_cli.sizes import PACKED_ALIGNMENT
from ratel_cli.units import align_up

T = TypeVar("T")
DETACH = torch.ops.aten.detach.default
"""Not an operator of the model: autograd calls it to save an output, but not when saved-tensor hooks are set."""
_ATTENTION_ON_GPU = frozenset(
    (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    )
)
"""They return output and log-sum-exp and, only for their backward, the generator's seed and offset, and lengths."""


@dataclass(frozen=True, slots=True)
class OutputShape:
    """Shape, dtype and device of a tensor that will not be computed."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        """A new uninitialised tensor of this shape. On the CPU it takes no memory, since no page of it is touched."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class RecordedOperator(Recorded):
    """One call of an operator. A storage is identified by the serial number that the recorder gave it."""

    func: TorchOperator
    key: str
    """The operator's name and the number of its earlier calls in the layer."""
    outputs: tuple[object, ...] | None
    """The results, with an `OutputShape` for each floating-point tensor. None if the operator must run again: views,
    mutations, results that Python reads."""
    output_bytes: int
    """Bytes of its new storages when they are packed; 0 if the output cannot be swapped."""
    random_state: torch.Tensor | None
    """The generator's state before the call; None if the operator is not random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """The operators of one layer's forward on one micro-batch, and what a replay does with each.

    An operator's position is its number in the order of calls, from 0.
    """

    funcs: tuple[TorchOperator, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[tuple[object, ...] | None, ...]
    """Outputs of each operator, as in `RecordedOperator`."""
    random_states: dict[int, torch.Tensor]
    """By position: the generator's state before each random operator."""


class Tapes:
    """The tapes of one step, by block and micro-batch. Those that are alike, nearly all of them, share their memory: a
    step with 128 layers and 128 micro-batches has 16,384."""

    def __init__(self) -> None:
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._known: dict[object, object] = {}

    def put(self, block: int, micro_batch: int, tape: Tape) -> Tape:
        """Keep a tape until it is taken. Returns it with the memory that it shares."""
        kept = self._tapes[block, micro_batch] = Tape(
            funcs=self._shared(tape.funcs),
            decisions=self._shared(tape.decisions),
            outputs=self._shared_outputs(tape.outputs),
            random_states=tape.random_states,
        )
        return kept

    def put_repeated(self, block: int, micro_batch: int, tape: Tape) -> None:
        """Keep a tape that shares its memory with that of its template."""
        self._tapes[block, micro_batch] = tape

    def take(self, block: int, micro_batch: int) -> Tape:
        """Return a tape, and keep it no longer."""
        return self._tapes.pop((block, micro_batch))

    def _shared_outputs(self, outputs: tuple[tuple[object, ...] | None, ...]) -> tuple[tuple[object, ...] | None, ...]:
        shared = tuple(self._shared(each) if has_only_shapes(each) else each for each in outputs)
        return self._shared(shared) if all(map(has_only_shapes, outputs)) else shared

    def _shared(self, part: T) -> T:
        """The part that equals this one and was put first."""
        return cast("T", self._known.setdefault(part, part))


class Recorder(OperatorMode):
    """Runs a forward pass without saving activations. Run it inside `recording()`, then call `finish()`."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor] = (),
        swapped: Collection[str] = (),
        on_output: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`parameters`: the layer's. `swapped`: keys of the operators whose outputs are offloaded. `on_output` is
        called with the bytes of each of these outputs when it is there."""
        super().__init__()
        self._swapped = swapped
        self._on_output = on_output
        self.operators: list[RecordedOperator] = []
        self.saved: set[int] = set()
        """Storages that autograd would have saved."""
        self.saved_bytes = 0
        """Bytes of those storages, without parameters and the layer's inputs."""
        self._offloaded_outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._num_calls: Counter[str] = Counter()
        self._serials: dict[int, int] = {}
        self._num_serials = 0
        self._mutated: set[int] = set()
        """Storages that something writes to, or may write to where no dispatch mode sees it."""
        self.opaque: set[int] = set()
        """Storages that custom autograd functions get: their kernels may read them where no dispatch mode sees it."""
        self.reads_values = False
        """Whether Python has read the values of a tensor past the dispatcher."""
        self._made: set[int] = set()
        """Storages that an operator of the layer made: neither parameters nor inputs."""
        self._device = parameters[0].device if parameters else None
        """Only tensors on this device can be swapped; None: on any."""
        self._of_parameters = set(self._serials_of(parameters))
        """Storages of parameters, and of tensors computed from parameters alone. They are never swapped."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside. Grad mode is on: without it some models run other operators, and attention drops
        its log-sum-exp."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._note_saved, never_unpack)
        opaque, values = _noting_custom_functions(self._note_opaque), _noting_values(self._note_values)
        with torch.enable_grad(), saved, opaque, values, self:
            yield

    def finish(self) -> tuple[Tape, dict[int, tuple[torch.Tensor, ...]]]:
        """Return the tape and, by position, the outputs that must be offloaded for its replay.

        An output has the shape that its operator gave it.
        """
        offloaded = {
            position: tensors
            for position, tensors in self._offloaded_outputs.items()
            if self._mutated.isdisjoint(self.operators[position].writes)
        }
        self._offloaded_outputs = {}
        decisions = decide(self.operators, self.saved | self.opaque, offloaded.keys())
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
        """True if the operator's outputs are new tensors that nothing mutates. Known when the recording has ended."""
        return operator.output_bytes > 0 and self._mutated.isdisjoint(operator.writes)

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        reads = self._serials_of(tensors_in((args, kwargs)))
        if not torch.is_grad_enabled():
            self._mutated.update(reads)  # as in a custom function: what reads may write as well
        if func is DETACH:
            return func(*args, **kwargs)
        random_state = _random_state(func, args, kwargs)
        result = self._call(func, args, kwargs)
        operator = self._describe(func, reads, result, random_state)
        if operator.output_bytes and operator.key in self._swapped:
            # Aliases, without the graph that autograd will attach to the outputs themselves.
            self._offloaded_outputs[len(self.operators)] = tuple(
                tensor.detach() for tensor in tensors_in(result) if tensor.is_floating_point()
            )
            self._on_output(operator.output_bytes)
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
        # `_unsafe_view` is not called a view, but a tensor of its own would take its source's memory once more.
        storages = {self._serials.get(each.untyped_storage()._cdata) for each in tensors}
        if not mutable and (func.is_view or (storages and storages.issubset(reads))):
            return RecordedOperator(reads, (), False, False, func, key, None, 0, None)
        if not mutable:
            # A new output: its storage may have the address of a freed one, so it gets a new number.
            for tensor in tensors:
                storage = tensor.untyped_storage()._cdata
                if self._serials.get(storage) not in reads:
                    self._serials[storage] = self._next_serial()
                    self._made.add(self._serials[storage])
        writes = self._serials_of(tensors)
        if mutable:
            writes = writes + reads
            self._mutated.update(writes)
        # Integers and booleans index, route and branch, and Python reads them past the dispatcher (tolist). Inside a
        # custom autograd function grad mode is off, and the tensors that it saves for itself are not seen.
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        steers = not tensors or (len(floating) < len(tensors) and func not in _ATTENTION_ON_GPU)
        is_needed = steers or not torch.is_grad_enabled()
        outputs, own_bytes = None, 0
        if not (is_needed or mutable):
            outputs = tuple(without_values(part) for part in (result if isinstance(result, tuple | list) else [result]))
            if reads and self._of_parameters.issuperset(reads):
                self._of_parameters.update(writes)
            elif set(writes).isdisjoint(reads) and all(t.device == (self._device or t.device) for t in floating):
                own_bytes = sum(align_up(num_bytes, PACKED_ALIGNMENT) for num_bytes in storage_bytes(floating))
        return RecordedOperator(
            reads, writes, is_needed, outputs is not None, func, key, outputs, own_bytes, random_state
        )

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

    def _note_opaque(self, tensors: Sequence[torch.Tensor]) -> None:
        serials = self._serials_of(tensors)
        self._mutated.update(serials)
        self.opaque.update(serials)

    def _note_values(self) -> None:
        self.reads_values = True

    def _note_saved(self, tensor: torch.Tensor) -> None:
        (serial,) = self._serials_of((tensor,))
        if serial not in self.saved:
            self.saved.add(serial)
            if serial in self._made:
                self.saved_bytes += tensor.untyped_storage().nbytes()


class Replayer(OperatorMode):
    """Runs the recorded forward again as its tape decided. Use as a context manager."""

    def __init__(self, tape: Tape, offloaded: MutableMapping[int, tuple[torch.Tensor, ...]] | None = None) -> None:
        """`offloaded`: the outputs that `Recorder.finish` returned with the tape, with the same bytes. The replay takes
        each of them out, so that nothing but the graph holds it."""
        super().__init__()
        self._tape = tape
        self._offloaded = {} if offloaded is None else offloaded
        self._position = 0

    def check_complete(self) -> None:
        """Raise RatelError unless every recorded operator was met."""
        if self._position != len(self._tape.funcs):
            raise _not_repeated(self._position, "the end", self._tape.funcs[self._position])

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func is DETACH:
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
                generator_of(args, kwargs).set_state(state)
            return func(*args, **kwargs)
        outputs = tape.outputs[position]
        assert outputs is not None
        offloaded = iter(self._offloaded.pop(position)) if decision is Decision.SWAP else None
        result = tuple(
            (part.empty() if offloaded is None else next(offloaded)) if isinstance(part, OutputShape) else part
            for part in outputs
        )
        return result[0] if len(result) == 1 else result


@contextlib.contextmanager
def _noting_custom_functions(note: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """A context in which `note` is called with the tensors that a custom autograd function gets.

    Its kernels (fused rotary embeddings, norms) may read and write these by address, where no dispatch mode sees it.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(function: type[torch.autograd.Function], /, *args: object, **kwargs: object) -> object:
        note(tensors_in((args, kwargs)))
        return original.__func__(function, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


_READ_VALUES = ("tolist", "numpy", "__array__", "__dlpack__")
"""Methods of a tensor that give its values to Python without an operator."""


@contextlib.contextmanager
def _noting_values(note: Callable[[], None]) -> Iterator[None]:
    """A context in which `note` is called when Python reads values past the dispatcher."""

    def noting(method: Callable[..., object]) -> Callable[..., object]:
        def noted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            note()
            return method(tensor, *args, **kwargs)

        return noted

    own = {name: vars(torch.Tensor).get(name) for name in _READ_VALUES}
    for name in _READ_VALUES:
        setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def storage_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each storage behind the tensors. A storage that several tensors share is listed once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage.nbytes() for storage in storages.values()]


def _not_repeated(position: int, now: object, recorded: object) -> RatelError:
    return RatelError(
        f"recomputing did not repeat the forward pass: operator {position} was {recorded}, is now {now}",
        "use a model whose forward pass depends only on its inputs and seeds",
    )


def has_only_shapes(outputs: tuple[object, ...] | None) -> bool:
    """Integers and their tensors, in contrast, are of one call alone."""
    return outputs is None or all(isinstance(output, OutputShape) for output in outputs)


def without_values(part: object) -> object:
    """A result without its numbers: an `OutputShape` for a floating-point tensor, all else as it is."""
    if isinstance(part, torch.Tensor) and part.is_floating_point():
        return OutputShape(part.size(), part.stride(), part.dtype, part.device)
    return part


def _random_state(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
    if torch.Tag.nondeterministic_seeded not in func.tags or _dropout(func, args, kwargs) == 0.0:
        return None
    return generator_of(args, kwargs).get_state()


def _dropout(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The share of an attention's weights that is dropped, 0 if it is not given; None of other operators."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return None
    place = names.index("dropout_p")
    return args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)


def generator_of(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Generator:
    """The generator that an operator draws from: the GPU's if an argument is there or the result will be there."""
    devices = [tensor.device for tensor in tensors_in((args, kwargs))]
    wanted = kwargs.get("device")
    if isinstance(wanted, torch.device):
        devices.append(wanted)
    for device in devices:
        if device.type not in ("cpu", "meta"):
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            generator: torch.Generator = torch.get_device_module(device).default_generators[index]
            return generator
    return torch.default_generator


def never_unpack(_packed: None) -> torch.Tensor:
    """Autograd's hook for what was saved while a forward was recorded."""
    raise RatelError("the recorded forward's graph was used for a backward pass")
