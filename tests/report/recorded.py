"""Runs as their files show them, made without training: any number of steps, on a machine of any size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ratel_cli.model.files.marker import Marker, write_marker
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.search.recorded_plan import plan_json
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.store.lock import DATA_FILE_NAME, OWNER_FILE_NAME
from ratel_cli.training.facts import FACTS_NAME, RunFacts
from ratel_cli.training.metrics import StepMetrics
from tests.hardware.profiles import WITHOUT_GPU
from tests.report.test_run import METRICS, plan

FACTS = RunFacts(
    num_steps=100,
    first_step=0,
    num_samples=79,
    num_tokens=4830,
    software="ratel 0.1.0, torch 2.13.0, transformers 5.17.0, x86_64 avx512",
    started="2026-11-23 07:00:00+00:00",
    pid=1,
    steps_per_epoch=40,
)


def wave(number: int, period: float) -> float:
    """Noise that is the same on every machine."""
    return math.sin(12.9898 * number) * math.cos(78.233 * number / period)


def steps(count: int, *, first: int = 1, eval_every: int | None = None) -> list[StepMetrics]:
    """Steps of a run whose loss falls, with stalls now and then."""
    made = []
    for number in range(first, first + count):
        seconds = 4.0 + 0.3 * wave(number, 7) + (2.5 if number == 1 else 0.0)
        busy: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0) | {
            "compute": 0.9 * seconds,
            "nvme read": (0.42 + 0.1 * wave(number, 5)) * seconds,
            "nvme write": (0.33 + 0.1 * wave(number, 3)) * seconds,
            "optimizer": 0.2 * seconds,
        }
        waited: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0) | {"nvme read": max(0, wave(number, 2)) * 0.2}
        loss = 1.4 + 2.2 * math.exp(-number / (0.2 * count + 1)) + 0.12 * wave(number, 11)
        is_evaluated = eval_every is not None and number % eval_every == 0
        made.append(
            replace(
                METRICS,
                step=number,
                loss=loss,
                learning_rate=2e-5 * min(1, number / (0.05 * count + 1)) * (1 - 0.9 * number / (count + first)),
                grad_norm=0.8 + 0.5 * abs(wave(number, 13)),
                clipped=wave(number, 13) > 0.6,
                tokens=8192,
                step_seconds=seconds,
                tokens_per_second=8192 / seconds,
                nvme_read_bytes=14 * 10**9,
                nvme_written_bytes=12 * 10**9,
                host_peak_bytes=(28 << 30) + min(number, 50) * (20 << 20),
                busy_seconds=busy,
                waited_seconds=waited,
                predicted_seconds=3.9 if number > 1 else 4.4,
                eval_loss=loss + 0.05 if is_evaluated else None,
            )
        )
    return made


def write_metrics(path: Path, made: Sequence[StepMetrics], *, rest: str = "") -> None:
    """The file, with something behind its last line."""
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in made) + rest)


def write_run(
    directory: Path,
    made: Sequence[StepMetrics],
    *,
    facts: RunFacts | None = FACTS,
    exported_step: int | None = None,
    made_plan: Plan | None = None,
    owner: int | None = None,
    has_store: bool = True,
    keys: str = "",
) -> Path:
    """An output directory as a run leaves it, with its store next to it; `owner` is the process in the store's file."""
    run_dir, store = directory / "run", directory.with_name(f"{directory.name}.store")
    run_dir.mkdir(parents=True)
    config = f"base_model: org/name\ndatasets: d.jsonl\noutput_dir: {directory}\n{keys}"
    (run_dir / "config.yaml").write_text(config)
    (run_dir / "plan.json").write_text(json.dumps(plan_json(made_plan or plan(holds_gradients=True))))
    (run_dir / "hardware.json").write_text(json.dumps(WITHOUT_GPU.to_json()))
    if facts is not None:
        (run_dir / FACTS_NAME).write_text(json.dumps(asdict(facts)))
    if made:
        write_metrics(run_dir / "metrics.jsonl", made)
    write_marker(directory, Marker(run=os.path.realpath(directory), is_run=True, step=exported_step))
    if has_store:
        store.mkdir()
        (store / DATA_FILE_NAME).write_bytes(bytes(1000))
        if owner is not None:
            (store / OWNER_FILE_NAME).write_text(json.dumps({"pid": owner, "started": "now"}))
    return directory
