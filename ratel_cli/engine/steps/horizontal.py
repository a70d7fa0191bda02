"""The horizontal schedule: the caller's own loop calls blocks, and each brings its weights in and gives them up.

The loop decides what runs. A block is called in forward, and again in backward, where its forward is recomputed; the
next block's weights are read meanwhile. Autograd saves what a call gets, like everything outside of the blocks.
A step is what leads to one update:

    1. forward    any number of calls, with or without gradients
    2. backward   each block's gradients are added up. With the last call of the step they are handed over to the
                  update, which is overlapped with the backward of the blocks that follow (active gradient offloading,
                  Ratel section IV-C)
    3. end        when a backward is over and no call of this step waits for one: hand over what is outside of the
                  blocks and what is left, decide, and let the next step commit

With accumulation a step has several rounds of forward and backward, and ends with the last one.

Invariants: weights change only where a step ends, so a graph from before it cannot run backward; at most one block is
bound; a block that gets all its gradients from one call has them as autograd made them, others are summed in fp32.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.backward_task import running_backward
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.engine.optimizer.gradients import taken_gradient
from ratel_cli.engine.optimizer.phases import StepDecision
from ratel_cli.engine.optimizer.segment_sum import SegmentSum, adding_to
from ratel_cli.engine.reading.host_weights import HostWeights
from ratel_cli.engine.reading.program import BoundModel
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.steps.block_calls import BlockCall, Computed, Look, StepRule, first_changed, look_at
from ratel_cli.engine.steps.following import Following
from ratel_cli.engine.steps.read_ahead import ReadAhead
from ratel_cli.errors import BadInput
from ratel_cli.model.values.away import AwayGradient, hooks_of
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, Use


class HorizontalEngine(Closing):
    """Computes the blocks of one module, and updates them. Use as a context manager."""

    def __init__(
        self,
        model: BoundModel,
        following: Following,
        rule: StepRule,
        *,
        device: Device,
        timeline: Timeline,
        num_updates: Callable[[], int],
        commit: Callable[[], None],
        begins: Callable[[bool], None],
        waits: Callable[[], None],
        ended: Callable[[StepDecision], None],
    ) -> None:
        """`num_updates`: those that were applied. `commit`: commit the last step, which is settled. `begins`: called
        when a backward begins, with whether it is the first one of its step. `waits`: called when it is over, and its
        step is not. Both may raise. `ended`: called when a step has been decided."""
        self._segments = model.spec.segments
        self._parameter_names = model.parameter_names
        self._updates = following.updates
        self._reader = following.reader
        self._resident = following.resident
        self._gradient_sums = following.gradient_sums
        self._rule = rule
        self._device = device
        self._timeline = timeline
        self._num_updates = num_updates
        self._commit = commit
        self._begins = begins
        self._waits = waits
        self._ended = ended
        self._outside: tuple[nn.Parameter, ...] = ()
        """The trained parameters outside of the blocks."""
        self._bound_outside: tuple[nn.Parameter, ...] = ()
        """All parameters outside of the blocks."""
        self._is_open = self._is_closed = self._has_warned = self._is_behind_backward = False
        self._looks: list[Look] = []
        """What was seen of the parameters outside of the blocks after the last update."""
        self._looked_at: set[int] = set()
        """Segments that have computed without changing a value of their weights."""
        self._ahead = ReadAhead(following.reader, self._layers)
        self._epoch = 0
        self._num_waiting: dict[int, int] = {}
        """By segment: calls of this step whose backward has still to come."""
        self._pass: int | None = None
        """The backward that runs, as autograd numbers them."""
        self._num_rounds = 0
        """Rounds of this step that are over."""
        self._is_arriving = False
        """Whether gradients of this step have come."""
        self._sums: dict[int, SegmentSum] = {}
        """By segment: sums of this step that are not handed over."""
        self._of_pass: dict[int, list[torch.Tensor | None]] = {}
        """By segment of which several calls have a backward: the gradients of one backward, as autograd adds them."""
        self._handed_over: set[int] = set()
        self._bind_outside()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for the end of a step."""
        return self._is_arriving

    def name_of(self, index: int) -> str:
        """The name of a block, counted from 0."""
        return self._layers[index].name

    def has_trained(self, index: int) -> bool:
        """Whether a block, counted from 0, has parameters that are trained."""
        return bool(self._layers[index].trained)

    def call(self, index: int) -> BlockCall:
        """A call of a block, counted from 0, whose backward may come. Raises BadInput if it would come too late."""
        segment = self._layers[index]
        self._check_open()
        self.check_outside(at_values=False)
        self.drop_failed()
        if segment.index in self._handed_over:
            raise BadInput(
                f"{segment.name} is called again after its last backward of a step that has not ended",
                "run all forwards of a step before its backwards; or set accumulation_steps of ratel.AdamW",
            )
        self._look_for_waiting()
        made = BlockCall(segment, self._epoch)
        waiting = self._num_waiting
        waiting[segment.index] = waiting.get(segment.index, 0) + 1
        weakref.finalize(made, _forget, waiting, segment.index, made.__dict__).atexit = False
        return made

    def forget(self, call: BlockCall) -> None:
        """The call has failed: it has no backward."""
        if call.waits and call.epoch == self._epoch:
            self._num_waiting[call.segment.index] -= 1
        call.waits = False

    @contextmanager
    def computing(self, index: int, stage: Stage = "forward") -> Iterator[SegmentWeights]:
        """A context in which a block, counted from 0, has its weights. Raises RatelError."""
        segment = self._layers[index]
        if self._is_open:
            raise BadInput(f"{segment.name} is called within another block; name one of them in outside=[...]")
        self._is_open = True
        try:
            self.settle(only_if_written=True)
            self._ahead.expect(Use(segment, stage))
            with (
                self._device.translate_errors(),
                self._reader.open(segment) as weights,
                self._device.computing(SpanLabel.of(stage, segment, stage)),
            ):
                at_values = segment.index not in self._looked_at
                before = look_at(weights.parameters, at_values=at_values)
                yield weights
                changed = first_changed(before, look_at(weights.parameters, at_values=at_values))
                if changed is not None:
                    raise BadInput(
                        f"{segment.name} has changed its own weights, and its training state is elsewhere",
                        "let it compute with a changed copy of them",
                    )
                self._looked_at.add(segment.index)
        except BaseException:
            self._ahead.forget()
            raise
        finally:
            self._is_open = False
            self._device.collect()
            self._timeline.take()

    def backward(self, call: BlockCall, run: Callable[[], Computed], leaves: Sequence[torch.Tensor]) -> None:
        """Run a call's backward. `run` computes the block again. The gradients of `leaves` are in their `.grad`
        afterwards. Raises RatelError; the gradients of the step are then dropped, and its graphs with them."""
        segment = call.segment
        self._check_open()
        if call.is_made_in_backward:
            raise BadInput(
                f"{segment.name} has a backward within a backward, in a checkpoint around it",
                "set use_reentrant=False of torch.utils.checkpoint; blocks are computed again without it, too",
            )
        if call.epoch != self._epoch:
            raise BadInput(
                f"the backward of {segment.name} comes after a step that has changed its weights",
                "run its forward again; or set accumulation_steps of ratel.AdamW",
            )
        with self._dropping_on_error():
            self.begin_pass()
            if not call.waits:  # the graph was retained
                call.waits = True
                self._num_waiting[segment.index] += 1
            is_last = self._num_rounds == self._rule.num_rounds - 1 and self._num_waiting[segment.index] == 1
            if segment.index not in self._sums:
                self._sums[segment.index] = self._gradient_sums.of_layer(segment, single=is_last, scale=1.0)
            total = self._sums[segment.index]
            with self.computing(segment.index - 1, "backward") as weights:
                if is_last:
                    total.expect_last()
                with torch.enable_grad():
                    computed = run()
                    inputs = [*leaves, *weights.trained]
                    if self._num_waiting[segment.index] == 1 and segment.index not in self._of_pass:
                        with adding_to(weights.trained, total, is_last=is_last):
                            torch.autograd.backward(computed.outputs, computed.gradients, inputs=inputs)
                    elif any(map(hooks_of, weights.trained)):
                        raise BadInput(
                            f"{segment.name} is called several times in one backward, and a parameter of it has a "
                            "hook, which would get a part of its gradient",
                            "change the gradient of what the block returns, or its weights in forward",
                        )
                    else:
                        torch.autograd.backward(computed.outputs, computed.gradients, inputs=inputs)
                        self._add_to_pass(segment, weights.trained)
                del computed
                if self._num_waiting[segment.index] == 1:
                    self._end_pass_of(segment, is_last=is_last)
                if is_last:
                    weights.unbind()
                    self._hand_over(segment, [*weights.hosts])
                    weights.close()
                    self._updates.wait_pending()
            call.waits = False
            self._num_waiting[segment.index] -= 1

    def end_step(self) -> None:
        """End the step: update all parameters with the gradients that have come. Raises RatelError."""
        with self._dropping_on_error():
            self.check_outside()
            for segment in reversed(self._layers):
                if segment.index not in self._handed_over:
                    self._hand_over(segment, [None] * len(segment.trained))
            self._collect_outside(is_last=True)
            hosts = [self._resident.get(block) for block in self._segments[0].trained]
            try:
                self._hand_over(self._segments[0], hosts)
            finally:
                for host in hosts:
                    if host is not None:
                        host.release()
            decision = self._updates.decide(self._parameter_names)
        self._begin_anew()
        self._bind_outside()
        self._ended(decision)

    def drop_failed(self) -> None:
        """Drop the gradients of a step in whose backward the caller's code has failed, if it has."""
        if self._pass is not None and running_backward() is None:
            self.drop()

    def drop(self) -> None:
        """Drop the gradients of the step that has not ended; graphs from before cannot run backward. Idempotent."""
        for parameter in self._outside:
            parameter.grad = None
        if self._is_arriving:
            self._updates.abandon()
            self._begin_anew()
            self._bind_outside()

    def settle(self, *, only_if_written: bool = False) -> None:
        """Commit the step that has ended, if there is one that is not committed. `only_if_written`: do nothing while
        its update is being written."""
        if self._updates.is_unsettled and (self._updates.is_written or not only_if_written):
            self._updates.settle()
            self._commit()

    def close(self) -> None:
        """Give all memory back; gradients of a step that has not ended are dropped. Idempotent."""
        self._is_closed = True
        self._close_sums()
        self._ahead.forget()
        self._updates.close()

    @property
    def _layers(self) -> tuple[Segment, ...]:
        return self._segments[1:-1]

    def begin_pass(self) -> None:
        """Note the backward that runs, once; with the first one of a step begin the update."""
        self._check_open()
        number = running_backward()
        if number == self._pass:
            return
        if self._pass is not None:
            raise BadInput("a backward failed before this one, so its step was dropped", "run the forward again")
        self._begins(not self._is_arriving)
        if not self._is_arriving:
            self.settle()
            self._updates.begin(
                number=self._num_updates() + 1,
                learning_rate=self._rule.begin_step(),
                gradient_scale=1.0,
                come_in_order=False,
            )
            self._is_arriving = True
        self._pass = number
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """A backward is over."""
        self._pass, self._is_behind_backward = None, True
        for segment in self._layers:
            self._end_pass_of(segment, is_last=False)
        if not any(self._num_waiting.values()):
            self._num_rounds += 1
        if self._num_rounds == self._rule.num_rounds:
            self.end_step()
        else:
            self._collect_outside(is_last=False)
            self._waits()

    def _add_to_pass(self, segment: Segment, parameters: Sequence[nn.Parameter]) -> None:
        """Add gradients to those of the same backward, in the parameters' dtype."""
        sums = self._of_pass.setdefault(segment.index, [None] * len(parameters))
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                gradient, before = taken_gradient(parameter), sums[index]
                sums[index] = gradient if before is None else before.add_(gradient)

    def _end_pass_of(self, segment: Segment, *, is_last: bool) -> None:
        """A segment has all its gradients of one backward, the last one of the step if `is_last`."""
        total = self._sums.get(segment.index)
        for index, gradient in enumerate(self._of_pass.pop(segment.index, ())):
            if total is not None and gradient is not None:
                total.add_one(index, gradient, is_last=is_last)

    def _collect_outside(self, *, is_last: bool) -> None:
        """Add what autograd has made for the parameters outside of the blocks."""
        outside = self._segments[0]
        if 0 not in self._sums:
            self._sums[0] = self._gradient_sums.of_layer(outside, single=is_last, scale=1.0)
        self._sums[0].add([_found_gradient(each) for each in self._outside])

    def _hand_over(self, segment: Segment, hosts: Sequence[HostWeights | None]) -> None:
        """Hand a segment's gradients over to the update. `hosts`: weights in host memory of its trained blocks."""
        total = self._sums.pop(segment.index, None)
        if total is None:
            total = self._gradient_sums.of_layer(segment, single=True, scale=1.0)
        self._handed_over.add(segment.index)
        with total:
            for block_sum, host in zip(total.blocks, hosts, strict=True):
                self._updates.hand_over(block_sum.finish(), host)

    def _bind_outside(self) -> None:
        """Let what is outside of the blocks have its newest weights."""
        outside = self._segments[0]
        if not outside.bound:
            return
        self._ahead.forget()
        self._reader.expect([Use(outside, "forward")])
        with self._reader.open(outside) as weights:
            self._outside, self._bound_outside = weights.trained, weights.parameters
        if self._device.is_host:  # the caller may write to this memory, and must not write to the drives
            for block in outside.trained:
                self._updates.wait_written(block)
        self._looks = look_at(self._bound_outside, at_values=True)

    def check_outside(self, *, at_values: bool = True) -> None:
        """Raise BadInput if somebody has written to what is outside of the blocks: the update would undo it.
        `at_values`: also by `data`, NumPy or a storage, where torch counts no writes."""
        changed = first_changed(self._looks, look_at(self._bound_outside, at_values=at_values))
        if changed is not None:
            names = [each.name for block in self._segments[0].bound for each in block.parameters]
            raise BadInput(
                f"{names[changed]} was changed by other code than its update, which would undo it",
                "change it before ratel.hook, or compute with a changed copy in forward",
            )

    def _check_open(self) -> None:
        if self._is_closed or self.is_of_parent:
            raise BadInput(
                "a forked process uses the hooked module of its parent"
                if self.is_of_parent
                else "this forward ran before the optimizer was made, or before the hooked module was closed",
                "run the forward again",
            )

    def _look_for_waiting(self) -> None:
        """Warn once if a forward begins while calls from before the last backward wait: no step ends until they do."""
        number, self._is_behind_backward = sum(self._num_waiting.values()) * self._is_behind_backward, False
        if number and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ratel: {number} calls of blocks have a graph and had no backward, so the step has not ended; compute "
                "what is not trained under torch.no_grad()",
                stacklevel=2,
            )

    def _begin_anew(self) -> None:
        """After a step has ended, or was dropped."""
        self._close_sums()
        self._ahead.forget()
        self._handed_over.clear()
        self._num_waiting = {}  # calls from before count in the old one
        self._is_arriving, self._num_rounds, self._pass = False, 0, None
        self._epoch += 1

    def _close_sums(self) -> None:
        self._of_pass.clear()
        while self._sums:
            self._sums.popitem()[1].close()

    @contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise


def _found_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """What autograd has made for a parameter, which has none afterwards."""
    is_made = parameter.grad is not None and not isinstance(parameter.grad, AwayGradient)
    return taken_gradient(parameter).detach() if is_made else None  # it has a graph with create_graph=True


def _forget(num_waiting: dict[int, int], segment: int, call: Mapping[str, object]) -> None:
    """A call is gone. If its backward has not come, it will not."""
    if call["waits"]:
        num_waiting[segment] -= 1
