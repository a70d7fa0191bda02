"""SSDTrain's estimates, against the figures that it prints."""

from __future__ import annotations

import pytest

from ratel_cli.papers.endurance import RETENTION_OF_A_DAY, StepWrites, layer_activation_bytes

YEAR = 365.25 * 24 * 3600.0


@pytest.mark.parametrize(
    ("width", "num_layers", "printed_gb", "gb_per_second"),
    [(8192, 4, 11.13, 18.0), (12288, 3, 12.60, 13.8), (16384, 2, 11.50, 8.76)],
)
def test_the_offloaded_amount_is_that_of_table_iii(
    width: int, num_layers: int, printed_gb: float, gb_per_second: float
) -> None:
    found = layer_activation_bytes(num_layers=num_layers, batch_size=16, sequence_len=1024, width=width)
    assert found == pytest.approx(printed_gb * 1e9, rel=0.01)
    step = StepWrites(num_bytes=found, seconds=2 * found / (gb_per_second * 1e9))
    assert step.bytes_per_second == pytest.approx(gb_per_second * 1e9)


def test_drives_last_as_long_as_their_rating_divided_by_what_is_written() -> None:
    """Four Samsung 980 PRO of 1 TB, rated for 600 TB each, and 12.1 GB/s, the most that Fig. 5 has for a GPU."""
    step = StepWrites(num_bytes=60.5e9, seconds=10.0)
    assert step.bytes_per_second == pytest.approx(12.1e9)
    rated = 4 * 600e12
    plain = step.drive_seconds(rated, rated_amplification=1.0)
    assert plain == pytest.approx(rated / 6.05e9)
    assert step.drive_seconds(rated) == pytest.approx(2.5 * plain)
    assert step.drive_seconds(rated, amplification=2.0) == pytest.approx(1.25 * plain)
    # Section III-D: more than two years in all cases.
    assert step.drive_seconds(rated, retention=RETENTION_OF_A_DAY) / YEAR == pytest.approx(2.70, abs=0.01)
