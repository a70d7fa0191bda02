"""Notes what every operator of the layers costs while a step runs (Ratel section IV-B: profiling in the first
iteration).

A step takes its recorders from a `StepRecording`; `planning.recorded` makes a model profile of the result. FLOPs are
torch's own count (torch.utils.flop_counter). Times are of the call below autograd; on a GPU, of the work that the call
queued, between two events that are read after the step.

Invariant: a recorded step computes the same bits as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ratel_cli.engine.replay.tape import Recorder
from ratel_cli.model.operators import TorchOperator, tensors_in
from ratel_cli.planning.recorded import OperatorRecord, UnitRecord


class StepRecording:
    """The costs of one step's units: one for each layer and micro-batch."""

    def __init__(self) -> None:
        self._recorders: dict[tuple[int, int], _TimingRecorder] = {}

    def recorder(
        self,
        parameters: Sequence[torch.Tensor],
        swapped: Collection[str],
        *,
        block: int,
        micro_batch: int,
        module: nn.Module,
    ) -> Recorder:
        """A recorder for one layer (`module`) and micro-batch. `parameters` and `swapped` as in `Recorder`."""
        recorder = self._recorders[block, micro_batch] = _TimingRecorder(parameters, swapped, module)
        return recorder

    def units(self) -> dict[tuple[int, int], UnitRecord]:
        """The units by block and micro-batch, in the order in which they ran. On a GPU the step must have ended."""
        return {key: recorder.record() for key, recorder in self._recorders.items()}


class _TimingRecorder(Recorder):
    """A recorder that also notes each operator's time, its FLOPs and the module that calls it."""

    def __init__(self, parameters: Sequence[torch.Tensor], swapped: Collection[str], module: nn.Module) -> None:
        super().__init__(parameters, swapped)
        self._module = module
        self._path = [""]
        self._notes: list[tuple[str, int, Callable[[], float]]] = []

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
        return UnitRecord(
            operators=tuple(
                OperatorRecord(
                    name=f"{path} {str(operator.func).split('.')[1]}".strip(),
                    key=operator.key,
                    flops=flops,
                    seconds=seconds(),
                    num_bytes=operator.output_bytes if self.can_be_swapped(operator) else 0,
                    reads=operator.reads,
                    writes=operator.writes,
                    is_needed=operator.is_needed,
                    can_be_skipped=operator.can_be_skipped,
                )
                for operator, (path, flops, seconds) in zip(self.operators, self._notes, strict=True)
            ),
            saved=frozenset(self.saved),
            saved_bytes=self.saved_bytes,
        )

    def _call(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        stop = _start_clock(any(tensor.is_cuda for tensor in tensors_in((args, kwargs))))
        result = super()._call(func, args, kwargs)
        seconds = stop()
        self._notes.append((self._path[-1], _flops(func, args, kwargs, result), seconds))
        return result

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._path.append(name)

    def _leave(self, *_: object) -> None:
        self._path.pop()


def _start_clock(on_gpu: bool) -> Callable[[], Callable[[], float]]:
    """Start timing. Returns a function that stops, and returns a function that reads the seconds."""
    if not on_gpu:
        start = perf_counter()

        def stop() -> Callable[[], float]:
            seconds = perf_counter() - start
            return lambda: seconds

        return stop
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()

    def stop_on_gpu() -> Callable[[], float]:
        ended.record()
        return lambda: begun.elapsed_time(ended) / 1e3

    return stop_on_gpu


def _flops(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> int:
    """Torch's count, and two that it lacks: attention on the CPU, and products of groups of rows (experts)."""
    packet = getattr(func, "_overloadpacket", None)
    shapes = [tensor.shape for tensor in tensors_in(args)]
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*shapes[:3]))
    if packet is torch.ops.aten._grouped_mm:
        return 2 * shapes[0].numel() * shapes[1][-1]
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
