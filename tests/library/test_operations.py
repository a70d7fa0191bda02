"""Each public operation on a module, its parameters, gradients and optimizer, in a loop of one's own: either weights,
moments and number of steps are those of the same loop in plain PyTorch, bit for bit, or an error names the operation.

The loop is written once, and runs on a plain module with torch's AdamW and on a hooked one with Ratel's. A row of the
table acts at one moment of it, or is a loop of its own.
"""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from collections.abc import Callable, Iterator
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
    left: object = None
    """What the operation returns: it lives as long as the loop."""

    @property
    def inside(self) -> nn.Parameter:
        """A parameter of a block."""
        return self.net.layers[1].up.weight  # type: ignore[no-any-return, union-attr]

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

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

    def steps(self) -> Iterator[int]:
        """Each begins with zero_grad()."""
        for number in range(NUM_STEPS):
            self.optimizer.zero_grad()
            yield number

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


def rows(expected: str, **at: dict[str, Act]) -> None:
    """Short rows of the table, by moment and name."""
    ROWS.extend(Row(name, moment, act, expected) for moment, acts in at.items() for name, act in acts.items())  # type: ignore[arg-type]


put = setattr
"""An assignment within an expression."""
put_item: Callable[..., object] = operator.setitem
drop_item: Callable[..., object] = operator.delitem


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
            loop.left = row.act(loop)

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


def masked(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (torch.arange(WIDTH) % 2)


def clamped(each: torch.Tensor) -> None:
    each.grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]


def scaled(module: nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
    return output * 1.5


def keep(_: torch.Tensor) -> None:
    """What a hook for accumulated gradients returns."""


def of_two_rounds(loop: Loop) -> None:
    for number in loop.steps():
        for half in range(2):
            (loop.computed(2 * number + half) / 2).backward()
        loop.optimizer.step()


def usual_loop_with(loop: Loop, scheduler: lr_scheduler.LRScheduler) -> None:
    for number in loop.steps():
        loop.computed(number).backward()
        loop.optimizer.step()
        scheduler.step()


# Hooks.

rows(
    "same",
    before={
        "a hook on a parameter inside": lambda loop: loop.inside.register_hook(masked),
        "a hook on a parameter inside that changes nothing": lambda loop: loop.inside.register_hook(lambda _: None),
        "a hook on a parameter outside": lambda loop: loop.outside.register_hook(
            lambda gradient: gradient.clamp(-1e-3, 1e-3)
        ),
        "a hook for all accumulated gradients outside": lambda loop: loop.outside.register_post_accumulate_grad_hook(
            lambda each: keep(each.grad.mul_(0.5))
        ),
        "a hook for all accumulated gradients inside": lambda loop: loop.inside.register_post_accumulate_grad_hook(
            lambda each: keep(each.grad.mul_(torch.arange(WIDTH) % 2))
        ),
        "a hook that is removed before": lambda loop: loop.inside.register_hook(lambda gradient: gradient * 3).remove(),
        "a forward hook on a block": lambda loop: loop.net.layers[0].register_forward_hook(scaled),
        "a forward pre hook within a block": lambda loop: loop.net.layers[0].up.register_forward_pre_hook(
            lambda module, given: (given[0] * 1.5,)
        ),
        "a backward hook within a block": lambda loop: loop.net.layers[1].up.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 0.5,)
        ),
    },
    made={
        "a hook on a parameter inside later": lambda loop: loop.inside.register_hook(masked),
        "a hook on a parameter outside later": lambda loop: loop.outside.register_hook(lambda gradient: gradient * 2),
        "a hook for accumulated gradients inside later": lambda loop: loop.inside.register_post_accumulate_grad_hook(
            clamped
        ),
        "a hook for accumulated gradients outside later": lambda loop: loop.outside.register_post_accumulate_grad_hook(
            clamped
        ),
        "a forward hook on a block later": lambda loop: loop.net.layers[0].register_forward_hook(scaled),
        "a forward hook within a block": lambda loop: loop.net.layers[0].up.register_forward_hook(scaled),
        "a backward hook on a block": lambda loop: loop.net.layers[1].register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 0.5,)
        ),
        "a backward pre hook within a block": lambda loop: loop.net.layers[1].up.register_full_backward_pre_hook(
            lambda module, outputs: (outputs[0] * 0.5,)
        ),
        "a hook on the module that is removed": lambda loop: loop.net.layers[1].register_forward_hook(scaled).remove(),
        "a hook before steps that changes nothing": lambda loop: loop.optimizer.register_step_pre_hook(lambda *_: None),
    },
    step={"a hook on a parameter inside between steps": lambda loop: loop.inside.register_hook(masked)},
    backward={"a hook on the loss": lambda loop: loop.loss.register_hook(lambda gradient: gradient * 0.5)},
)
rows(
    "with its update, not in .grad",
    made={
        "a hook before steps that scales gradients": lambda loop: loop.optimizer.register_step_pre_hook(
            lambda *_: [each.grad.mul_(0.5) for each in loop.net.parameters()]
        )
    },
)


