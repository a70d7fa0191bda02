"""Notes what every operator of the layers costs while a step runs (Ratel section IV-B: profiling in the first
iteration).

A step takes its recorders from a `StepRecording`; `planning/profile/recorded.py` makes a model profile of the result.
FLOPs are torch's own count (torch.utils.flop_counter), except for attention: torch's formula has not known grouped
heads for long, and does not count the CPU's kernel. Times are of the call below autograd; on a GPU, of the work that
the call queued, between two events that are read after the step.

Invariant: a recorded step computes the same bits as any other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from ratel_cli.engine.replay.tape import RecordedOperator, Recorder
from ratel_cli.model.values.operators import TorchOperator, tensors_in
from ratel_cli.planning.profile.recorded import RECORDED_MICRO_BATCHES, OperatorRecord, UnitRecord
from ratel_cli.sizes import PACKED_ALIGNMENT
from ratel_cli.units import align_up


class StepRecording:
    """The costs of one step's units: one for each layer and micro-batch, of the first micro-batches."""

    def __init__(self) -> None:
        self._recorders: dict[tuple[int, int], _TimingRecorder] = {}
        self.num_micro_batches = 0
        """Number of the step's micro-batches, recorded or not."""

    def recorder(
        self,
        parameters: Sequence[torch.Tensor],
        swapped: Collection[str],
        *,
        block: int,
        micro_batch: int,
        module: nn.Module,
        on_output: Callable[[int], None] = lambda num_bytes: None,
    ) -> Recorder:
        """A recorder for one layer (`module`) and micro-batch. Others as in `Recorder`."""
        self.num_micro_batches = max(self.num_micro_batches, micro_batch + 1)
        if micro_batch >= RECORDED_MICRO_BATCHES:
            return Recorder(parameters, swapped, on_output)
        recorder = self._recorders[block, micro_batch] = _TimingRecorder(parameters, swapped, module, on_output)
        return recorder

    def units(self) -> dict[tuple[int, int], UnitRecord]:
        """What was recorded, by block and micro-batch, in the order in which it ran. On a GPU the step must have
        ended."""
        return {key: recorder.record() for key, recorder in self._recorders.items()}


class _TimingRecorder(Recorder):
    """A recorder that also notes each operator's time, its FLOPs and the module that calls it."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        swapped: Collection[str],
        module: nn.Module,
        on_output: Callable[[int], None],
    ) -> None:
        super().__init__(parameters, swapped, on_output)
        self._module = module
        self._path = [""]
        self._notes: list[tuple[str, int, Callable[[], float]]] = []
        self._changes: list[tuple[int, int]] = []
        """Storages that began, and that ended, by their serial numbers: bytes, negative at the end."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks, super().recording():
            for name, module in self._module.named_modules():
                if name:
                    hooks.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                    hooks.callback(module.register_forward_hook(self._leave).remove)
            yield

    def record(self) -> UnitRecord:
        """The costs of this unit. On a GPU the unit must have ended."""
        sizes = {serial: num_bytes for serial, num_bytes in self._changes if num_bytes > 0}

        def saved_bytes(operator: RecordedOperator) -> int:
            saved = (
                align_up(sizes.get(each, 0), PACKED_ALIGNMENT) for each in self.saved.intersection(operator.writes)
            )
            return min(operator.output_bytes, sum(saved))

        return UnitRecord(
            operators=tuple(
                OperatorRecord(
                    name=f"{path} {str(operator.func).split('.')[1]}".strip(),
                    key=operator.key,
                    flops=flops,
                    seconds=seconds(),
                    num_bytes=operator.output_bytes if self.can_be_swapped(operator) else 0,
                    saved_bytes=saved_bytes(operator) if self.can_be_swapped(operator) else 0,
                    reads=operator.reads,
                    writes=operator.writes,
                    is_needed=operator.is_needed,
                    can_be_skipped=operator.can_be_skipped,
                )
                for operator, (path, flops, seconds) in zip(self.operators, self._notes, strict=True)
            ),
            saved=frozenset(self.saved | self.opaque),
            saved_bytes=self.saved_bytes,
            replay_bytes=self._most_bytes(saved_stays=False),
            replay_held_bytes=self._most_bytes(saved_stays=True),
        )

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        result = super().intercept(func, args, kwargs)
        for tensor in tensors_in(result):
            self._note_begin(tensor.untyped_storage())
        return result

    def _note_begin(self, storage: torch.UntypedStorage) -> None:
        serial = self._serials.get(storage._cdata)
        if serial is None or serial in self._alive or serial not in self._made or storage.device != self._device:
            return
        num_bytes = storage.nbytes()
        self._changes.append((serial, num_bytes))
        self._alive[serial] = weakref.ref(storage, lambda _: self._changes.append((serial, -num_bytes)))

    def _most_bytes(self, *, saved_stays: bool) -> int:
        """The most bytes that are alive at once when this is run again, and what autograd saves never ends.
        `saved_stays`: all that it saves is there from the beginning."""
        live = most = self.saved_bytes if saved_stays else 0
        for serial, num_bytes in self._changes:
            if serial not in self.saved or (num_bytes > 0 and not saved_stays):
                live += num_bytes
                most = max(most, live)
        return most

    def _call(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        devices = (tensor.device for tensor in tensors_in((args, kwargs)))
        stop = _start_clock(next((each for each in devices if each.type not in ("cpu", "meta")), None))
        result = super()._call(func, args, kwargs)
        seconds = stop()
        self._notes.append((self._path[-1], _flops(func, args, kwargs, result), seconds))
        return result

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._path.append(name)

    def _leave(self, *_: object) -> None:
        self._path.pop()


def _start_clock(gpu: torch.device | None) -> Callable[[], Callable[[], float]]:
    """Start timing. Returns a function that stops, and returns a function that reads the seconds."""
    if gpu is None:
        start = perf_counter()

        def stop() -> Callable[[], float]:
            seconds = perf_counter() - start
            return lambda: seconds

        return stop
    begun, ended = torch.Event(gpu, enable_timing=True), torch.Event(gpu, enable_timing=True)
    begun.record()

    def stop_on_gpu() -> Callable[[], float]:
        ended.record()
        return lambda: begun.elapsed_time(ended) / 1e3

    return stop_on_gpu


_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    }
)
"""Kernels of scaled_dot_product_attention. Its plain form is made of matrix products, which count by themselves."""


def _flops(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> int:
    """Torch's count; our own for attention, and for products of groups of rows (experts), which torch lacks."""
    packet = getattr(func, "_overloadpacket", None)
    shapes = [tensor.shape for tensor in tensors_in(args)]
    if packet in _ATTENTION:
        return attention_flops(*shapes[:3])
    if packet is torch.ops.aten._grouped_mm:
        return 2 * shapes[0].numel() * shapes[1][-1]
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """FLOPs of attention, from the shapes `[batch, heads, tokens, head_dim]` of its arguments.

    Keys and values may have fewer heads, each shared by a group of query heads. As in torch's counts, a causal mask
    saves nothing, and softmax counts nothing.
    """
    batch, num_heads, num_queries, head_dim = query
    num_keys, value_dim = key[-2], value[-1]
    return 2 * batch * num_heads * num_queries * num_keys * (head_dim + value_dim)
