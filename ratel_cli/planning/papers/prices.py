"""What a server costs, and how much training its price buys: Table VII and section V-I of the paper. Pure.

Called for `ratel plan --prices`.
"""

from __future__ import annotations

SERVER_DOLLARS = 14_098
"""A commodity 4U server without GPUs and SSDs."""
GPU_DOLLARS = 1_600
"""An NVIDIA RTX 4090."""
SSD_DOLLARS = 308
"""An Intel P5510 of 3.84 TB."""
DGX_A100_DOLLARS = 200_000
"""Eight A100-80G and NVLink: what the paper compares with."""


def server_dollars(*, num_gpus: int, num_ssds: int) -> int:
    """A commodity server with so many RTX 4090 and SSDs."""
    return SERVER_DOLLARS + GPU_DOLLARS * num_gpus + SSD_DOLLARS * num_ssds


def tokens_per_second_per_thousand_dollars(tokens_per_second: float, *, dollars: int) -> float:
    """Cost-effectiveness, as the paper's section V-I counts it."""
    return 1000 * tokens_per_second / dollars