@row("loop", "same")
def hooks_that_are_removed(loop: Loop) -> None:
    handles = [each.register_hook(lambda gradient: gradient * 3) for each in (loop.inside, loop.outside)]
    handles.append(loop.inside.register_post_accumulate_grad_hook(lambda each: keep(each.grad.mul_(3))))

    def acts(_: Moment) -> None:
        while handles:
            handles.pop().remove()

    usual_loop(loop, acts)


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
    loop.inside.register_hook(masked)
    of_two_rounds(loop)


@row("loop", "hook")
def a_hook_on_a_block_of_several_calls(loop: Loop) -> None:
    loop.inside.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for number in loop.steps():
        (loop.computed(number) + loop.computed(number + 7)).backward()
        loop.optimizer.step()


@row("made", "same")
def a_hook_after_steps_that_sets_the_rate(loop: Loop) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    loop.optimizer.register_step_post_hook(halve)


# Gradients between backward and step.

rows(
    "gradient",
    step={
        "a gradient inside set to none": lambda loop: put(loop.inside, "grad", None),
        "a gradient outside set to none": lambda loop: put(loop.outside, "grad", None),
        "a gradient deleted": lambda loop: delattr(loop.inside, "grad"),
        "a gradient inside set to a tensor": lambda loop: put(loop.inside, "grad", torch.ones(12, WIDTH)),
        "a gradient outside set to a tensor": lambda loop: put(loop.outside, "grad", torch.ones(5)),
        "gradients written to by their storage": lambda loop: loop.outside.grad.untyped_storage().fill_(0),
        "the zero grad of a block before step": lambda loop: loop.net.layers[1].zero_grad(),
    },
    forward={
        "a gradient inside set before": lambda loop: put(loop.inside, "grad", torch.ones(12, WIDTH)),
        "a gradient outside set before": lambda loop: put(loop.outside, "grad", torch.ones(5)),
    },
)
rows(
    "with its update, not in .grad",
    step={
        "a gradient filled with zeros": lambda loop: loop.inside.grad.zero_(),
        "a gradient added to": lambda loop: loop.outside.grad.add_(1),
        "a gradient copied to": lambda loop: loop.outside.grad.copy_(torch.ones(5)),
        "a gradient written to by data": lambda loop: loop.outside.grad.data.zero_(),
        "a row of a gradient set": lambda loop: put_item(loop.inside.grad, 0, 0),
        "gradients written to by numpy": lambda loop: put_item(loop.outside.grad.numpy(), slice(None), 0),
        "norms clipped": lambda loop: clip_grad_norm_(loop.net.parameters(), 1e-2),
        "values clipped": lambda loop: clip_grad_value_(loop.net.parameters(), 1e-3),
        "gradients that are read": lambda loop: [each.grad.clone() for each in loop.net.parameters()],
    },
)
rows(
    "same",
    step={"norms below the limit": lambda loop: clip_grad_norm_(loop.net.parameters(), 1e4)},
    stepped={"the zero grad of a block after step": lambda loop: loop.net.layers[1].zero_grad()},
)
rows(
    "has a gradient already",
    before={"gradients from before it is hooked": lambda loop: loop.computed(7).backward()},
)
rows(
    "zero_grad() comes between backward and step()",
    step={
        "the modules zero grad before step": lambda loop: loop.net.zero_grad(),
        "the optimizers zero grad before step": lambda loop: loop.optimizer.zero_grad(),
        "the optimizers zeros before step": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    },
)


