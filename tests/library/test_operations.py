"""Each public operation on a module, its parameters, gradients and optimizer, in a loop of one's own: either weights,
moments and number of steps are those of the same loop in plain PyTorch, bit for bit, or an error names the operation.

The loop is written once, and runs on a plain module with torch's AdamW and on a hooked one with Ratel's. A row of the
table acts at one moment of it, or is a loop of its own.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import ratel_cli as ratel
from ratel_cli.library import initialising
from tests.tiers import thinned

WIDTH, NUM_STEPS, ACTS_IN = 8, 3, 1
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    """Adds to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(nn.Module):
    """A table and a head outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


@dataclass
class Loop:
    """A loop: a module, its optimizer, and what happens in it."""

    net: Net
    is_plain: bool
    optimizer: torch.optim.Optimizer = field(init=False)
    options: dict[str, Any] = field(default_factory=dict)
    """Of Ratel's optimizer, for what plain PyTorch's loop does itself."""
    state: ratel.Hooked | None = None
    loss: torch.Tensor = field(init=False)
    left: Any = None
    """What one moment leaves for another."""

    @property
    def inside(self) -> nn.Parameter:
        """A parameter of a block."""
        return self.net.layers[1].up.weight  # type: ignore[no-any-return, union-attr]

    @property
    def outside(self) -> nn.Parameter:
        """A parameter outside of the blocks."""
        return self.net.out.bias

    def make_optimizer(self, **settings: object) -> None:
        """With other settings than usual, if they are given."""
        given: dict[str, Any] = {**SETTINGS, **settings}
        trained = [each for each in self.net.parameters() if each.requires_grad]
        self.optimizer = (
            torch.optim.AdamW(trained, **given) if self.is_plain else ratel.AdamW(self.net, **given, **self.options)
        )

    def computed(self, number: int) -> torch.Tensor:
        """The loss of a batch."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(11, (3, 4), generator=generator)
        return (self.net(tokens) - torch.randn(3, 4, 5, generator=generator)).square().mean()


Tensors = dict[str, torch.Tensor]
Act = Callable[[Loop], object]
Moment = Literal["before", "made", "forward", "backward", "step", "stepped", "end", "loop"]
"""Before the module is hooked; when the optimizer is made; before forward, backward and `step()` of one step, and after
it; at the end of the loop. "loop": instead of the usual one."""


@dataclass(frozen=True)
class Row:
    """An operation and what comes of it."""

    name: str
    at: Moment
    act: Act
    expected: str
    """"same": what plain PyTorch's loop does. Else a part of the error."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of Ratel's optimizer."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of both optimizers."""


ROWS: list[Row] = []


def row(
    at: Moment, expected: str, *, settings: dict[str, object] | None = None, **options: object
) -> Callable[[Act], Act]:
    """The function is a row of the table."""

    def add(act: Act) -> Act:
        ROWS.append(Row(act.__name__.replace("_", " "), at, act, expected, options, settings or {}))
        return act

    return add


def usual_loop(loop: Loop, acts: Callable[[Moment], None]) -> None:
    for number in range(NUM_STEPS):
        act = acts if number == ACTS_IN else lambda _: None
        loop.optimizer.zero_grad()
        act("forward")
        loop.loss = loop.computed(number)
        act("backward")
        loop.loss.backward()
        act("step")
        loop.optimizer.step()
        act("stepped")


def trained(loop: Loop, row: Row) -> None:
    def acts(moment: Moment) -> None:
        if row.at == moment:
            row.act(loop)

    acts("made")
    if row.at == "loop":
        row.act(loop)
    else:
        usual_loop(loop, acts)
    acts("end")


def made_net() -> Net:
    torch.manual_seed(0)
    return Net()


def plain_loop(row: Row) -> dict[str, Tensors]:
    """The weights, and what AdamW has of those that it has updated."""
    loop = Loop(made_net(), is_plain=True)
    if row.at == "before":
        row.act(loop)
    loop.make_optimizer(**row.settings)
    trained(loop, row)
    return {
        name: {"weight": each.detach(), **loop.optimizer.state.get(each, {})}
        for name, each in loop.net.named_parameters()
    }


def hooked_loop(row: Row, directory: Path) -> dict[str, Tensors]:
    """As `plain_loop`."""
    loop = Loop(made_net(), is_plain=False, options=row.options)
    if row.at == "before":
        row.act(loop)
    with ratel.hook(loop.net, storage=[directory / "state"], blocks="layers") as loop.state:
        loop.make_optimizer(**row.settings)
        trained(loop, row)
        return dict(loop.state.state())


# Hooks.


def keep(_: torch.Tensor) -> None:
    """What a hook for accumulated gradients returns."""


@row("before", "same")
def a_hook_on_a_parameter_inside(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) % 2))


@row("before", "same")
def a_hook_on_a_parameter_inside_that_changes_nothing(loop: Loop) -> None:
    loop.inside.register_hook(lambda _: None)


