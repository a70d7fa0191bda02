"""The oracle's networks as layers of the planner."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ratel_cli.papers.memferry import DirectLayer
from ratel_cli.planning.profile.placement import ACCESS_MODES, AccessMode
from tests.papers.memferry_oracle import Network, random_network


def layers_of(net: Network) -> list[DirectLayer]:
    return [
        DirectLayer(
            upload=net["U"][n],
            forward=net["F"][n],
            backward=net["B"][n],
            direct_forward=net["H"][n],
            direct_backward=net["HB"][n],
            forward_link=net["R"][n],
            backward_link=net["RB"][n],
            then_forward=net["A"][n],
            then_backward=net["AB"][n],
        )
        for n in range(len(net["U"]))
    ]


def network_of(layers: Sequence[DirectLayer]) -> Network:
    return {
        "U": [layer.upload for layer in layers],
        "F": [layer.forward for layer in layers],
        "B": [layer.backward for layer in layers],
        "H": [layer.direct_forward for layer in layers],
        "HB": [layer.direct_backward for layer in layers],
        "R": [layer.forward_link for layer in layers],
        "RB": [layer.backward_link for layer in layers],
        "A": [layer.then_forward for layer in layers],
        "AB": [layer.then_backward for layer in layers],
    }


def random_networks(count: int, *, least: int, most: int, shares_link: bool) -> list[Network]:
    """Each has `least` to `most` layers; the same for everyone who asks."""
    draw = random.Random(f"{count} {least} {most} {shares_link}")
    return [random_network(draw, draw.randint(least, most), shares_link=shares_link) for _ in range(count)]


def mode_names(numbers: list[int]) -> list[AccessMode]:
    return [ACCESS_MODES[number] for number in numbers]
