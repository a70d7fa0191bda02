"""Peak host memory does not grow with the number of layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def peak_bytes(num_layers: int) -> tuple[int, int]:
    """Train in a process of its own. Returns (parameters, peak resident bytes)."""
    command = [sys.executable, "-m", "tests.engine.memory_child", str(num_layers)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    parameters, _, peak = map(int, output.split())
    return parameters, peak


@pytest.mark.full
def test_peak_does_not_grow_from_8_to_32_layers_at_64_tokens_a_step() -> None:
    shallow_parameters, shallow = peak_bytes(8)
    deep_parameters, deep = peak_bytes(32)
    assert deep_parameters > 3.9 * shallow_parameters
    assert deep - shallow < 0.1 * shallow
    # Plain PyTorch would need 16 bytes of memory for each additional parameter.
    assert deep - shallow < 0.05 * 16 * (deep_parameters - shallow_parameters)
