"""The runs of the Ratel paper fit on its machines, in the micro-batches that the plan chooses, and are as fast."""

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
    throughput: dict[str, float | None]


Plan = Callable[..., Planned]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Plans a step of so many rows, in the split that the plan chooses."""

    def of(model: str, rows: int, machine: str, *overrides: str) -> Planned:
        files = [f"{CONFIGS}/models/gpt-{model}.yaml", "--hardware", f"{CONFIGS}/hardware/{machine}.yaml"]
        main(["plan", *files, f"tokens_per_step={1024 * rows}", *overrides, "--json"])
        content: Planned = json.loads(capsys.readouterr().out)
        return content

    return of


@pytest.mark.full
@pytest.mark.parametrize("run", sample(RUNS, every=12), ids=lambda run: "-".join(map(str, run)))
def test_it_fits(plan: Plan, run: tuple[str, int, str]) -> None:
    assert plan(*run)["memory"]["fits"]


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "rows", "tflops"), TFLOPS)
def test_it_is_predicted_to_be_as_fast_as_in_the_paper(plan: Plan, model: str, rows: int, tflops: float) -> None:
    """The paper clips no step: its figures are those of unclipped ones. Nothing but the batch is set."""
    throughput = plan(model, rows, "paper-4090-12ssd")["throughput"]
    assert (throughput["unclipped_tflops_model"] or throughput["tflops_model"]) >= tflops


@pytest.mark.nightly
def test_clipping_costs_the_commonest_run_nothing_where_no_step_is_clipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Qwen3-8B on an RTX 4090 with 62 of 64 GiB and one drive, 16 x 4096 tokens, all else by default: 46.1 s a step
    if every update waited for the norm."""
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape, **heads}))
    config = {
        "base_model": str(tmp_path),
        "random_init": True,
        "datasets": [{"path": "rows.jsonl", "type": "completion"}],
    }
    sizes = {"sequence_len": 4096, "micro_batch_size": 1, "gradient_accumulation_steps": 16}
    (tmp_path / "run.yaml").write_text(json.dumps({**config, **sizes, "output_dir": str(tmp_path / "out")}))
    (tmp_path / "machine.yaml").write_text(
        """
gpu: {name: RTX 4090, memory_bytes: 25_769_803_776, flops_per_second: 164_000_000_000_000}
link: {to_gpu_bytes_per_second: 22_600_000_000, from_gpu_bytes_per_second: 22_600_000_000}
nvme: {num_devices: 1, read_bytes_per_second: 7_000_000_000, write_bytes_per_second: 6_000_000_000,
  free_bytes: 2_000_000_000_000}
host: {num_cores: 16, memory_bytes: 68_719_476_736, available_bytes: 66_571_993_088,
  adam_parameters_per_second: 2_500_000_000, memory_bytes_per_second: 80_000_000_000}
"""
    )
    main(
        [
            "plan",
            str(tmp_path / "run.yaml"),
            "limits.host_memory=62GiB",
            "--hardware",
            str(tmp_path / "machine.yaml"),
            "--json",
        ]
    )
    printed = capsys.readouterr()
    assert printed.out, printed.err
    found = json.loads(printed.out)
    assert found["time"]["unclipped_seconds"] <= 33.0 < found["time"]["step_seconds"]
    [clipping] = [each for each in found["advice"] if each["change"].startswith("max_grad_norm: null")]
    assert clipping["gain"] > 0.3 and "the result differs" in clipping["change"]
    gain = (1 + clipping["gain"]) * found["time"]["unclipped_seconds"] / found["time"]["step_seconds"] - 1
    assert clipping["unclipped_gain"] == pytest.approx(gain) and 0.0 <= gain < 0.2
