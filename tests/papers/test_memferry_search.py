"""The plan with the shortest step, against all 3^L choices, and against MemFerry's own planner."""

from __future__ import annotations

import pytest

from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.papers.memferry import printed_plan, timeline
from ratel_cli.papers.memferry_costs import weight_uses
from ratel_cli.papers.memferry_search import EXACT_LAYERS, plan_direct
from ratel_cli.planning.profile.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.profile.placement import Workload
from tests.hardware.profiles import WITH_GPU
from tests.papers.memferry_oracle import Network, every_total
from tests.papers.memferry_program import lower_bound
from tests.papers.networks import layers_of, network_of, random_networks

LINKS = pytest.mark.parametrize("shares_link", [True, False])
WITHIN = 1.01
ROUNDING = 1 + 1e-9


def check(net: Network) -> float:
    """How much longer the paper's own plan takes than the best one; ours is the best one."""
    layers = layers_of(net)
    plan, printed = plan_direct(layers), timeline(layers, printed_plan(layers))
    assert plan.is_exact and plan.time.fits and printed.fits
    assert plan.time == timeline(layers, plan.modes)
    assert plan.time.total <= min(printed.total * ROUNDING, plan.uploaded.total)
    best = float(every_total(net)[1].min())
    assert best / ROUNDING <= plan.time.total <= best * ROUNDING
    return printed.total / best


@LINKS
def test_no_choice_is_faster(shares_link: bool) -> None:
    for net in random_networks(60, least=1, most=7, shares_link=shares_link):
        check(net)


@pytest.mark.full
@LINKS
def test_no_choice_of_1500_networks_is_faster(shares_link: bool) -> None:
    """Nor does the paper's algorithm find the best one often: as printed it counts overlap twice."""
    found = [check(net) for net in random_networks(750, least=3, most=10, shares_link=shares_link)]
    assert sum(ratio <= ROUNDING for ratio in found) < 0.5 * len(found)
    assert max(found) > 1.25


@pytest.mark.full
@LINKS
def test_a_narrow_search_is_within_a_percent(shares_link: bool) -> None:
    """What is done beyond `EXACT_LAYERS`, on as many layers as all choices can be compared for."""
    for net in random_networks(200, least=7, most=10, shares_link=shares_link):
        plan = plan_direct(layers_of(net), width=200)
        assert not plan.is_exact
        assert plan.time.total <= WITHIN * float(every_total(net)[1].min())


@pytest.mark.full
@LINKS
def test_many_layers_are_within_a_percent(shares_link: bool) -> None:
    """Of a search that drops nothing that could be better: its bound is that of memory, not of the result."""
    for net in random_networks(20, least=EXACT_LAYERS + 1, most=18, shares_link=shares_link):
        layers = layers_of(net)
        plan, wide = plan_direct(layers), plan_direct(layers, width=10**6)
        assert not plan.is_exact
        assert plan.time.total <= WITHIN * wide.time.total
        assert plan.time.total <= timeline(layers, printed_plan(layers)).total * ROUNDING


@pytest.mark.full
@LINKS
def test_deep_networks_are_within_a_percent_of_a_bound(shares_link: bool) -> None:
    """An integer program bounds what any plan takes, for as many layers as a small model has."""
    for net in random_networks(10, least=20, most=50, shares_link=shares_link):
        plan, bound = plan_direct(layers_of(net)), lower_bound(net, gap=1e-3)
        assert bound / ROUNDING <= plan.time.total <= WITHIN * bound


@pytest.mark.full
@pytest.mark.parametrize("tokens", [128, 512])
def test_a_gpt_is_within_a_percent_of_a_bound(tokens: int) -> None:
    """The 75 parameters of a GPT with 12 layers."""
    spec = spec_from_shape(name="gpt", num_layers=12, hidden_size=768, vocab_size=50257)
    step = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=tokens)
    profile = analytic_profile(spec, step, traits=LayerTraits(num_heads=12, head_dim=64))
    layers = [use.layer for use in weight_uses(spec, profile, step, WITH_GPU, is_paper=True)]
    plan, bound = plan_direct(layers), lower_bound(network_of(layers), gap=3e-3)
    assert plan.gain > 0.2
    assert bound / ROUNDING <= plan.time.total <= WITHIN * bound


def test_the_bound_holds_for_the_best_of_all_plans() -> None:
    for shares_link in (True, False):
        for net in random_networks(20, least=1, most=6, shares_link=shares_link):
            assert lower_bound(net, gap=1e-6) <= float(every_total(net)[1].min()) * ROUNDING


@LINKS
def test_a_deep_model(shares_link: bool) -> None:
    """The times of a model with 72 parameters, of nine kinds."""
    [net] = random_networks(1, least=9, most=9, shares_link=shares_link)
    layers = layers_of(net) * 8
    plan = plan_direct(layers)
    assert plan.time.fits and 0 <= plan.gain < 1
    assert plan.time.total <= timeline(layers, printed_plan(layers)).total * ROUNDING


def test_where_nothing_gains_everything_is_uploaded() -> None:
    [net] = random_networks(1, least=6, most=6, shares_link=True)
    slow = {**net, "H": [30.0] * 6, "R": [30.0] * 6}
    plan = plan_direct(layers_of(slow))
    assert (set(plan.modes), plan.gain) == ({"GFGB"}, 0.0)
    assert plan_direct([]).gain == 0.0
