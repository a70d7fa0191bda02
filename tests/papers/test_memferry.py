"""MemFerry's planner as its paper prints it: the listing line by line, and what its greedy promises."""

from __future__ import annotations

import pytest

from ratel_cli.papers.memferry import DirectLayer, greedy_backward, printed_forward, timeline
from tests.papers.memferry_oracle import algorithm_1
from tests.papers.networks import layers_of, mode_names, random_networks

LINKS = pytest.mark.parametrize("shares_link", [True, False])


@LINKS
def test_the_forward_plan_is_that_of_the_listing(shares_link: bool) -> None:
    went_back = 0
    for net in random_networks(500, least=1, most=12, shares_link=shares_link):
        found = algorithm_1(net)
        assert list(printed_forward(layers_of(net))) == mode_names(found)
        went_back += any(
            mode == 1 and direct > forward + upload
            for mode, direct, forward, upload in zip(found, net["H"], net["F"], net["U"], strict=True)
        )
    assert went_back >= (1 if shares_link else 15), "layers are turned to DHA on the way back"


@LINKS
def test_the_greedy_fills_the_window_and_never_takes_longer(shares_link: bool) -> None:
    filled = 0
    for net in random_networks(300, least=1, most=12, shares_link=shares_link):
        layers = layers_of(net)
        forward = printed_forward(layers)
        before, chosen = timeline(layers, forward), greedy_backward(layers, forward)
        after = timeline(layers, chosen)
        assert after.fits and after.total <= before.total
        assert after.forward == pytest.approx(before.forward)
        assert chosen[-1] == forward[-1]
        filled += "DFGB" in chosen
    assert filled > 50


def test_the_greatest_benefit_comes_first() -> None:
    """And a knapsack would do better: two of the others fit into the window, and save more together."""
    layers = [
        DirectLayer(upload=upload, forward=1.0, backward=1.0, direct_forward=2.0, direct_backward=1.0 + benefit)
        for upload, benefit in ((3.0, 3.5), (2.0, 3.0), (6.0, 4.0))
    ]
    last = DirectLayer(upload=0.0, forward=0.0, backward=1.0, direct_forward=0.0, direct_backward=1.0)
    modes = greedy_backward([*layers, last], ["DHA", "DHA", "DHA", "GFGB"])
    assert timeline([*layers, last], ["DHA", "DHA", "DHA", "GFGB"]).window == 6 + 1
    assert modes == ("DHA", "DHA", "DFGB", "GFGB")
    both = timeline([*layers, last], ["DFGB", "DFGB", "DHA", "GFGB"])
    assert both.fits and both.total < timeline([*layers, last], modes).total