@row("before", "same")
def a_hook_on_a_parameter_outside(loop: Loop) -> None:
    loop.outside.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@row("before", "same")
def a_hook_for_all_accumulated_gradients_outside(loop: Loop) -> None:
    loop.outside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(0.5)))


@row("before", "same")
def a_hook_for_all_accumulated_gradients_inside(loop: Loop) -> None:
    loop.inside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(torch.arange(WIDTH) % 2)))


@row("made", "same")
def a_hook_on_a_parameter_inside_later(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) % 2))


@row("step", "same")
def a_hook_on_a_parameter_inside_between_steps(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) % 2))


@row("made", "same")
def a_hook_on_a_parameter_outside_later(loop: Loop) -> None:
    loop.outside.register_hook(lambda gradient: gradient * 2)


@row("made", "same")
def a_hook_for_accumulated_gradients_inside_later(loop: Loop) -> None:
    loop.inside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.clamp_(-1e-3, 1e-3)))


@row("made", "same")
def a_hook_for_accumulated_gradients_outside_later(loop: Loop) -> None:
    loop.outside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.clamp_(-1e-3, 1e-3)))


@row("loop", "same")
def hooks_that_are_removed(loop: Loop) -> None:
    handles = [each.register_hook(lambda gradient: gradient * 3) for each in (loop.inside, loop.outside)]
    handles.append(loop.inside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(3))))

    def acts(_: Moment) -> None:
        while handles:
            handles.pop().remove()

    usual_loop(loop, acts)


@row("before", "same")
def a_hook_that_is_removed_before(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient * 3).remove()


@row("loop", "hook", accumulation_steps=2)
def a_hook_for_sums_inside(loop: Loop) -> None:
    loop.inside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(0.5)))
    of_two_rounds(loop)


@row("loop", "hook", accumulation_steps=2)
def a_hook_for_sums_outside(loop: Loop) -> None:
    loop.outside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(0.5)))
    of_two_rounds(loop)


@row("loop", "same", accumulation_steps=2)
def a_hook_in_two_rounds(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) % 2))
    of_two_rounds(loop)


@row("loop", "hook")
def a_hook_on_a_block_of_several_calls(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        (loop.computed(number) + loop.computed(number + 7)).backward()
        loop.optimizer.step()


@row("before", "same")
def a_forward_hook_on_a_block(loop: Loop) -> None:
    loop.net.layers[0].register_forward_hook(lambda module, given, output: output * 1.5)


@row("made", "same")
def a_forward_hook_on_a_block_later(loop: Loop) -> None:
    loop.net.layers[0].register_forward_hook(lambda module, given, output: output * 1.5)


@row("made", "same")
def a_forward_hook_within_a_block(loop: Loop) -> None:
    loop.net.layers[0].up.register_forward_hook(lambda module, given, output: output * 1.5)


@row("before", "same")
def a_forward_pre_hook_within_a_block(loop: Loop) -> None:
    loop.net.layers[0].up.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))


@row("made", "same")
def a_backward_hook_on_a_block(loop: Loop) -> None:
    loop.net.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@row("before", "same")
def a_backward_hook_within_a_block(loop: Loop) -> None:
    loop.net.layers[1].up.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@row("made", "same")
def a_backward_pre_hook_within_a_block(loop: Loop) -> None:
    loop.net.layers[1].up.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))


@row("made", "same")
def a_hook_on_the_module_that_is_removed(loop: Loop) -> None:
    loop.net.layers[1].register_forward_hook(lambda module, given, output: output * 1.5).remove()


@row("backward", "same")
def a_hook_on_the_loss(loop: Loop) -> None:
    loop.loss.register_hook(lambda gradient: gradient * 0.5)


@row("made", "same")
def a_hook_before_steps_that_changes_nothing(loop: Loop) -> None:
    loop.optimizer.register_step_pre_hook(lambda *_: None)


@row("made", "with its update, not in .grad")
def a_hook_before_steps_that_scales_gradients(loop: Loop) -> None:
    loop.optimizer.register_step_pre_hook(lambda *_: [each.grad.mul_(0.5) for each in loop.net.parameters()])


@row("made", "same")
def a_hook_after_steps_that_sets_the_rate(loop: Loop) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    loop.optimizer.register_step_post_hook(halve)


# Gradients between backward and step.


@row("step", "gradient")
def a_gradient_inside_set_to_none(loop: Loop) -> None:
    loop.inside.grad = None


@row("step", "gradient")
def a_gradient_outside_set_to_none(loop: Loop) -> None:
    loop.outside.grad = None


@row("step", "gradient")
def a_gradient_deleted(loop: Loop) -> None:
    del loop.inside.grad


@row("step", "gradient")
def all_gradients_set_to_none(loop: Loop) -> None:
    for each in loop.net.parameters():
        each.grad = None


