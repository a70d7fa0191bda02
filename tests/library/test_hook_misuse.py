"""What a hooked module cannot do ends in one error that says so, and the next step is as if it had not been tried."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ratel_cli as ratel
from ratel_cli.engine.steps.horizontal import HorizontalEngine
from tests.library.nets import NETS
from tests.library.test_hook import LEARNING_RATE, assert_same, built, net_steps, saved, train_plainly

NET = "sequential"


class Opened:
    """A hooked module, its optimizer, and a batch."""

    def __init__(self, directory: Path) -> None:
        self.plain = built(NET)
        self.model = copy.deepcopy(self.plain)
        self.state = ratel.hook(self.model, storage=[directory / "state"])
        self.optimizer = ratel.AdamW(self.model, lr=LEARNING_RATE)
        [[self.batch]] = net_steps(NET, 1, 1)

    def loss(self) -> torch.Tensor:
        return NETS[NET].loss(self.model, self.batch)

    def fail_in_backward(self) -> None:
        def raise_error(_: torch.Tensor) -> None:
            raise ValueError("in the middle of a backward")

        output = self.model[:2](self.batch.inputs["input"])
        output.register_hook(raise_error)
        with pytest.raises(ValueError, match="in the middle"):
            self.model[2:](output).sum().backward()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    with made.state:
        yield made


def two_backwards_through_one_graph(opened: Opened) -> None:
    loss = opened.loss()
    loss.backward(retain_graph=True)
    opened.optimizer.step()
    loss.backward()


def a_second_derivative(opened: Opened) -> None:
    loss = opened.loss()
    values = opened.model(opened.batch.inputs["input"].requires_grad_())
    [gradient] = torch.autograd.grad(values.sum() + loss, opened.batch.inputs["input"], create_graph=True)
    gradient.sum().backward()


def a_backward_within_a_backward(opened: Opened) -> None:
    values = opened.batch.inputs["input"].requires_grad_()
    checkpoint(opened.model, values, use_reentrant=True).sum().backward()


def rates_that_differ(opened: Opened) -> None:
    first, second, *others = opened.model.parameters()
    ratel.AdamW([{"params": [first], "lr": 1.0}, {"params": [second, *others], "lr": 2.0}])


def decays_that_differ(opened: Opened) -> None:
    first, second, *others = opened.model.parameters()
    ratel.AdamW([{"params": [first], "weight_decay": 1.0}, {"params": [second, *others], "weight_decay": 2.0}])


def an_optimizer_that_was_replaced(opened: Opened) -> None:
    ratel.AdamW(opened.model)
    opened.loss().backward()
    opened.optimizer.step()


def an_optimizer_between_forward_and_backward(opened: Opened) -> None:
    loss = opened.loss()
    ratel.AdamW(opened.model)
    loss.backward()


def an_optimizer_within_a_step(opened: Opened) -> None:
    ratel.AdamW(opened.model, accumulation_steps=2)
    opened.loss().backward()
    ratel.AdamW(opened.model)


def a_frozen_block_and_an_optimizer(opened: Opened) -> None:
    opened.model[0].requires_grad_(requires_grad=False)
    ratel.AdamW(opened.model)


def weights_of_a_call(opened: Opened) -> None:
    zeros = {name: torch.zeros_like(each) for name, each in opened.plain.named_parameters()}
    torch.func.functional_call(opened.model, zeros, (opened.batch.inputs["input"],))


def a_rate_that_is_no_number(opened: Opened) -> None:
    opened.optimizer.param_groups[0]["lr"] = float("nan")
    try:
        opened.loss().backward()
    finally:
        opened.optimizer.param_groups[0]["lr"] = LEARNING_RATE


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (two_backwards_through_one_graph, "comes after a step that has changed its weights"),
        (a_second_derivative, "some gradients alone are asked for"),
        (a_backward_within_a_backward, "has a backward within a backward, in a checkpoint around it"),
        (lambda opened: print(opened.model[0].weight + 1), "0.weight is on the drives"),
        (lambda opened: ratel.hook(opened.model, storage=["elsewhere"]), "this Sequential is hooked already"),
        (rates_that_differ, "groups of parameters have lr 1.0 and 2.0"),
        (decays_that_differ, "groups of parameters have weight_decay [1.0, 2.0]"),
        (
            lambda opened: ratel.AdamW(list(opened.model.parameters())[:2]),
            "the optimizer has 2 parameters, and Sequential 6 that are trained",
        ),
        (an_optimizer_that_was_replaced, "another optimizer was made after this one"),
        (an_optimizer_between_forward_and_backward, "this forward ran before the optimizer was made"),
        (an_optimizer_within_a_step, "an optimizer is made while gradients wait"),
        (a_frozen_block_and_an_optimizer, "requires_grad of 0.weight was changed after ratel.hook"),
        (weights_of_a_call, "0.weight was replaced, by torch.func.functional_call for instance"),
        (lambda opened: print(opened.model[0].weight.T), "0.weight is on the drives"),
        (lambda opened: ratel.AdamW(nn.Linear(2, 2)), "the optimizer's parameters are not those of a hooked module"),
        (
            lambda opened: ratel.Optimizer(torch.optim.SGD(opened.model.parameters())),
            "the optimizer is SGD; Ratel has AdamW",
        ),
        (
            lambda opened: ratel.Optimizer(torch.optim.Adam(opened.model.parameters(), weight_decay=0.1)),
            "Adam with weight_decay is not AdamW",
        ),
        (
            lambda opened: ratel.Optimizer(torch.optim.AdamW(opened.model.parameters(), amsgrad=True)),
            "amsgrad is not there",
        ),
        (lambda opened: ratel.AdamW(opened.model, accumulation_steps=0), "accumulation_steps must be at least 1"),
        (lambda opened: ratel.AdamW(opened.model, max_grad_norm=-1.0), "max_grad_norm must be above 0"),
        (a_rate_that_is_no_number, "lr must be a number from 0 on"),
    ],
)
def test_misuse_gives_one_clear_error(opened: Opened, misuse: Callable[[Opened], None], message: str) -> None:
    with pytest.raises(ratel.RatelError) as caught:
        misuse(opened)
    assert message in str(caught.value)


def test_what_failed_is_as_if_it_had_not_been(tmp_path: Path, opened: Opened) -> None:
    train_plainly(NET, opened.plain, [[opened.batch]] * 2)

    opened.loss().backward()
    opened.fail_in_backward()
    opened.loss().backward()
    assert opened.state.num_steps == 2
    assert_same(saved(opened.state, tmp_path), opened.plain)


def test_after_a_backward_that_failed_forward_comes_first(opened: Opened) -> None:
    loss = opened.loss()
    opened.fail_in_backward()
    with pytest.raises(ratel.RatelError, match="a backward failed before this one"):
        loss.backward()
    opened.loss().backward()
    assert opened.state.num_steps == 1


def test_a_forward_that_failed_is_not_waited_for(opened: Opened) -> None:
    caught = list[BaseException]()
    with pytest.raises(RuntimeError) as error:
        opened.model(torch.zeros(2, 3))
    caught.append(error.value)  # as a debugger does, with all that its frames refer to
    opened.loss().backward()
    assert opened.state.num_steps == 1


def test_a_step_that_is_not_finite_is_not_applied(tmp_path: Path, opened: Opened) -> None:
    train_plainly(NET, opened.plain, [[opened.batch]])
    with pytest.raises(ratel.RatelError, match=r"step 1: the gradient of 0\.weight is not finite; step 0 is saved"):
        (opened.loss() * torch.inf).backward()
    opened.loss().backward()
    assert_same(saved(opened.state, tmp_path), opened.plain)


def test_a_closed_module_says_so(opened: Opened) -> None:
    loss = opened.loss()
    opened.state.close()
    opened.state.close()
    with pytest.raises(ratel.RatelError, match="the hooked module is closed"):
        opened.loss()
    with pytest.raises(ratel.RatelError, match="before the hooked module was closed"):
        loss.backward()
    with pytest.raises(ratel.RatelError, match="the hooked module is closed"):
        opened.state.save("out")


def test_a_state_that_is_deleted_meanwhile_is_told_of(tmp_path: Path, opened: Opened) -> None:
    opened.loss().backward()
    opened.state.verify()
    shutil.rmtree(tmp_path / "state")
    opened.loss().backward()
    with pytest.warns(UserWarning, match=r"state/ratel\.store was deleted while it is in use"):
        opened.state.save(tmp_path / "out")
    assert opened.state.num_steps == 2


def test_no_optimizer_no_backward(tmp_path: Path) -> None:
    model = built(NET)
    [[batch]] = net_steps(NET, 1, 1)
    with ratel.hook(model, storage=[tmp_path / "state"]):
        with pytest.raises(ratel.RatelError, match="the hooked module has no optimizer"):
            NETS[NET].loss(model, batch).backward()
        ratel.AdamW(model)
        NETS[NET].loss(model, batch).backward()


class Bypassing(nn.Module):
    """Its blocks do what cannot be computed again from their arguments."""

    def __init__(self, does: Callable[[nn.Linear, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Bypassing(does) for _ in range(2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        left = dict[str, torch.Tensor]()
        hidden = input * 1
        for layer in self.layers:
            hidden = layer(hidden, left)
        return hidden


class _Bypassing(nn.Module):
    def __init__(self, does: Callable[[nn.Linear, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(16, 16), does

    def forward(self, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.does(self.linear, hidden, left)


def leaves_tensors(linear: nn.Linear, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
    left["hidden"] = linear(hidden)
    return hidden


def writes_to_its_input(linear: nn.Linear, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
    return hidden.add_(linear(hidden))


def takes_from_elsewhere(linear: nn.Linear, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
    return linear(hidden) * SCALE


def leaves_on_itself(linear: nn.Linear, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = linear(hidden)
    linear.auxiliary = hidden.square().mean()  # type: ignore[assignment]
    return hidden


def draws_of_its_own(linear: nn.Linear, hidden: torch.Tensor, left: dict[str, torch.Tensor]) -> torch.Tensor:
    return linear(hidden) * random.random()


SCALE = nn.Parameter(torch.ones(16))


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (leaves_tensors, "layers.0 leaves tensors in what it gets"),
        (writes_to_its_input, "layers.0 changes what it gets in place"),
        (takes_from_elsewhere, "layers.0 uses a tensor with a gradient that it does not get as an argument"),
        (leaves_on_itself, "layers.1 has made a tensor that the loss uses, and does not return it"),
        (draws_of_its_own, "layers.1 computes something else when it is run again for backward"),
    ],
)
def test_what_bypasses_autograd(
    tmp_path: Path, does: Callable[[nn.Linear, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor], message: str
) -> None:
    model = Bypassing(does)

    def step() -> None:
        loss = model(torch.randn(2, 16)).sum()
        loss = loss + sum(getattr(layer.linear, "auxiliary", 0.0) for layer in model.layers)
        loss.backward()

    with ratel.hook(model, storage=[tmp_path / "state"]):
        ratel.AdamW(model)
        with pytest.raises(ratel.RatelError) as caught:
            step()
    assert message in str(caught.value)


class Overlapping(nn.Module):
    """Blocks that return a tensor and a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Overlapping(16, 16) for _ in range(3))

    def forward(self, hidden: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        for layer in self.layers:
            hidden, part = layer(hidden)
            hidden = hidden.mul_(2) if in_place else hidden * 2
            hidden = torch.tanh(hidden + part.mean(dim=1, keepdim=True))
        return hidden.sum()


class _Overlapping(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = super().forward(hidden)
        return hidden, hidden[:, :8]


def test_a_part_of_a_result_is_no_copy(tmp_path: Path) -> None:
    plain = Overlapping()
    model, hidden = copy.deepcopy(plain), torch.randn(2, 16)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    plain(hidden, in_place=False).backward()
    optimizer.step()
    with ratel.hook(model, storage=[tmp_path / "state"]) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        with pytest.raises(RuntimeError, match="modified inplace"):
            model(hidden, in_place=True)
        model(hidden, in_place=False).backward()
        assert_same(saved(state, tmp_path), plain)


def test_a_checkpoint_around_blocks_is_as_in_plain_pytorch(tmp_path: Path) -> None:
    plain = built(NET)
    model = copy.deepcopy(plain)
    [batches] = net_steps(NET, 1, 3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    with ratel.hook(model, storage=[tmp_path / "state"]) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        for batch in batches:
            for module in (plain, model):
                values = checkpoint(module, batch.inputs["input"], use_reentrant=False)
                (values - batch.target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert state.num_steps == 3
        assert_same(saved(state, tmp_path), plain)


def test_a_parameter_that_is_used_outside_of_its_block(tmp_path: Path) -> None:
    net = NETS["dit"]
    model = built("dit")
    [[batch]] = net_steps("dit", 1, 1)
    with ratel.hook(model, storage=[tmp_path / "state"]), pytest.raises(ratel.RatelError) as caught:
        net.loss(model, batch)
    assert "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1.weight is on the drives" in str(caught.value)
    assert "outside=[...]" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Linear(4, 4), {}, "Linear has no list of blocks"),
        (NETS[NET].build, {"blocks": "layers"}, "blocks: Sequential has no module 'layers'"),
        (NETS[NET].build, {"blocks": "1"}, "blocks: 1 has no parameters"),
        (NETS["bert"].build, {"blocks": ["bert.encoder", "bert.encoder.layer"]}, "is within another one"),
        (NETS[NET].build, {"outside": ["layers"]}, "outside: Sequential has no module 'layers'"),
        (lambda: NETS[NET].build().half(), {}, "0.weight is torch.float16"),
        (lambda: nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 4)), {}, "0.weight has no elements"),
        (NETS[NET].build, {"storage": None}, "hook needs storage"),
        (NETS[NET].build, {"storage": "state"}, "storage must be a list of directories"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_cannot_be_hooked(
    tmp_path: Path, build: Callable[[], nn.Module], options: dict[str, object], message: str
) -> None:
    options = {"storage": [tmp_path / "state"], **options}
    with pytest.raises(ratel.RatelError) as caught:
        ratel.hook(build(), **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_writing_to_what_is_outside_is_an_error(tmp_path: Path) -> None:
    model = built("gpt2")
    [[batch]] = net_steps("gpt2", 1, 1)
    with ratel.hook(model, storage=[tmp_path / "state"]):
        ratel.AdamW(model)
        NETS["gpt2"].loss(model, batch).backward()
        with torch.no_grad():
            model.transformer.ln_f.weight.clamp_(0, 1)
        with pytest.raises(ratel.RatelError, match=r"ln_f\.weight was changed by other code than its update"):
            NETS["gpt2"].loss(model, batch).backward()


def test_what_fails_while_it_is_hooked_is_closed(tmp_path: Path) -> None:
    model = built(NET)
    with mock.patch.object(HorizontalEngine, "_bind_outside", side_effect=ratel.RatelError("no memory")):
        with pytest.raises(ratel.RatelError, match="no memory"):
            ratel.hook(model, storage=[tmp_path / "state"])
        assert "forward" not in vars(model[0])
    ratel.hook(model, storage=[tmp_path / "state"]).close()


def test_graphs_that_wait_are_named(opened: Opened) -> None:
    losses = [opened.loss()]
    opened.loss().backward()
    with pytest.warns(UserWarning, match="3 calls of blocks have a graph and had no backward"):
        losses.append(opened.loss())
    assert opened.state.num_steps == 0


def test_a_filled_cache_is_an_error(tmp_path: Path) -> None:
    model = built("llama")
    [[batch]] = net_steps("llama", 1, 1)
    with ratel.hook(model, storage=[tmp_path / "state"]):
        with torch.no_grad():
            cache = model(**batch.inputs, use_cache=True).past_key_values
        with pytest.raises(ratel.RatelError, match="gets a cache of keys and values that has some"):
            model(**batch.inputs, past_key_values=cache)


def test_the_state_of_other_parameters_is_never_replaced(tmp_path: Path) -> None:
    ratel.hook(built(NET), storage=[tmp_path / "state"]).close()
    with pytest.raises(ratel.RatelError, match="a training state that was made with other parameters"):
        ratel.hook(built("gpt2"), storage=[tmp_path / "state"])
    ratel.hook(built(NET), storage=[tmp_path / "state"]).close()


def test_files_of_others_are_never_replaced(tmp_path: Path, opened: Opened) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("mine")
    with pytest.raises(ratel.RatelError, match="Ratel did not make it"):
        opened.state.save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_text() == "mine"


def test_a_parameter_that_is_made_after_hook_is_not_the_optimizers(opened: Opened) -> None:
    opened.model.register_parameter("late", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ratel.RatelError, match="'late' was made after"):
        ratel.AdamW(opened.model)
