"""Figures that other papers give for their own systems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.planning.papers.peers import flash_neuron_parameters, g10_time, ssdtrain_offloaded_bytes
from ratel_cli.units import GIB
from tests.planning.papers.paper_profiles import paper_hardware, paper_shape


def test_g10_as_the_paper_simulates_it() -> None:
    """Section III-C: 13B, batch 32, a GPU that needs 5.96 s for forward."""
    shape = paper_shape("gpt-13b", batch_size=32)
    time = g10_time(shape, replace(paper_hardware(), flops_per_second=shape.flops_forward / 5.96))
    assert time.seconds == pytest.approx(35.0, rel=0.01)
    assert time.optimizer_share == pytest.approx(0.371, abs=0.005)
    assert time.forward_utilisation == pytest.approx(0.59, abs=0.005)
    assert time.optimizer.seconds == pytest.approx(13, rel=0.01)
    assert time.optimizer.up == time.optimizer.down == 182e9 / 22.6e9
    assert time.backward.seconds == pytest.approx(2 * 5.96)


def test_gradients_of_g10_pass_through_nvme() -> None:
    shape = paper_shape("gpt-13b", batch_size=1)
    hardware = replace(paper_hardware(), flops_per_second=1e18)
    activations = shape.activation_bytes
    expected = (26e9 + activations) / 32.7e9 + 26e9 / 24.5e9
    assert g10_time(shape, hardware).backward.seconds == pytest.approx(expected, rel=1e-12)


def test_flash_neuron_on_24_gib() -> None:
    """The paper measured 1.55 B."""
    assert flash_neuron_parameters(24 * GIB) == 1_610_612_736


@pytest.mark.parametrize(
    ("hidden_size", "num_layers", "gigabytes"), [(8192, 4, 11.13), (12288, 3, 12.60), (16384, 2, 11.50)]
)
def test_ssdtrains_estimate(hidden_size: int, num_layers: int, gigabytes: float) -> None:
    """SSDTrain's Table III, batch 16, 1024 tokens."""
    estimated = ssdtrain_offloaded_bytes(
        num_layers=num_layers, hidden_size=hidden_size, batch_size=16, sequence_len=1024
    )
    assert estimated == pytest.approx(gigabytes * 1e9, rel=0.01)