@row("step", "gradient")
def a_gradient_inside_set_to_a_tensor(loop: Loop) -> None:
    loop.inside.grad = torch.ones(12, WIDTH)


@row("step", "gradient")
def a_gradient_outside_set_to_a_tensor(loop: Loop) -> None:
    loop.outside.grad = torch.ones(5)


@row("step", "with its update, not in .grad")
def gradients_scaled(loop: Loop) -> None:
    for each in loop.net.parameters():
        each.grad.mul_(0.5)


@row("step", "with its update, not in .grad")
def a_gradient_filled_with_zeros(loop: Loop) -> None:
    loop.inside.grad.zero_()


@row("step", "with its update, not in .grad")
def a_gradient_added_to(loop: Loop) -> None:
    loop.outside.grad.add_(1)


@row("step", "with its update, not in .grad")
def a_gradient_copied_to(loop: Loop) -> None:
    loop.outside.grad.copy_(torch.ones(5))


@row("step", "with its update, not in .grad")
def a_gradient_written_to_by_data(loop: Loop) -> None:
    loop.outside.grad.data.zero_()


@row("step", "with its update, not in .grad")
def a_gradient_with_noise(loop: Loop) -> None:
    loop.inside.grad += torch.ones(12, WIDTH)


@row("step", "with its update, not in .grad")
def a_row_of_a_gradient_set(loop: Loop) -> None:
    loop.inside.grad[0] = 0


@row("step", "with its update, not in .grad")
def gradients_written_to_by_numpy(loop: Loop) -> None:
    loop.outside.grad.numpy()[:] = 0


@row("step", "gradient")
def gradients_written_to_by_their_storage(loop: Loop) -> None:
    loop.outside.grad.untyped_storage().fill_(0)


@row("step", "with its update, not in .grad")
def norms_clipped(loop: Loop) -> None:
    clip_grad_norm_(loop.net.parameters(), 1e-2)


@row("step", "same")
def norms_below_the_limit(loop: Loop) -> None:
    loop.left = clip_grad_norm_(loop.net.parameters(), 1e4)


@row("step", "with its update, not in .grad")
def values_clipped(loop: Loop) -> None:
    clip_grad_value_(loop.net.parameters(), 1e-3)


@row("step", "with its update, not in .grad")
def gradients_that_are_read(loop: Loop) -> None:
    loop.left = [each.grad.clone() for each in loop.net.parameters()]


@row("forward", "gradient")
def a_gradient_inside_set_before(loop: Loop) -> None:
    loop.inside.grad = torch.ones(12, WIDTH)


@row("forward", "gradient")
def a_gradient_outside_set_before(loop: Loop) -> None:
    loop.outside.grad = torch.ones(5)


@row("before", "has a gradient already")
def gradients_from_before_it_is_hooked(loop: Loop) -> None:
    loop.computed(7).backward()


@row("step", "zero_grad() comes between backward and step()")
def the_modules_zero_grad_before_step(loop: Loop) -> None:
    loop.net.zero_grad()


@row("step", "zero_grad() comes between backward and step()")
def the_optimizers_zero_grad_before_step(loop: Loop) -> None:
    loop.optimizer.zero_grad()


