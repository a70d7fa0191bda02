"""What the caller has set for all of torch around a loop, or compiled: the bits are those of plain PyTorch, or an error
of Ratel's own says what is in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import ratel_cli as ratel
from tests.e2e.runs import measured_briefly
from tests.library.test_operations import Net, made_net
from tests.tiers import rotating, thinned

Context = Callable[[], AbstractContextManager[object]]
Change = Callable[[Net], nn.Module]
Tensors = dict[str, torch.Tensor]


@contextmanager
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def meta() -> torch.device:
    return torch.device("meta")


def batch(number: int) -> Tensors:
    generator = torch.Generator().manual_seed(number)
    return {
        "tokens": torch.randint(11, (3, 4), generator=generator, device="cpu"),
        "target": torch.randn(3, 4, 5, generator=generator, device="cpu", dtype=torch.float32),
    }


def loss_of(output: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    return (output - tensors["target"]).square().sum()


def trained_plainly(net: nn.Module) -> Tensors:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0)
    for number in range(2):
        optimizer.zero_grad()
        tensors = batch(number)
        loss_of(net(tensors["tokens"]), tensors).div(3).backward()
        optimizer.step()
    return {name: each.detach().clone() for name, each in net.named_parameters()}


def trained_hooked(net: nn.Module, directory: Path, *, hooked_in: Context, looks_in: Context) -> Tensors:
    with hooked_in(), ratel.hook(net, storage=[directory], blocks="layers") as state:
        return trained(net, state, looks_in=looks_in)


def trained(net: nn.Module, state: ratel.Hooked, *, looks_in: Context = torch.no_grad) -> Tensors:
    optimizer = ratel.AdamW(net, lr=1e-2, weight_decay=0)
    for number in range(2):
        optimizer.zero_grad()
        tensors = batch(number)
        with looks_in():
            assert not net(tensors["tokens"]).requires_grad
        loss_of(net(tensors["tokens"]), tensors).div(3).backward()
        optimizer.step()
    return {name: tensors["weight"] for name, tensors in state.state()}


def opened(net: nn.Module, directory: Path) -> ratel.Model:
    with measured_briefly():
        sample = {"tokens": torch.zeros(1, 4, dtype=torch.int64, device="cpu")}
        return ratel.open(net, sample=sample, storage=[directory], device="cpu")


def trained_open(directory: Path, *, opened_in: Context, stepped_in: Context) -> tuple[Tensors, float]:
    """And the loss of an evaluation that comes before all steps."""
    with opened_in():
        model = opened(made_net(), directory)
    with model:
        with stepped_in():
            loss = model.evaluate(batch(9), loss=loss_of)
            for number in range(2):
                model.forward_backward(batch(number), loss=loss_of)
                model.step(learning_rate=1e-2)
        return {name: tensors["weight"] for name, tensors in model.state()}, loss


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, each in wanted.items() if not torch.equal(found[name], each)] == []


@pytest.mark.parametrize("around", thinned([torch.inference_mode, autocast, torch.no_grad], every=3))
def test_around_hook(tmp_path: Path, around: Context) -> None:
    net = made_net()
    with around():
        state = ratel.hook(net, storage=[tmp_path], blocks="layers")
    with state:
        assert_same(trained(net, state), trained_plainly(made_net()))


@pytest.mark.parametrize(
    ("hooked_in", "looks_in"),
    [
        (nullcontext, torch.inference_mode),
        (meta, torch.no_grad),
        pytest.param(default_device, torch.inference_mode, marks=pytest.mark.full),
        pytest.param(double_precision, torch.inference_mode, marks=pytest.mark.full),
    ],
)
def test_around_a_loop_of_a_hooked_module(tmp_path: Path, hooked_in: Context, looks_in: Context) -> None:
    """In which the module is looked at before it is ever trained."""
    found = trained_hooked(made_net(), tmp_path, hooked_in=hooked_in, looks_in=looks_in)
    assert_same(found, trained_plainly(made_net()))


@pytest.mark.parametrize(
    ("opened_in", "stepped_in"),
    [
        (torch.inference_mode, torch.no_grad),
        pytest.param(torch.no_grad, torch.inference_mode, marks=pytest.mark.full),
    ],
)
def test_an_open_model_computes_gradients_wherever_it_is_called(
    tmp_path: Path, opened_in: Context, stepped_in: Context
) -> None:
    found, loss = trained_open(tmp_path, opened_in=opened_in, stepped_in=stepped_in)
    assert_same(found, trained_plainly(made_net()))
    with torch.no_grad():
        wanted = loss_of(made_net()(batch(9)["tokens"]), batch(9)) / 3
    assert loss == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("around", "message"),
    [
        (autocast, "torch.autocast is on around"),
        (meta, "torch's default device is meta around"),
        pytest.param(default_device, "torch's default device is meta around", marks=pytest.mark.full),
        (double_precision, "torch's default dtype is torch.float64 around"),
    ],
)
def test_what_an_open_model_does_not_follow_is_an_error(tmp_path: Path, around: Context, message: str) -> None:
    def rejected(call: Callable[[], object], name: str) -> None:
        with around(), pytest.raises(ratel.RatelError) as caught:
            call()
        assert f"{message} {name}" in str(caught.value) and caught.value.hint

    rejected(lambda: opened(made_net(), tmp_path), "ratel.open")
    assert list(tmp_path.iterdir()) == []
    with opened(made_net(), tmp_path) as model:
        rejected(lambda: model.forward_backward(batch(0), loss=loss_of), "forward_backward")
        rejected(lambda: model.evaluate(batch(0), loss=loss_of), "evaluate")
        rejected(lambda: model.step(learning_rate=1e-2), "step")
        rejected(lambda: model.save_pretrained(tmp_path / "out"), "save_pretrained")


def whole(net: Net) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def whole_in_place(net: Net) -> nn.Module:
    net.compile(backend="eager")
    return net


def block_in_place(net: Net) -> nn.Module:
    net.layers[0].compile(backend="eager")
    return net


def blocks(net: Net) -> nn.Module:
    for index, layer in enumerate(net.layers):
        net.layers[index] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    return net


@pytest.mark.parametrize(("change", "is_before"), rotating([whole, block_in_place, whole_in_place], [True, False]))
def test_a_compiled_module_is_rejected(tmp_path: Path, change: Change, is_before: bool) -> None:
    net = made_net()
    compiled = change(net) if is_before else net
    with ratel.hook(compiled, storage=[tmp_path]):
        compiled = compiled if is_before else change(net)
        with pytest.raises(ratel.RatelError, match=r"torch\.compile compiles a hooked module"):
            compiled(batch(0)["tokens"])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_blocks_that_are_compiled_before_they_are_hooked(tmp_path: Path) -> None:
    found = trained_hooked(blocks(made_net()), tmp_path, hooked_in=nullcontext, looks_in=torch.no_grad)
    assert_same(found, trained_plainly(blocks(made_net())))


@pytest.mark.parametrize("change", thinned([whole, whole_in_place, block_in_place, blocks], every=2))
def test_an_open_module_is_not_compiled(tmp_path: Path, change: Change) -> None:
    with pytest.raises(ratel.RatelError, match=r"is compiled by torch\.compile"):
        opened(change(made_net()), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_values_is_rejected(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = Net()
    for call in (lambda: ratel.hook(net, storage=[tmp_path]), lambda: opened(net, tmp_path)):
        with pytest.raises(ratel.RatelError, match=r"table\.weight has no values: it is on the meta device"):
            call()