@row("step", "gradient")
def all_gradients_set_to_none(loop: Loop) -> None:
    for each in loop.net.parameters():
        each.grad = None


@row("step", "with its update, not in .grad")
def gradients_scaled(loop: Loop) -> None:
    for each in loop.net.parameters():
        each.grad.mul_(0.5)


@row("step", "with its update, not in .grad")
def a_gradient_with_noise(loop: Loop) -> None:
    loop.inside.grad += torch.ones(12, WIDTH)


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

rows(
    "comes between backward and step()",
    step={"a forward before step": torch.no_grad()(lambda loop: loop.computed(8))},
)
rows(
    "step() was called after 2 backwards",
    loop={"two backwards before a step": of_two_rounds},
)
rows(
    "no backward came since the step before",
    stepped={"a step without backward": lambda loop: loop.optimizer.step()},
)
rows(
    "on the drives",
    backward={
        "gradients of autograd inside": lambda loop: torch.autograd.grad(
            loop.loss, [loop.inside], retain_graph=True, allow_unused=True
        )
    },
)
rows(
    "same",
    backward={
        "gradients of autograd outside": lambda loop: torch.autograd.grad(
            loop.loss, [loop.net.out.weight], retain_graph=True
        )
    },
    step={
        "gradients of something else": lambda loop: torch.autograd.grad(
            loop.net.out(torch.ones(WIDTH)).sum(), [loop.net.out.weight]
        )
    },
    forward={
        "gradients of the outside before forward": lambda loop: torch.autograd.grad(
            loop.net.out(torch.ones(WIDTH)).sum(), [loop.net.out.weight]
        )
    },
)
rows(
    "some gradients alone are asked for",
    backward={
        "a backward for some": lambda loop: loop.loss.backward(inputs=[loop.net.table.weight], retain_graph=True)
    },
)


