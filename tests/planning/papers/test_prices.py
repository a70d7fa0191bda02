"""Table VII."""

from __future__ import annotations

import pytest

from ratel_cli.planning.papers.prices import DGX_A100_DOLLARS, server_dollars, tokens_per_second_per_thousand_dollars


@pytest.mark.parametrize(("num_gpus", "num_ssds"), [(0, 0), (1, 12), (4, 1), (4, 6), (4, 12)])
def test_price_of_a_server(num_gpus: int, num_ssds: int) -> None:
    assert server_dollars(num_gpus=num_gpus, num_ssds=num_ssds) == 14_098 + 1_600 * num_gpus + 308 * num_ssds


def test_tokens_for_a_thousand_dollars() -> None:
    assert tokens_per_second_per_thousand_dollars(400, dollars=DGX_A100_DOLLARS) == 2
    assert tokens_per_second_per_thousand_dollars(0, dollars=14_098) == 0
