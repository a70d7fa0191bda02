"""The times of MemFerry's three modes, against a simulation of the link and by hand."""

from __future__ import annotations

import random

import pytest

from ratel_cli.papers.memferry import DirectLayer, timeline
from tests.papers.memferry_oracle import Simulation
from tests.papers.networks import layers_of, mode_names, random_networks


@pytest.mark.parametrize("shares_link", [True, False])
def test_it_is_what_a_simulation_takes(shares_link: bool) -> None:
    draw, num_fitting = random.Random(1), 0
    for net in random_networks(400, least=1, most=9, shares_link=shares_link):
        modes = [draw.choice([0, 0, 1, 2]) for _ in net["U"]]
        time, simulated = timeline(layers_of(net), mode_names(modes)), Simulation(net, modes)
        assert time.forward == pytest.approx(simulated.forward)
        assert time.fits == simulated.fits
        if time.fits:
            assert time.total == pytest.approx(simulated.now)
            num_fitting += 1
    assert 100 < num_fitting < 400, "both cases occur"


def layer(*, upload: float, forward: float, backward: float) -> DirectLayer:
    """Read in place, it takes twice as long."""
    return DirectLayer(
        upload=upload, forward=forward, backward=backward, direct_forward=2 * forward, direct_backward=2 * backward
    )


def test_the_three_layers_of_figure_6() -> None:
    """DHA, DFGB, GFGB: the third is uploaded while the first two are read in place, the second for its backward."""
    layers = [layer(upload=upload, forward=1.0, backward=2.0) for upload in (9.0, 3.0, 5.0)]
    time = timeline(layers, ["DHA", "DFGB", "GFGB"])
    assert time.forward == 2 + 2 + 1 + 1, "one second of waiting for the third layer"
    assert time.window == 6 - 5 + 2, "from the end of the upload to the gradient of the third"
    assert (time.moved, time.fits) == (3.0, True)
    assert time.backward == 2 + 2 + 4
    assert not timeline(
        [layers[0], layer(upload=3.1, forward=1.0, backward=2.0), layers[2]], ["DHA", "DFGB", "GFGB"]
    ).fits


def test_reading_in_place_takes_the_link_from_uploads() -> None:
    first = layer(upload=9.0, forward=2.0, backward=2.0)
    second = layer(upload=4.0, forward=1.0, backward=1.0)
    assert timeline([first, second], ["DHA", "GFGB"]).forward == 4 + 1
    busy = DirectLayer(upload=9.0, forward=2.0, backward=2.0, direct_forward=4.0, direct_backward=4.0, forward_link=3.0)
    assert timeline([busy, second], ["DHA", "GFGB"]).forward == 4 + 3 + 1, "one of four seconds was left to the upload"


def test_the_last_layer_waits_for_its_upload() -> None:
    only = layer(upload=5.0, forward=1.0, backward=2.0)
    time = timeline([only], ["DFGB"])
    assert (time.forward, time.backward, time.fits) == (2.0, 3 + 2.0, True)


def test_no_layers_take_no_time() -> None:
    time = timeline([], [])
    assert (time.total, time.fits) == (0.0, True)
