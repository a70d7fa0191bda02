"""A forked child, such as a worker of a DataLoader, leaves the training state of its parent alone, and ends at once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ratel_cli as ratel
from ratel_cli.closing import Closing
from tests.library.test_operations import NUM_STEPS, Loop, made_net, usual_loop
from tests.library.test_own_loop import batches, saved

ROOT = Path(__file__).parents[2]
LONG_SECONDS = 120
"""A child that hangs is ended after this time; others take a moment, on a machine with nothing else to do."""


def ended(target: Callable[[], object]) -> int | None:
    """The exit code of a forked child that does this; None: it hangs."""
    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(LONG_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        return None
    return child.exitcode


def is_refused(use: Callable[[], object]) -> None:
    """In the child: a use that the parent has alone."""
    with pytest.raises(ratel.RatelError, match="a forked process uses the training state of its parent"):
        use()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    """With a step behind it that is not committed."""
    made = Loop(made_net(), is_plain=False)
    with ratel.hook(made.net, storage=[tmp_path / "state"], blocks="layers") as made.state:
        made.make_optimizer()
        usual_loop(made, lambda _: None)
        yield made


def test_children_beside_a_hooked_module(tmp_path: Path, loop: Loop) -> None:
    state, loss = loop.state, loop.computed(7)
    assert state is not None

    def leaves() -> None:
        with state:
            pass

    def uses() -> None:
        is_refused(lambda: loop.computed(8))
        is_refused(lambda: state.save(tmp_path / "out"))
        is_refused(lambda: next(state.state()))
        with pytest.raises(ratel.RatelError, match="a forked process uses the hooked module"):
            loss.backward()

    assert [ended(each) for each in (int, leaves, uses)] == [0, 0, 0]
    loader = DataLoader(range(6), num_workers=2, multiprocessing_context="fork", persistent_workers=True)  # type: ignore[arg-type]
    for number in loader:
        loop.optimizer.zero_grad()
        loop.computed(int(number)).backward()
        loop.optimizer.step()
    state.verify()
    before = {name: tensors["weight"] for name, tensors in state.state()}
    state.close()
    with ratel.hook(made_net(), storage=[tmp_path / "state"], blocks="layers") as again:  # while the workers are there
        assert again.num_steps == NUM_STEPS + 6
        assert all(torch.equal(tensors["weight"], before[name]) for name, tensors in again.state())


def test_children_beside_an_open_model(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "llama")
    [[batch], [other]] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(batch)
        model.step(learning_rate=1e-3)
        assert ended(model.close) == 0
        assert ended(lambda: is_refused(lambda: model.forward_backward(other))) == 0
        model.forward_backward(other)
        model.step(learning_rate=1e-3)
        model.verify()
        assert model.num_steps == 2


def test_children_while_activations_are_offloaded(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    values = torch.randn(32, 64)
    wanted = torch.autograd.grad(net(values).sum(), net[0].weight)[0]
    context = ratel.offload_activations(net, storage=[tmp_path / "activations"], least_bytes=1, amount="all")

    def computes() -> None:
        assert torch.equal(torch.autograd.grad(net(values).sum(), net[0].weight)[0], wanted)
        context.__exit__(None, None, None)

    with context:
        loss = net(values).sum()
        assert ended(computes) == 0
        loss.backward()
    assert torch.equal(net[0].weight.grad, wanted)


@pytest.mark.full
def test_a_child_that_ends_as_a_program_does(tmp_path: Path) -> None:
    """The interpreter's end closes what is open, and takes all objects apart."""
    program = (
        "import os, sys, ratel_cli as ratel\n"
        "from tests.library.test_operations import Loop, made_net, usual_loop\n"
        "loop = Loop(made_net(), is_plain=False)\n"
        "with ratel.hook(loop.net, storage=[sys.argv[1]], blocks='layers') as loop.state:\n"
        "    loop.make_optimizer()\n"
        "    usual_loop(loop, lambda _: None)\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.exit(7)\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    loop.state.verify()\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "state")]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=10 * LONG_SECONDS)
    assert (found.returncode, found.stderr) == (7, "")


def test_what_is_opened_in_a_child_is_closed_there(tmp_path: Path) -> None:
    class Owner(Closing):
        def __init__(self, path: Path) -> None:
            self._path = path

        def close(self) -> None:
            self._path.write_text(str(os.getpid()))

    parents, childs = tmp_path / "parents", tmp_path / "childs"
    owner = Owner(parents)

    def closes() -> None:
        with owner, Owner(childs):
            pass

    assert ended(closes) == 0
    assert not parents.exists() and childs.read_text() != str(os.getpid())
    owner.close()
    assert parents.read_text() == str(os.getpid())
