"""A layer: its units are recorded and offloaded in forward, and fetched and replayed in backward.

A layer that backward does not reach runs as in a pass without backward, and has no units.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TypeAlias

import torch

from ratel_cli.engine.cache.units import Unit
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.gradients import gradient_of_input
from ratel_cli.engine.optimizer.segment_sum import SegmentSum, adding_to
from ratel_cli.engine.reading.program import AnyBatch, Program
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.replay.repeating import AnyRecorder, Template, Unrepeated, repeater_of, template_of
from ratel_cli.engine.replay.tape import Recorder, Replayer, Tape
from ratel_cli.engine.segments.segment import RunnableSegment
from ratel_cli.engine.steps.state import PassState, StepState
from ratel_cli.model.values.carried import LayerCall, LayerOutput, Roots, signature_of
from ratel_cli.schedule.segments import Segment

_Offloaded: TypeAlias = "dict[int, tuple[torch.Tensor, ...]]"
"""By position in the tape: outputs within a layer that its replay gets."""


class Layer(RunnableSegment[AnyBatch]):
    """See `RunnableSegment`."""

    def __init__(self, segment: Segment, program: Program[AnyBatch], device: Device) -> None:
        super().__init__(segment, program, device)
        self._place = segment.index - 1
        """Its number among the layers."""
        self._passes_on = program.spec.passes_on(segment)
        self._has_backward = program.spec.has_backward(segment)
        self._template: tuple[object, Template | None] = None, None
        """The signature of the last recorded unit's arguments, and what others like it repeat, if they do."""

    def forward(self, state: PassState[AnyBatch], number: int, weights: SegmentWeights) -> None:
        """Run it, and offload what its backward needs."""
        if isinstance(state, StepState):
            activations = state.services.activations
            if self._has_backward:
                with self.computing("forward"):
                    leaf = state.hidden[number].requires_grad_(self._passes_on)
                    state.hidden[number], offloaded = self._run_unit(state, weights, number, leaf)
                activations.put(self.segment.index, number, Unit(leaf=leaf, offloaded=offloaded))
                return
            activations.skip(1)
        with self.computing("forward"):
            state.seed_draws(self.segment.index, number)
            run = partial(self._program.run, self._place, state.hidden[number])
            state.hidden[number] = state.carried[number].forward(self._place, run)

    def summing(self, state: StepState[AnyBatch]) -> SegmentSum:
        """Before, the upload of its first unit is started, if that can be now."""
        services, single, scale = state.services, state.is_single, state.gradient_scale
        services.activations.catch_up()
        return services.gradient_sums.of_layer(self.segment, single=single, scale=scale)

    def backward(self, state: StepState[AnyBatch], number: int, weights: SegmentWeights, sums: SegmentSum) -> None:
        """Fetch its unit, replay it, and add each parameter's gradient as soon as autograd has made it."""
        is_last, activations = number == state.last, state.services.activations
        if is_last:
            sums.expect_last()
        with (
            activations.fetch(self.segment.index, number) as unit,
            self.computing("backward"),
        ):
            unit.leaf.requires_grad_(self._passes_on)
            output, roots = self._replay(state, number, unit)
            with (
                gradient_of_input(unit.leaf) as taken,
                adding_to(weights.trained, sums, is_last=is_last),
                activations.preparing_more(self.segment, weights.trained),
                state.partial_sums.added_to(weights, number) as shared_roots,
            ):
                if output.requires_grad:  # unless all that is trained was not used, such as experts
                    roots.tensors.insert(0, output)
                    roots.gradients.insert(0, state.gradients[number])
                inputs = [*([unit.leaf] if self._passes_on else []), *weights.trained]
                if tensors := [*roots.tensors, *shared_roots.tensors]:
                    torch.autograd.backward(
                        tensors,
                        [*roots.gradients, *shared_roots.gradients],
                        inputs=[*inputs, *roots.inputs, *shared_roots.inputs],
                    )
                del tensors
            if self._passes_on:
                state.gradients[number] = taken()
            del unit, output, roots, shared_roots, taken

    def kind(self, state: PassState[AnyBatch]) -> object:
        """Layers with the same shapes and the same arguments cost the same."""
        shapes = tuple(parameter.shape for parameter in self.segment.parameters)
        arguments = state.carried[0].cost_key(self._place)
        return self._has_backward, self._passes_on, self.segment.block_kinds, shapes, arguments

    def _replay(self, state: StepState[AnyBatch], number: int, unit: Unit) -> tuple[torch.Tensor, Roots]:
        """Its output `[batch, tokens, hidden]`, with the autograd graph that forward dropped, and what else its
        backward begins with."""

        def run(call: LayerCall) -> LayerOutput:
            with Replayer(state.tapes.take(self.segment.index, number), unit.offloaded) as replayer:
                output = self._program.run(self._place, unit.leaf, call)
            replayer.check_complete()
            return output

        return state.carried[number].replay(self._place, run)

    def _run_unit(
        self, state: StepState[AnyBatch], weights: SegmentWeights, number: int, leaf: torch.Tensor
    ) -> tuple[torch.Tensor, _Offloaded]:
        """Run it on one micro-batch, and note its tape. Returns its output, and outputs within it to offload.

        It repeats its last recorded unit, if it gets tensors of the same shapes; else it is recorded.
        """
        index, carried, activations = self.segment.index, state.carried[number], state.services.activations

        def run(recorder: AnyRecorder) -> tuple[torch.Tensor, Tape, _Offloaded]:
            state.seed_draws(index, number)
            activations.begin_unit()
            finished = list[tuple[Tape, _Offloaded]]()

            def forward(call: LayerCall) -> LayerOutput:
                with recorder.recording():
                    output = self._program.run(self._place, leaf, call)
                finished.append(recorder.finish())  # here, where what is carried is put back if it raises
                return output

            output = carried.forward(self._place, forward, has_backward=True)
            return output.detach(), *finished[0]

        signature = (signature_of(leaf), carried.signature(self._place))
        known_signature, template = self._template
        if template is not None and known_signature == signature and state.recording is None:
            with contextlib.suppress(Unrepeated):
                output, tape, offloaded = run(repeater_of(template, activations.limit_downloads))
                state.tapes.put_repeated(index, number, tape)
                return output, offloaded
        recorder = self._recorder(state, weights, number)
        output, tape, offloaded = run(recorder)
        self._template = signature, template_of(recorder, state.tapes.put(index, number, tape))
        return output, offloaded

    def _recorder(self, state: StepState[AnyBatch], weights: SegmentWeights, number: int) -> Recorder:
        swapped = state.services.swapped.get(self.segment.index, frozenset())
        on_output = state.services.activations.limit_downloads
        if state.recording is None:
            return Recorder(weights.parameters, swapped, on_output)
        return state.recording.recorder(
            weights.parameters,
            swapped,
            block=self.segment.index,
            micro_batch=number,
            module=self._program.module(self._place),
            on_output=on_output,
        )