@row("step", "zero_grad() comes between backward and step()")
def the_optimizers_zeros_before_step(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


@row("step", "gradient")
def the_zero_grad_of_a_block_before_step(loop: Loop) -> None:
    loop.net.layers[1].zero_grad()


@row("stepped", "same")
def the_zero_grad_of_a_block_after_step(loop: Loop) -> None:
    loop.net.layers[1].zero_grad()


@row("loop", "same")
def gradients_zeroed_by_the_module(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.net.zero_grad()
        loop.computed(number).backward()
        loop.optimizer.step()


@row("loop", "same")
def gradients_zeroed_in_place(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.computed(number).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)


@row("loop", "same")
def gradients_zeroed_by_hand(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        for each in loop.net.parameters():
            each.grad = None
        loop.computed(number).backward()
        loop.optimizer.step()


@row("loop", "zero_grad()")
def gradients_never_zeroed(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.computed(number).backward()
        loop.optimizer.step()


# Backwards and steps.


def of_two_rounds(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        for half in range(2):
            (loop.computed(2 * number + half) / 2).backward()
        loop.optimizer.step()


@row("end", "comes between backward and step()")
def no_step_after_the_last_backward(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.computed(9).backward()


@row("loop", "backward")
def a_step_left_out(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        if number != ACTS_IN:
            loop.optimizer.step()


@row("loop", "backward")
def the_first_step_left_out(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        if number:
            loop.optimizer.step()


@row("step", "comes between backward and step()")
def a_forward_before_step(loop: Loop) -> None:
    with torch.no_grad():
        loop.left = loop.computed(8)


@row("loop", "step() was called after a forward")
def a_forward_before_the_first_step(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        with torch.no_grad():
            loop.computed(8)
        loop.optimizer.step()


@row("loop", "step() was called after 2 backwards")
def two_backwards_before_a_step(loop: Loop) -> None:
    of_two_rounds(loop)


@row("loop", "same", accumulation_steps=2)
def two_rounds(loop: Loop) -> None:
    of_two_rounds(loop)


@row("loop", "same", accumulation_steps=2)
def a_round_alone_at_the_end(loop: Loop) -> None:
    of_two_rounds(loop)
    loop.optimizer.zero_grad()
    loop.computed(9).backward()
    loop.optimizer.step()


@row("loop", "same", accumulation_steps=2)
def a_round_that_is_dropped(loop: Loop) -> None:
    loop.computed(9).backward()
    of_two_rounds(loop)


@row("loop", "gradient", accumulation_steps=2)
def gradients_set_to_none_between_rounds(loop: Loop) -> None:
    loop.computed(9).backward()
    loop.inside.grad = None
    loop.computed(10).backward()
    loop.optimizer.step()


@row("loop", "same", accumulation_steps=2)
def a_step_whose_sums_are_left(loop: Loop) -> None:
    """And no step() for them."""
    of_two_rounds(loop)
    loop.optimizer.zero_grad()
    loop.computed(9).backward()


@row("stepped", "no backward came since the step before")
def a_step_without_backward(loop: Loop) -> None:
    loop.optimizer.step()


@row("loop", "same")
def a_closure(loop: Loop) -> None:
    for number in range(NUM_STEPS):

        def closure(number: int = number) -> float:
            loop.optimizer.zero_grad()
            loop.loss = loop.computed(number)
            loop.loss.backward()
            return float(loop.loss.detach())

        loop.optimizer.step(closure)


@row("loop", "same", accumulation_steps=2)
def a_graph_that_is_retained(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loss = loop.computed(number)
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()


@row("loop", "same")
def a_graph_of_a_graph(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"):  # torch's, once in a process: a reference cycle
            loop.computed(number).backward(create_graph=True)
        loop.optimizer.step()


@row("backward", "some gradients alone are asked for")
def a_gradient_penalty(loop: Loop) -> None:
    [gradient] = torch.autograd.grad(loop.loss, [loop.net.table.weight], create_graph=True)
    loop.loss = loop.loss + gradient.square().sum()


@row("backward", "on the drives")
def gradients_of_autograd_inside(loop: Loop) -> None:
    loop.left = torch.autograd.grad(loop.loss, [loop.inside], retain_graph=True, allow_unused=True)


@row("backward", "same")
def gradients_of_autograd_outside(loop: Loop) -> None:
    """Behind the blocks: no block has a part in it."""
    loop.left = torch.autograd.grad(loop.loss, [loop.net.out.weight], retain_graph=True)


@row("step", "same")
def gradients_of_something_else(loop: Loop) -> None:
    loop.left = torch.autograd.grad(loop.net.out(torch.ones(WIDTH)).sum(), [loop.net.out.weight])


@row("forward", "same")
def gradients_of_the_outside_before_forward(loop: Loop) -> None:
    loop.left = torch.autograd.grad(loop.net.out(torch.ones(WIDTH)).sum(), [loop.net.out.weight])


@row("backward", "some gradients alone are asked for")
def a_backward_for_some(loop: Loop) -> None:
    loop.loss.backward(inputs=[loop.net.table.weight], retain_graph=True)


@row("loop", "same")
def anomalies_looked_for(loop: Loop) -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        usual_loop(loop, lambda _: None)


@row("loop", "same")
def a_loss_scaler_that_is_off(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        scaler.scale(loop.computed(number)).backward()
        scaler.step(loop.optimizer)
        scaler.update()


@row("loop", "with its update, not in .grad")
def a_loss_scaler(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loop.computed(0)).backward()
    scaler.step(loop.optimizer)


@row("loop", "same")
def a_loss_of_the_outside_alone(loop: Loop) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        (loop.computed(number) + loop.net.out.weight.square().sum() + loop.net.table.weight.abs().sum()).backward()
        loop.optimizer.step()


# Parameters.


@row("forward", "was changed")
def the_data_of_a_parameter_outside(loop: Loop) -> None:
    loop.outside.data = torch.ones(5)


@row("forward", "was changed")
def the_data_of_a_parameter_outside_set_to_zero(loop: Loop) -> None:
    loop.outside.data.zero_()


@row("backward", "was changed")
def the_data_of_a_parameter_outside_between_forward_and_backward(loop: Loop) -> None:
    loop.outside.data.mul_(2)


@row("step", "was changed")
def the_data_of_a_parameter_outside_between_backward_and_step(loop: Loop) -> None:
    loop.outside.data.mul_(2)


@row("end", "was changed")
def the_data_of_a_parameter_outside_at_the_end(loop: Loop) -> None:
    loop.outside.data.copy_(torch.ones(5))


@row("made", "was changed")
def the_data_of_a_parameter_outside_at_the_beginning(loop: Loop) -> None:
    loop.outside.data.copy_(torch.ones(5))


@row("forward", "was changed")
def rows_of_a_table_exchanged(loop: Loop) -> None:
    loop.net.table.weight.data[[0, 1]] = loop.net.table.weight.data[[1, 0]]


@row("forward", "was changed")
def a_parameter_outside_written_to(loop: Loop) -> None:
    with torch.no_grad():
        loop.outside.add_(1)


@row("forward", "was changed")
def a_parameter_outside_written_to_by_numpy(loop: Loop) -> None:
    loop.outside.detach().numpy()[1] = 3


@row("forward", "was changed")
def a_parameter_outside_written_to_by_its_storage(loop: Loop) -> None:
    loop.outside.untyped_storage().fill_(0)


@row("forward", "was changed")
def a_parameter_outside_that_is_another_tensor(loop: Loop) -> None:
    with torch.no_grad():
        loop.outside.set_(torch.ones(5))


@row("forward", "was changed")
def a_head_that_is_initialised_again(loop: Loop) -> None:
    torch.manual_seed(4)
    loop.net.out.reset_parameters()


@row("before", "same")
def the_data_of_a_parameter_before(loop: Loop) -> None:
    loop.outside.data.zero_()
    loop.inside.data = torch.ones(12, WIDTH)


@row("forward", "on the drives")
def the_data_of_a_parameter_inside(loop: Loop) -> None:
    loop.inside.data = torch.ones(12, WIDTH)


@row("forward", "on the drives")
def the_data_of_a_parameter_inside_set_to_zero(loop: Loop) -> None:
    loop.inside.data.zero_()


@row("forward", "on the drives")
def a_parameter_inside_written_to(loop: Loop) -> None:
    with torch.no_grad():
        loop.inside.mul_(0.5)


@row("forward", "on the drives")
def a_parameter_inside_written_to_by_numpy(loop: Loop) -> None:
    loop.inside.detach().numpy()[0] = 3


@row("forward", "on the drives")
def a_parameter_inside_written_to_by_its_storage(loop: Loop) -> None:
    loop.inside.untyped_storage().fill_(1)


@row("forward", "on the drives")
def a_parameter_inside_that_is_another_tensor(loop: Loop) -> None:
    with torch.no_grad():
        loop.inside.set_(torch.ones(12, WIDTH))


@row("forward", "on the drives")
def a_block_that_is_initialised_again(loop: Loop) -> None:
    loop.net.layers[1].up.reset_parameters()


@row("made", "layers.1 has changed its own weights")
def a_block_that_writes_to_its_weights(loop: Loop) -> None:
    def clamp(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    loop.net.layers[1].up.register_forward_pre_hook(clamp)


@row("made", "layers.1 has changed its own weights")
def a_block_that_writes_to_the_data_of_its_weights(loop: Loop) -> None:
    loop.net.layers[1].up.register_forward_pre_hook(lambda module, _: keep(module.weight.data.clamp_(-0.1, 0.1)))


@row("made", "was changed")
def a_head_that_writes_to_its_weights(loop: Loop) -> None:
    loop.net.out.register_forward_pre_hook(lambda module, _: keep(module.weight.data.clamp_(-0.1, 0.1)))


@row("step", "on the drives")
def parameters_as_a_vector(loop: Loop) -> None:
    loop.left = parameters_to_vector(loop.net.parameters())


@row("stepped", "on the drives")
def a_moving_average_of_parameters(loop: Loop) -> None:
    loop.left = {name: each.detach().clone() for name, each in loop.net.named_parameters()}


@row("stepped", "weights of a hooked module are on its drives")
def an_averaged_model(loop: Loop) -> None:
    loop.left = AveragedModel(loop.net)


@row("stepped", "same")
def a_parameter_outside_that_is_read(loop: Loop) -> None:
    loop.left = loop.outside.detach().clone(), loop.net.table.weight.norm(), loop.net.out.state_dict()


@row("stepped", "same")
def what_parameters_are(loop: Loop) -> None:
    loop.left = [
        (name, each.shape, each.dtype, each.device, each.numel(), each.requires_grad, each.is_leaf, each.dim())
        for name, each in loop.net.named_parameters()
    ]


@row("forward", "requires_grad")
def a_parameter_outside_frozen(loop: Loop) -> None:
    loop.outside.requires_grad_(False)


@row("forward", "requires_grad")
def a_parameter_inside_frozen(loop: Loop) -> None:
    loop.inside.requires_grad = False


@row("backward", "requires_grad")
def a_parameter_outside_frozen_before_backward(loop: Loop) -> None:
    loop.outside.requires_grad_(False)


@row("step", "requires_grad")
def a_block_frozen_before_step(loop: Loop) -> None:
    loop.net.layers[1].requires_grad_(False)


@row("before", "same")
def parameters_frozen_before(loop: Loop) -> None:
    loop.outside.requires_grad_(False)
    loop.inside.requires_grad_(False)


@row("stepped", "same")
def a_parameter_frozen_and_trained_again(loop: Loop) -> None:
    for value in (False, True):
        loop.inside.requires_grad_(value)
        loop.outside.requires_grad_(value)


# The optimizer.


def usual_loop_with(loop: Loop, scheduler: lr_scheduler.LRScheduler) -> None:
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        loop.optimizer.step()
        scheduler.step()


@row("forward", "same")
def the_rate_set(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 1e-3


@row("forward", "same")
def a_rate_of_zero(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0


@row("backward", "same")
def the_rate_set_between_forward_and_backward(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 1e-3


@row("step", "lr was changed to 0.001 after backward")
def the_rate_set_between_backward_and_step(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 1e-3


@row("forward", "weight_decay must be Python's numbers")
def a_rate_that_is_a_tensor(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)


@row("loop", "weight_decay must be Python's numbers", settings={"lr": torch.tensor(1e-2)})
def a_tensor_as_rate_from_the_beginning(loop: Loop) -> None:
    usual_loop(loop, lambda _: None)


@row("forward", "weight_decay must be Python's numbers")
def a_rate_of_numpy_in_single_precision(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = torch.ones(1).numpy()[0]


@row("forward", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def the_decay_set(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["weight_decay"] = 0.5


@row("forward", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def the_betas_set(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


@row("step", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def the_betas_set_before_step(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


@row("end", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def the_epsilon_set_before_a_step(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.optimizer.param_groups[0]["eps"] = 0.5
    loop.computed(8).backward()
    loop.optimizer.step()


@row("forward", "maximize is not there")
def another_direction(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["maximize"] = True


@row("forward", "decay")
def decay_as_of_adam(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["decoupled_weight_decay"] = False


@row("forward", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def a_parameter_left_out_of_its_group(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["params"].pop()


@row("forward", "parameters of an optimizer were changed")
def a_group_that_is_added(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@row("loop", "same")
def a_scheduler_of_torch(loop: Loop) -> None:
    usual_loop_with(loop, lr_scheduler.CosineAnnealingLR(loop.optimizer, NUM_STEPS))


@row("loop", "same")
def a_scheduler_of_a_function(loop: Loop) -> None:
    usual_loop_with(loop, lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (step + 1)))


@row("loop", "same")
def schedulers_one_after_another(loop: Loop) -> None:
    parts = [lr_scheduler.LinearLR(loop.optimizer, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(loop.optimizer, 0.9)]
    usual_loop_with(loop, lr_scheduler.SequentialLR(loop.optimizer, parts, [2]))


@row("loop", "same")
def a_scheduler_that_looks_at_the_loss(loop: Loop) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0, factor=0.5)
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        loop.optimizer.step()
        scheduler.step(1.0)


@row("loop", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def a_scheduler_of_momentum(loop: Loop) -> None:
    usual_loop_with(loop, lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=9))


@row("loop", "same")
def a_cycle_of_the_rate_alone(loop: Loop) -> None:
    usual_loop_with(loop, lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=9, cycle_momentum=False))


@row("loop", "lr was changed")
def a_scheduler_before_step(loop: Loop) -> None:
    scheduler = lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for number in range(NUM_STEPS):
        loop.optimizer.zero_grad()
        loop.computed(number).backward()
        if number:
            scheduler.step()
        loop.optimizer.step()


@row("stepped", "moments")
def the_state_of_the_optimizer_cleared(loop: Loop) -> None:
    loop.optimizer.state.clear()


@row("stepped", "moments")
def the_state_of_a_parameter_read(loop: Loop) -> None:
    loop.left = loop.optimizer.state[loop.inside]


@row("stepped", "moments")
def the_state_of_a_parameter_written(loop: Loop) -> None:
    loop.optimizer.state[loop.inside] = {}


@row("made", "moments")
def the_state_of_a_parameter_written_at_the_beginning(loop: Loop) -> None:
    loop.optimizer.state[loop.inside] = {
        "step": torch.tensor(3.0), "exp_avg": torch.ones(12, WIDTH), "exp_avg_sq": torch.ones(12, WIDTH)
    }  # fmt: skip


@row("stepped", "moments")
def the_optimizers_state_set_anew(loop: Loop) -> None:
    from collections import defaultdict

    loop.optimizer.state = defaultdict(dict)


@row("stepped", "moments")
def the_state_of_the_optimizer_as_a_dictionary(loop: Loop) -> None:
    loop.left = loop.optimizer.state_dict()


@row("stepped", "moments")
def a_state_of_the_optimizer_loaded(loop: Loop) -> None:
    other = torch.optim.AdamW(made_net().parameters(), **SETTINGS)
    loop.optimizer.load_state_dict(other.state_dict())


@row("made", "same")
def the_state_of_an_optimizer_that_is_new(loop: Loop) -> None:
    """As accelerate does."""
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


@row("made", "moments")
def moments_loaded_at_the_beginning(loop: Loop) -> None:
    other = Loop(made_net(), is_plain=True)
    other.make_optimizer()
    usual_loop(other, lambda _: None)
    loop.optimizer.load_state_dict(other.optimizer.state_dict())


@row("stepped", "moments")
def an_optimizer_that_is_copied(loop: Loop) -> None:
    loop.left = copy.deepcopy(loop.optimizer)


@row("stepped", "moments")
def an_optimizer_that_is_pickled(loop: Loop) -> None:
    loop.left = pickle.dumps(loop.optimizer)


@row("step", "with its update, not in .grad")
def an_optimizer_of_torch_beside_it(loop: Loop) -> None:
    torch.optim.SGD(loop.net.parameters(), lr=0.1).step()


# Modules.


@row("stepped", "same")
def modes_of_the_module(loop: Loop) -> None:
    loop.net.eval()
    with torch.no_grad():
        loop.left = loop.computed(9)
    loop.net.train()


@row("forward", "same")
def a_module_that_goes_where_it_is(loop: Loop) -> None:
    loop.net.to("cpu")
    loop.net.to(torch.float32)


@row("forward", "same")
def the_same_dtype_by_name(loop: Loop) -> None:
    loop.net.float().cpu()


@row("forward", "stays where it is")
def another_dtype(loop: Loop) -> None:
    loop.net.half()


@row("forward", "stays where it is")
def another_dtype_by_to(loop: Loop) -> None:
    loop.net.to(torch.bfloat16)


@row("forward", "stays where it is")
def another_dtype_of_a_block(loop: Loop) -> None:
    loop.net.layers[0].double()


@row("forward", "stays where it is")
def another_device(loop: Loop) -> None:
    loop.net.to("meta")


@row("forward", "was changed")
def another_dtype_of_the_head(loop: Loop) -> None:
    loop.net.out.to(torch.bfloat16)


@row("forward", "on the drives")
def a_module_made_empty(loop: Loop) -> None:
    loop.net.to_empty(device="cpu")


@row("stepped", "weights of a hooked module are on its drives")
def a_module_as_a_dictionary(loop: Loop) -> None:
    loop.left = loop.net.state_dict()


@row("stepped", "weights of a hooked module are on its drives")
def a_dictionary_loaded_into_the_module(loop: Loop) -> None:
    loop.net.load_state_dict(made_net().state_dict())


@row("stepped", "was replaced")
def a_dictionary_assigned_to_the_head(loop: Loop) -> None:
    loop.net.out.load_state_dict(made_net().out.state_dict(), assign=True)


@row("stepped", "was changed")
def a_dictionary_loaded_into_the_head(loop: Loop) -> None:
    loop.net.out.load_state_dict(made_net().out.state_dict())


@row("stepped", "weights of a hooked module are on its drives")
def a_module_that_is_copied(loop: Loop) -> None:
    loop.left = copy.deepcopy(loop.net)


@row("stepped", "weights of a hooked module are on its drives")
def a_module_that_is_pickled(loop: Loop) -> None:
    loop.left = pickle.dumps(loop.net)


@row("stepped", "on the drives")
def parameters_that_are_saved(loop: Loop) -> None:
    import io

    torch.save(list(loop.net.parameters()), io.BytesIO())


@row("stepped", "was replaced")
def a_head_that_is_replaced(loop: Loop) -> None:
    loop.net.out = nn.Linear(WIDTH, 5)


@row("stepped", "was replaced")
def a_parameter_outside_that_is_replaced(loop: Loop) -> None:
    loop.net.out.bias = nn.Parameter(torch.ones(5))


@row("stepped", "was replaced")
def a_parameter_inside_that_is_replaced(loop: Loop) -> None:
    loop.net.layers[1].up.weight = nn.Parameter(torch.ones(12, WIDTH))


@row("stepped", "was replaced")
def a_block_that_is_replaced(loop: Loop) -> None:
    loop.net.layers[1] = Block()


@row("stepped", "was")
def blocks_that_are_exchanged(loop: Loop) -> None:
    layers = loop.net.layers
    layers[0], layers[1] = layers[1], layers[0]


@row("end", "was")
def blocks_that_are_exchanged_at_the_end(loop: Loop) -> None:
    layers = loop.net.layers
    layers[0], layers[1] = layers[1], layers[0]


@row("stepped", "was")
def a_block_that_is_removed(loop: Loop) -> None:
    del loop.net.layers[1]


@row("stepped", "was made after ratel.hook")
def a_block_that_is_added(loop: Loop) -> None:
    loop.net.layers.append(Block())


@row("stepped", "was made after ratel.hook")
def a_parameter_that_is_added(loop: Loop) -> None:
    loop.net.register_parameter("scale", nn.Parameter(torch.ones(1)))


@row("stepped", "was replaced")
def weights_that_are_tied_later(loop: Loop) -> None:
    loop.net.layers[1].up.weight = loop.net.layers[0].up.weight


@row("before", "same")
def weights_that_have_parametrizations(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.layers[1].up)
    parametrizations.weight_norm(loop.net.out)


@row("before", "same")
def weights_with_the_old_norm(loop: Loop) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.weight_norm(loop.net.layers[1].up)


@row("stepped", "on the drives")
def a_parametrization_that_is_added(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.layers[1].up)


@row("stepped", "was")
def a_parametrization_of_the_head_that_is_added(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.out)


@row("before", "same")
def a_buffer(loop: Loop) -> None:
    loop.net.layers[1].register_buffer("factor", torch.tensor(2.0))
    loop.net.layers[1].register_forward_hook(lambda module, given, output: output * module.factor)


@row("stepped", "same")
def a_buffer_that_is_set(loop: Loop) -> None:
    loop.net.register_buffer("seen", torch.ones(2), persistent=False)


OPERATIONS = [
    pytest.param(*case.values, marks=case.marks, id=operation.name)
    for operation, case in zip(ROWS, thinned(ROWS, every=8, offset=0), strict=True)
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().reshape(-1).view(torch.int32)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation(tmp_path: Path, operation: Row) -> None:
    if operation.expected != "same":
        with pytest.raises((ratel.RatelError, RuntimeError)) as caught:
            hooked_loop(operation, tmp_path)
        assert operation.expected in str(caught.value)
        return
    wanted, found = plain_loop(operation), hooked_loop(operation, tmp_path)
    assert {name: tensors.keys() for name, tensors in found.items()} == {
        name: tensors.keys() for name, tensors in wanted.items()
    }
    differing = [
        (name, key)
        for name, tensors in wanted.items()
        for key, each in tensors.items()
        if not torch.equal(bits(found[name][key]), bits(each))
    ]
    assert differing == []


def test_a_step_that_was_left_out_is_not_committed(tmp_path: Path) -> None:
    """Where the loop calls `step()`, closing drops what comes after its last call."""
    storage, steps = [tmp_path / "state"], []
    for number in range(2):
        net = made_net()
        with ratel.hook(net, storage=storage, blocks="layers") as state:
            steps.append(state.num_steps)
            if not number:
                loop = Loop(net, is_plain=False, state=state)
                loop.make_optimizer()
                usual_loop(loop, lambda _: None)
                before = {name: tensors["weight"] for name, tensors in state.state()}
                loop.optimizer.zero_grad()
                loop.computed(9).backward()
            else:
                assert all(torch.equal(before[name], tensors["weight"]) for name, tensors in state.state())
    assert steps == [0, NUM_STEPS]


@pytest.mark.parametrize(
    "act", [a_hook_on_a_parameter_inside, a_hook_on_a_parameter_outside, gradients_from_before_it_is_hooked]
)
def test_an_open_module_has_neither_hooks_nor_gradients(tmp_path: Path, act: Act) -> None:
    loop = Loop(made_net(), is_plain=False)
    act(loop)
    with pytest.raises(ratel.RatelError, match=r"(layers\.1\.up\.weight|out\.bias) has a hook|has a gradient already"):
        ratel.open(loop.net, sample={"tokens": torch.zeros(1, 4, dtype=torch.int64)}, storage=[tmp_path / "state"])
    assert loop.computed(0).isfinite()  # it is as it was


def test_what_is_on_the_drives_is_not_printed_as_zeros(tmp_path: Path) -> None:
    net = made_net()
    with ratel.hook(net, storage=[tmp_path / "state"], blocks="layers"):
        assert repr(net.layers[1].up.weight).startswith("AwayParameter(layers.1.up.weight is on the drives")


def test_hooks_of_a_module_that_is_built_on_drives(tmp_path: Path) -> None:
    """Before it is hooked, and where it is not hooked at all."""
    operation = Row("built", "before", a_hook_on_a_parameter_inside, "same")
    wanted = plain_loop(operation)
    for is_hooked in (True, False):
        with mock.patch.object(initialising, "_LEAST_BYTES", 1), ratel.init(storage=[tmp_path / f"{is_hooked}"]):
            loop = Loop(made_net(), is_plain=not is_hooked)
            a_hook_on_a_parameter_inside(loop)
            state = ratel.hook(loop.net, blocks="layers") if is_hooked else None
        with state or nullcontext():
            loop.make_optimizer()
            trained(loop, operation)
            found = (
                dict(state.state())
                if state
                else {name: {"weight": each.detach()} for name, each in loop.net.named_parameters()}
            )
        assert all(torch.equal(tensors["weight"], wanted[name]["weight"]) for name, tensors in found.items())
