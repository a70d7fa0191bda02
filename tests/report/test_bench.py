"""The table and the JSON of `ratel bench`: medians, what is equal, and no names of directories."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ratel_cli.report.words.bench import CHECKPOINTING, PLAIN, RATEL, BenchReport, BenchTraining, bench_lines
from ratel_cli.run.ask.environment import environment_of
from tests.hardware.profiles import WITHOUT_GPU

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "bench.md"


def training(*seconds: float, losses: tuple[float, ...] = (3.0, 2.0, 1.0), **bytes_of: int) -> BenchTraining:
    return BenchTraining(
        step_seconds=[9.0, *seconds, 9.0],
        losses=[*losses],
        peak_bytes=1 << 30,
        gpu_peak_bytes=0,
        predicted_seconds=2.2 if bytes_of else 0.0,
        **bytes_of,
    )


@pytest.fixture
def found() -> BenchReport:
    ours = training(2.0, losses=(3.0, 2.0, 1.5), planned_bytes=1000, moved_bytes=990)
    return BenchReport(
        environment=environment_of([]),
        hardware=replace(WITHOUT_GPU, nvme=replace(WITHOUT_GPU.nvme, paths=("/home/me/secret",))),
        size="tiny",
        num_parameters=1000,
        dtype="float32",
        tokens_per_step=64,
        micro_batches=2,
        layers={},
        update_seconds=0.5,
        exact_losses=[3.0, 2.0, 1.0],
        rounds=[
            {PLAIN: training(1.0), CHECKPOINTING: None, RATEL: ours},
            {PLAIN: training(3.0), CHECKPOINTING: None, RATEL: ours},
        ],
    )


def test_the_table(found: BenchReport) -> None:
    cells = dict(re.findall(r"^\| (.+?) \| (.*) \|$", "\n".join(bench_lines(found)), flags=re.MULTILINE))
    assert cells["model"] == "tiny: 1.00K parameters in float32; steps of 64 tokens in 2 micro-batches; 2 rounds"
    assert cells[PLAIN].startswith("2.00 s per step, 1.00 GiB of RAM")
    assert cells[CHECKPOINTING] == "does not fit"
    assert cells["predicted"] == "2.20 s per step, +10%"
    assert cells["moved"] == "1.98 KB of 2.00 KB planned"
    assert cells["losses"] == "4 of 6 equal those of plain PyTorch, to the bit"


def test_the_json_can_be_posted(found: BenchReport) -> None:
    content = json.dumps(found.to_json())
    assert "secret" not in content and "secret" not in "\n".join(bench_lines(found))
    assert json.loads(content)["rounds"][0][CHECKPOINTING] is None


def test_every_key_is_explained() -> None:
    explained = set(
        re.findall(r"^\| `([^|]+)` \|", GUIDE.read_text().partition("What the JSON has")[2], flags=re.MULTILINE)
    )
    keys = {key for row in explained for key in re.split(r"`, `", row)}
    assert keys == {"format_version", *(each.name for kind in (BenchReport, BenchTraining) for each in fields(kind))}