@row("end", "comes between backward and step()")
def no_step_after_the_last_backward(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.computed(9).backward()


@row("loop", "backward")
def a_step_left_out(loop: Loop) -> None:
    for number in loop.steps():
        loop.computed(number).backward()
        if number != ACTS_IN:
            loop.optimizer.step()


@row("loop", "backward")
def the_first_step_left_out(loop: Loop) -> None:
    for number in loop.steps():
        loop.computed(number).backward()
        if number:
            loop.optimizer.step()


@row("loop", "step() was called after a forward")
def a_forward_before_the_first_step(loop: Loop) -> None:
    for number in loop.steps():
        loop.computed(number).backward()
        with torch.no_grad():
            loop.computed(8)
        loop.optimizer.step()


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
    for number in loop.steps():
        loss = loop.computed(number)
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()


@row("loop", "same")
def a_graph_of_a_graph(loop: Loop) -> None:
    for number in loop.steps():
        with warnings.catch_warnings(action="ignore"):  # torch's, once in a process: a reference cycle
            loop.computed(number).backward(create_graph=True)
        loop.optimizer.step()


@row("backward", "some gradients alone are asked for")
def a_gradient_penalty(loop: Loop) -> None:
    [gradient] = torch.autograd.grad(loop.loss, [loop.net.table.weight], create_graph=True)
    loop.loss = loop.loss + gradient.square().sum()


@row("loop", "same")
def anomalies_looked_for(loop: Loop) -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        usual_loop(loop, lambda _: None)


@row("loop", "same")
def a_loss_scaler_that_is_off(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number in loop.steps():
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
    for number in loop.steps():
        (loop.computed(number) + loop.net.out.weight.square().sum() + loop.net.table.weight.abs().sum()).backward()
        loop.optimizer.step()


@row("loop", "same", accumulation_steps=2)
def two_rounds(loop: Loop) -> None:
    of_two_rounds(loop)


# Parameters.

rows(
    "was changed",
    forward={
        "the data of a parameter outside": lambda loop: put(loop.outside, "data", torch.ones(5)),
        "the data of a parameter outside set to zero": lambda loop: loop.outside.data.zero_(),
        "rows of a table exchanged": lambda loop: put_item(
            loop.net.table.weight.data, [0, 1], loop.net.table.weight.data[[1, 0]]
        ),
        "a parameter outside written to": torch.no_grad()(lambda loop: loop.outside.add_(1)),
        "a parameter outside written to by numpy": lambda loop: put_item(loop.outside.detach().numpy(), 1, 3),
        "a parameter outside written to by its storage": lambda loop: loop.outside.untyped_storage().fill_(0),
        "a parameter outside that is another tensor": torch.no_grad()(lambda loop: loop.outside.set_(torch.ones(5))),
    },
    backward={"the data of a parameter outside between forward and backward": lambda loop: loop.outside.data.mul_(2)},
    step={"the data of a parameter outside between backward and step": lambda loop: loop.outside.data.mul_(2)},
    end={"the data of a parameter outside at the end": lambda loop: loop.outside.data.copy_(torch.ones(5))},
    made={
        "the data of a parameter outside at the beginning": lambda loop: loop.outside.data.copy_(torch.ones(5)),
        "a head that writes to its weights": lambda loop: loop.net.out.register_forward_pre_hook(
            lambda module, _: keep(module.weight.data.clamp_(-0.1, 0.1))
        ),
    },
)
rows(
    "on the drives",
    forward={
        "the data of a parameter inside": lambda loop: put(loop.inside, "data", torch.ones(12, WIDTH)),
        "the data of a parameter inside set to zero": lambda loop: loop.inside.data.zero_(),
        "a parameter inside written to": torch.no_grad()(lambda loop: loop.inside.mul_(0.5)),
        "a parameter inside written to by numpy": lambda loop: put_item(loop.inside.detach().numpy(), 0, 3),
        "a parameter inside written to by its storage": lambda loop: loop.inside.untyped_storage().fill_(1),
        "a parameter inside that is another tensor": torch.no_grad()(
            lambda loop: loop.inside.set_(torch.ones(12, WIDTH))
        ),
        "a block that is initialised again": lambda loop: loop.net.layers[1].up.reset_parameters(),
    },
    step={"parameters as a vector": lambda loop: parameters_to_vector(loop.net.parameters())},
    stepped={
        "a moving average of parameters": lambda loop: {
            name: each.detach().clone() for name, each in loop.net.named_parameters()
        }
    },
)
rows(
    "layers.1 has changed its own weights",
    made={
        "a block that writes to the data of its weights": lambda loop: loop.net.layers[1].up.register_forward_pre_hook(
            lambda module, _: keep(module.weight.data.clamp_(-0.1, 0.1))
        )
    },
)
rows(
    "weights of a hooked module are on its drives",
    stepped={"an averaged model": lambda loop: AveragedModel(loop.net)},
)
rows(
    "same",
    stepped={
        "a parameter outside that is read": lambda loop: (
            loop.outside.detach().clone(),
            loop.net.table.weight.norm(),
            loop.net.out.state_dict(),
        ),
        "what parameters are": lambda loop: [
            (name, each.shape, each.dtype, each.device, each.numel(), each.requires_grad, each.is_leaf, each.dim())
            for name, each in loop.net.named_parameters()
        ],
    },
)
rows(
    "requires_grad",
    forward={
        "a parameter outside frozen": lambda loop: loop.outside.requires_grad_(False),
        "a parameter inside frozen": lambda loop: put(loop.inside, "requires_grad", False),
    },
    backward={"a parameter outside frozen before backward": lambda loop: loop.outside.requires_grad_(False)},
    step={"a block frozen before step": lambda loop: loop.net.layers[1].requires_grad_(False)},
)


@row("forward", "was changed")
def a_head_that_is_initialised_again(loop: Loop) -> None:
    torch.manual_seed(4)
    loop.net.out.reset_parameters()


@row("before", "same")
def the_data_of_a_parameter_before(loop: Loop) -> None:
    loop.outside.data.zero_()
    loop.inside.data = torch.ones(12, WIDTH)


@row("made", "layers.1 has changed its own weights")
def a_block_that_writes_to_its_weights(loop: Loop) -> None:
    def clamp(module: nn.Module, _: object) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    loop.net.layers[1].up.register_forward_pre_hook(clamp)


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

rows(
    "same",
    forward={
        "the rate set": lambda loop: loop.group.update(lr=1e-3),
        "a rate of zero": lambda loop: loop.group.update(lr=0),
    },
    backward={"the rate set between forward and backward": lambda loop: loop.group.update(lr=1e-3)},
    loop={
        "a scheduler of torch": lambda loop: usual_loop_with(
            loop, lr_scheduler.CosineAnnealingLR(loop.optimizer, NUM_STEPS)
        ),
        "a scheduler of a function": lambda loop: usual_loop_with(
            loop, lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (step + 1))
        ),
        "a cycle of the rate alone": lambda loop: usual_loop_with(
            loop, lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=9, cycle_momentum=False)
        ),
    },
    made={
        "the state of an optimizer that is new": lambda loop: loop.optimizer.load_state_dict(
            loop.optimizer.state_dict()
        )
    },
)
rows(
    "lr was changed to 0.001 after backward",
    step={"the rate set between backward and step": lambda loop: loop.group.update(lr=1e-3)},
)
rows(
    "weight_decay must be Python's numbers",
    forward={
        "a rate that is a tensor": lambda loop: loop.group.update(lr=torch.tensor(1e-2)),
        "a rate of numpy in single precision": lambda loop: loop.group.update(lr=torch.ones(1).numpy()[0]),
    },
)
rows(
    "betas, eps, weight_decay or the parameters of an optimizer were changed",
    forward={
        "the decay set": lambda loop: loop.group.update(weight_decay=0.5),
        "the betas set": lambda loop: loop.group.update(betas=(0.5, 0.9)),
        "a parameter left out of its group": lambda loop: loop.group["params"].pop(),
    },
    step={"the betas set before step": lambda loop: loop.group.update(betas=(0.5, 0.9))},
    loop={
        "a scheduler of momentum": lambda loop: usual_loop_with(
            loop, lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=9)
        )
    },
)
rows(
    "maximize is not there",
    forward={"another direction": lambda loop: loop.group.update(maximize=True)},
)
rows(
    "decay",
    forward={"decay as of adam": lambda loop: loop.group.update(decoupled_weight_decay=False)},
)
rows(
    "parameters of an optimizer were changed",
    forward={
        "a group that is added": lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    },
)
rows(
    "moments",
    stepped={
        "the state of the optimizer cleared": lambda loop: loop.optimizer.state.clear(),
        "the state of a parameter read": lambda loop: loop.optimizer.state[loop.inside],
        "the state of a parameter written": lambda loop: put_item(loop.optimizer.state, loop.inside, {}),
        "the state of the optimizer as a dictionary": lambda loop: loop.optimizer.state_dict(),
        "an optimizer that is copied": lambda loop: copy.deepcopy(loop.optimizer),
        "an optimizer that is pickled": lambda loop: pickle.dumps(loop.optimizer),
    },
    made={
        "the state of a parameter written at the beginning": lambda loop: put_item(
            loop.optimizer.state,
            loop.inside,
            {"step": torch.tensor(3.0), "exp_avg": torch.ones(12, WIDTH), "exp_avg_sq": torch.ones(12, WIDTH)},
        )
    },
)
rows(
    "with its update, not in .grad",
    step={"an optimizer of torch beside it": lambda loop: torch.optim.SGD(loop.net.parameters(), lr=0.1).step()},
)


