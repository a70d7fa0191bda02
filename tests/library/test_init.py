"""Modules that are larger than memory are built with the values that they would have in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import ratel_cli as ratel
from ratel_cli.library import initialising
from tests.library.nets import NETS
from tests.library.test_hook import assert_same, built, saved
from tests.tiers import rotating


@pytest.fixture(autouse=True)
def _every_parameter_is_large() -> Iterator[None]:
    with mock.patch.object(initialising, "_LEAST_BYTES", 1), mock.patch.object(initialising, "_SPACE_BYTES", 1 << 16):
        yield


def standing(model: nn.Module) -> int:
    return sum(isinstance(each, initialising.EvictedParameter) for each in model.parameters())


@pytest.mark.parametrize(("name", "loaded_share"), rotating(list(NETS), [4, 1 << 40]))
def test_values_and_draws_are_those_of_memory(tmp_path: Path, name: str, loaded_share: int) -> None:
    """`loaded_share`: with the larger one, one parameter at a time is loaded."""
    plain = built(name)
    torch.manual_seed(1)
    NETS[name].build()
    draws = torch.get_rng_state()
    torch.manual_seed(1)
    with mock.patch.object(initialising, "_LOADED_SHARE", loaded_share), ratel.init(storage=[tmp_path / "state"]):
        model = NETS[name].build()
        assert torch.equal(torch.get_rng_state(), draws)
        assert standing(model) >= len(list(model.parameters())) - 2  # the root's own are in memory
    assert standing(model) == 0
    assert [each for each, _ in model.named_parameters()] == [each for each, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    for each, values in plain.state_dict().items():
        assert torch.equal(model.state_dict()[each], values), each


@pytest.mark.parametrize("name", ["gpt2", "dit", "sequential"])
def test_they_are_hooked_from_there(tmp_path: Path, name: str) -> None:
    net, plain = NETS[name], built(name)
    torch.manual_seed(1)
    with ratel.init(storage=[tmp_path / "state"]):
        model = net.build()
        state = ratel.hook(model, blocks=net.blocks, outside=net.outside)
    with state:
        assert_same(saved(state, tmp_path), plain)


def test_code_may_write_to_what_is_away(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 3), nn.Linear(3, 3))
        with torch.no_grad():
            model[0].weight[1].fill_(2.0)
            model[1].weight.data.mul_(3.0)
            model[1].bias.data = torch.ones(7)
            model[2].weight += model[2].bias
            model[2].weight.copy_(model[2].weight @ model[2].weight)
        model[2].bias.requires_grad_(requires_grad=False)
        model[1].shared = model[2].weight
        return model

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    with ratel.init(storage=[tmp_path / "state"]):
        model = build()
        assert standing(model) == 5
    for name, parameter in plain.named_parameters():
        found = model.get_parameter(name)
        assert torch.equal(found, parameter), name
        assert found.requires_grad == parameter.requires_grad
    assert model[1].shared is model[2].weight


def test_one_operator_may_need_several(tmp_path: Path) -> None:
    """Each is loaded, whatever there is memory for; so is what somebody has a view of."""
    with mock.patch.object(initialising, "_LOADED_SHARE", 1 << 40), ratel.init(storage=[tmp_path / "state"]):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[1].weight.fill_(2.0)
            model[2].weight.copy_(model[0].weight + model[1].weight)
            model[1].weight.copy_(model[0].weight)
            first, second = model[0].weight.data, model[2].bias.data
            model[0].bias.fill_(5.0)
            first.fill_(7.0)
            second.fill_(8.0)
            del first, second
            model[1].bias.fill_(6.0)
        loaded = model[1].bias.home._loaded
        assert [each is model[1].bias for each in loaded] == [True]
    values = [[float(each.detach().min()), float(each.detach().max())] for each in model.parameters()]
    assert values == [[each] * 2 for each in (7.0, 5.0, 1.0, 6.0, 3.0, 8.0)]


def test_what_is_tied_before_it_is_a_part_stays_tied(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    with ratel.init(storage=[tmp_path / "state"]):
        model = nn.ModuleList([first, second])
    assert model[0].weight is model[1].weight


def test_an_error_ends_it(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="in the middle"), ratel.init(storage=[tmp_path / "state"]):
        nn.Sequential(nn.Linear(2, 2)).get_submodule("in the middle")
    assert standing(nn.Sequential(nn.Linear(2, 2))) == 0
    with pytest.raises(ratel.RatelError, match="hook needs storage"):
        ratel.hook(built("sequential"))


def test_a_memory_limit_is_kept(tmp_path: Path) -> None:
    """What does not fit is rejected before a byte of the state is written."""
    with (
        ratel.init(storage=[tmp_path / "state"], limits=ratel.Limits(host_memory="1MiB")),
        pytest.raises(ratel.RatelError, match="RAM: a step needs"),
    ):
        ratel.hook(built("sequential"))
    assert not list((tmp_path / "state").glob("ratel*"))
