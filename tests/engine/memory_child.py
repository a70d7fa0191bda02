"""Trains a model of a given depth for a few steps and prints parameters, resident and peak resident bytes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from ratel_cli.hardware.host import peak_resident_bytes, resident_bytes, return_large_buffers
from tests.engine.architectures import tiny_config
from tests.engine.machine import initial_weights_of_zeros, machine, random_steps
from tests.reference import Recipe


def main(num_layers: int) -> None:
    """Train with 64 tokens a step: two rows of 32."""
    return_large_buffers()
    config = tiny_config(
        "llama",
        num_hidden_layers=num_layers,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=None)
    with (
        tempfile.TemporaryDirectory() as directory,
        machine(Path(directory), config, recipe, dtype="bfloat16", weights=initial_weights_of_zeros()) as ratel,
    ):
        ratel.train(random_steps(3, 1, num_tokens=32), recipe)
        num_parameters = ratel.model.spec.num_parameters
    print(num_parameters, resident_bytes(), peak_resident_bytes())


if __name__ == "__main__":
    main(int(sys.argv[1]))
