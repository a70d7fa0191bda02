"""The runs of the Ratel paper fit on its machines: as given, or with the same batch in the micro-batches advised."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.parametrize("run", sample(RUNS, every=6), ids=lambda run: "-".join(map(str, run)))
def test_it_fits(run: tuple[str, int, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, rows, machine = run
    arguments = ["plan", f"{CONFIGS}/models/gpt-{model}.yaml", "--hardware", f"{CONFIGS}/hardware/{machine}.yaml"]

    def planned(micro_batch_size: int) -> dict[str, object]:
        split = [f"micro_batch_size={micro_batch_size}", f"gradient_accumulation_steps={rows // micro_batch_size}"]
        main([*arguments, *split, "--json"])
        content: dict[str, object] = json.loads(capsys.readouterr().out)
        return content

    found = planned(rows)
    if not found["memory"]["fits"]:  # type: ignore[index]
        [advice] = found["advice"]  # type: ignore[misc]
        found = planned(int(advice["change"].split()[1].rstrip(",")))
    assert found["memory"]["fits"]  # type: ignore[index]
