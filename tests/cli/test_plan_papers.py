"""The runs of the Ratel paper fit on its machines, as given or in the micro-batches advised, and are as fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import pytest

from ratel_cli.cli.app import main
from tests.tiers import sample

CONFIGS = Path(__file__).parents[2] / "configs"
ON_24_GIB = [
    ("13b", 8), ("13b", 16), ("13b", 32), ("13b", 64), ("13b", 128), ("30b", 32), ("70b", 16), ("70b", 24),
    ("70b", 48), ("135b", 8), ("175b", 8), ("175b", 16), ("276b", 1),
]  # fmt: skip
RUNS = [
    *((model, rows, "paper-4090-12ssd") for model, rows in ON_24_GIB),
    ("175b", 1, "paper-4080-12ssd"),
    ("276b", 8, "a100-80g-12ssd"),
    ("412b", 8, "a100-80g-12ssd"),
]


TFLOPS = [
    ("13b", 8, 42.8),
    ("13b", 16, 84.3),
    ("13b", 32, 143.0),
    ("13b", 64, 156.0),
    ("175b", 8, 52.6),
    ("175b", 16, 86.9),
]
"""10^12 FLOPs of the model per second that the paper measured, on one RTX 4090."""


class Planned(TypedDict):
    """The parts of `ratel plan --json` that are looked at."""

    memory: dict[str, object]
    throughput: dict[str, float]
    advice: list[dict[str, str]]


Plan = Callable[..., Planned]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Plans a step of so many rows: in one micro-batch, or in those that the advice proposes if that does not fit."""

    def of(model: str, rows: int, machine: str, *overrides: str) -> Planned:
        files = [f"{CONFIGS}/models/gpt-{model}.yaml", "--hardware", f"{CONFIGS}/hardware/{machine}.yaml"]

        def split(size: int) -> Planned:
            sizes = [f"micro_batch_size={size}", f"gradient_accumulation_steps={rows // size}"]
            main(["plan", *files, *sizes, *overrides, "--json"])
            content: Planned = json.loads(capsys.readouterr().out)
            return content

        found = split(rows)
        if found["memory"]["fits"]:
            return found
        [advice] = found["advice"]
        return split(int(advice["change"].split()[1].rstrip(",")))

    return of


@pytest.mark.parametrize("run", sample(RUNS, every=6), ids=lambda run: "-".join(map(str, run)))
def test_it_fits(plan: Plan, run: tuple[str, int, str]) -> None:
    assert plan(*run)["memory"]["fits"]


@pytest.mark.full
@pytest.mark.parametrize(("model", "rows", "tflops"), TFLOPS)
def test_it_is_predicted_to_be_as_fast_as_in_the_paper(plan: Plan, model: str, rows: int, tflops: float) -> None:
    """Without clipping, as there."""
    found = plan(model, rows, "paper-4090-12ssd", "max_grad_norm=null")
    assert found["throughput"]["tflops_model"] >= tflops