@row("end", "betas, eps, weight_decay or the parameters of an optimizer were changed")
def the_epsilon_set_before_a_step(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.group["eps"] = 0.5
    loop.computed(8).backward()
    loop.optimizer.step()


@row("loop", "same")
def schedulers_one_after_another(loop: Loop) -> None:
    parts = [lr_scheduler.LinearLR(loop.optimizer, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(loop.optimizer, 0.9)]
    usual_loop_with(loop, lr_scheduler.SequentialLR(loop.optimizer, parts, [2]))


@row("loop", "same")
def a_scheduler_that_looks_at_the_loss(loop: Loop) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0, factor=0.5)
    for number in loop.steps():
        loop.computed(number).backward()
        loop.optimizer.step()
        scheduler.step(1.0)


@row("loop", "lr was changed")
def a_scheduler_before_step(loop: Loop) -> None:
    scheduler = lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    for number in loop.steps():
        loop.computed(number).backward()
        if number:
            scheduler.step()
        loop.optimizer.step()


@row("stepped", "moments")
def the_optimizers_state_set_anew(loop: Loop) -> None:
    from collections import defaultdict

    loop.optimizer.state = defaultdict(dict)


@row("stepped", "moments")
def a_state_of_the_optimizer_loaded(loop: Loop) -> None:
    other = torch.optim.AdamW(made_net().parameters(), **SETTINGS)
    loop.optimizer.load_state_dict(other.state_dict())


@row("made", "moments")
def moments_loaded_at_the_beginning(loop: Loop) -> None:
    other = Loop(made_net(), is_plain=True)
    other.make_optimizer()
    usual_loop(other, lambda _: None)
    loop.optimizer.load_state_dict(other.optimizer.state_dict())


@row("loop", "weight_decay must be Python's numbers", settings={"lr": torch.tensor(1e-2)})
def a_tensor_as_rate_from_the_beginning(loop: Loop) -> None:
    usual_loop(loop, lambda _: None)


# Modules.

rows(
    "same",
    forward={"the same dtype by name": lambda loop: loop.net.float().cpu()},
    stepped={"a buffer that is set": lambda loop: loop.net.register_buffer("seen", torch.ones(2), persistent=False)},
)
rows(
    "stays where it is",
    forward={
        "another dtype": lambda loop: loop.net.half(),
        "another dtype by to": lambda loop: loop.net.to(torch.bfloat16),
        "another dtype of a block": lambda loop: loop.net.layers[0].double(),
        "another device": lambda loop: loop.net.to("meta"),
    },
)
rows(
    "was changed",
    forward={"another dtype of the head": lambda loop: loop.net.out.to(torch.bfloat16)},
    stepped={
        "a dictionary loaded into the head": lambda loop: loop.net.out.load_state_dict(made_net().out.state_dict())
    },
)
rows(
    "on the drives",
    forward={"a module made empty": lambda loop: loop.net.to_empty(device="cpu")},
    stepped={"a parametrization that is added": lambda loop: parametrizations.weight_norm(loop.net.layers[1].up)},
)
rows(
    "weights of a hooked module are on its drives",
    stepped={
        "a module as a dictionary": lambda loop: loop.net.state_dict(),
        "a dictionary loaded into the module": lambda loop: loop.net.load_state_dict(made_net().state_dict()),
        "a module that is copied": lambda loop: copy.deepcopy(loop.net),
        "a module that is pickled": lambda loop: pickle.dumps(loop.net),
    },
)
rows(
    "was replaced",
    stepped={
        "a dictionary assigned to the head": lambda loop: loop.net.out.load_state_dict(
            made_net().out.state_dict(), assign=True
        ),
        "a head that is replaced": lambda loop: put(loop.net, "out", nn.Linear(WIDTH, 5)),
        "a parameter outside that is replaced": lambda loop: put(loop.net.out, "bias", nn.Parameter(torch.ones(5))),
        "a parameter inside that is replaced": lambda loop: put(
            loop.net.layers[1].up, "weight", nn.Parameter(torch.ones(12, WIDTH))
        ),
        "a block that is replaced": lambda loop: put_item(loop.net.layers, 1, Block()),
        "weights that are tied later": lambda loop: put(loop.net.layers[1].up, "weight", loop.net.layers[0].up.weight),
    },
)
rows(
    "was",
    stepped={
        "a block that is removed": lambda loop: drop_item(loop.net.layers, 1),
        "a parametrization of the head that is added": lambda loop: parametrizations.weight_norm(loop.net.out),
    },
)
rows(
    "was made after ratel.hook",
    stepped={
        "a block that is added": lambda loop: loop.net.layers.append(Block()),
        "a parameter that is added": lambda loop: loop.net.register_parameter("scale", nn.Parameter(torch.ones(1))),
    },
)


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


@row("stepped", "on the drives")
def parameters_that_are_saved(loop: Loop) -> None:
    import io

    torch.save(list(loop.net.parameters()), io.BytesIO())


@row("stepped", "was")
def blocks_that_are_exchanged(loop: Loop) -> None:
    layers = loop.net.layers
    layers[0], layers[1] = layers[1], layers[0]


@row("end", "was")
def blocks_that_are_exchanged_at_the_end(loop: Loop) -> None:
    layers = loop.net.layers
    layers[0], layers[1] = layers[1], layers[0]


@row("before", "same")
def weights_that_have_parametrizations(loop: Loop) -> None:
    parametrizations.weight_norm(loop.net.layers[1].up)
    parametrizations.weight_norm(loop.net.out)


@row("before", "same")
def weights_with_the_old_norm(loop: Loop) -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.nn.utils.weight_norm(loop.net.layers[1].up)


@row("before", "same")
def a_buffer(loop: Loop) -> None:
    loop.net.layers[1].register_buffer("factor", torch.tensor(2.0))
    loop.net.layers[1].register_forward_hook(lambda module, given, output: output * module.factor)


ACTS = {row.name: row.act for row in ROWS}
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
    "name",
    ["a hook on a parameter inside", "a hook on a parameter outside", "gradients from before it is hooked"],
)
def test_an_open_module_has_neither_hooks_nor_gradients(tmp_path: Path, name: str) -> None:
    loop = Loop(made_net(), is_plain=False)
    ACTS[name](loop)
    with pytest.raises(ratel.RatelError, match=r"(layers\.1\.up\.weight|out\.bias) has a hook|has a gradient already"):
        ratel.open(loop.net, sample={"tokens": torch.zeros(1, 4, dtype=torch.int64)}, storage=[tmp_path / "state"])
    assert loop.computed(0).isfinite()  # it is as it was


def test_what_is_on_the_drives_is_not_printed_as_zeros(tmp_path: Path) -> None:
    net = made_net()
    with ratel.hook(net, storage=[tmp_path / "state"], blocks="layers"):
        assert repr(net.layers[1].up.weight).startswith("AwayParameter(layers.1.up.weight is on the drives")


def test_hooks_of_a_module_that_is_built_on_drives(tmp_path: Path) -> None:
    """Before it is hooked, and where it is not hooked at all."""
    operation = Row("built", "before", ACTS["a hook on a parameter inside"], "same")
    wanted = plain_loop(operation)
    for is_hooked in (True, False):
        with mock.patch.object(initialising, "_LEAST_BYTES", 1), ratel.init(storage=[tmp_path / f"{is_hooked}"]):
            loop = Loop(made_net(), is_plain=not is_hooked)
            operation.act(loop)
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
