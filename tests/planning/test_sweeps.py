"""Sweeps over the papers' models: no cliff as GPU memory or the step grows; what a larger micro-batch costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.planning.forecast.forecast import Forecaster, Setting
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.split import SplitRate, best_split, splits
from ratel_cli.run.ask.plan_inputs import forecaster_of, setting_of
from ratel_cli.run.files.hardware_file import load_hardware
from tests.tiers import sample

CONFIGS = Path(__file__).parents[2] / "configs"
GIBS = (8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48)
FEWER_GIBS = (8, 12, 16, 20, 24, 32, 48)
"""For models whose plans take long."""
FEWEST_GIBS = (8, 16, 24, 48)
"""For those whose plans take longest."""
LEAST = 0.98
"""The share of the tokens per second of a smaller one that is enough."""


@cache
def model(name: str, gib: int) -> tuple[Forecaster, Setting]:
    """A GPT on the paper's server with a GPU of this size; a step of one row."""
    file = CONFIGS / "models" / f"gpt-{name}.yaml"
    config = load_config(file, ["limits.host_memory=700GiB", f"limits.gpu_memory={gib}GiB"]).config
    hardware = load_hardware(CONFIGS / "hardware" / "paper-4090-12ssd.yaml")
    return forecaster_of(config, hardware, name=name, log=RunLog()), setting_of(config, hardware)


@cache
def rate(name: str, gib: int, workload: Workload) -> SplitRate:
    forecaster, setting = model(name, gib)
    return forecaster.forecast(replace(setting, workload=workload)).split_rate


def step_of(rows: int) -> Workload:
    return Workload(micro_batch_size=rows, num_micro_batches=1, sequence_len=1024)


def planned(name: str, gib: int, rows: int) -> SplitRate:
    return best_split(step_of(rows), lambda workload: rate(name, gib, workload))


def assert_no_cliff(rates: Iterable[SplitRate], *, keeps_fitting: bool) -> None:
    """What does not fit has no rate. `keeps_fitting`: what fits once fits from there on."""
    fastest = 0.0
    for each in rates:
        assert each.fits or not (fastest and keeps_fitting), each
        if each.fits:
            assert each.tokens_per_second >= LEAST * fastest, (fastest, each)
            fastest = max(fastest, each.tokens_per_second)


BY_MEMORY = [
    ("13b", 2, GIBS), ("13b", 8, GIBS), ("13b", 32, GIBS), ("13b", 64, FEWER_GIBS), ("30b", 8, GIBS),
    ("30b", 32, FEWER_GIBS), ("70b", 16, FEWER_GIBS), ("70b", 48, FEWEST_GIBS), ("175b", 1, GIBS),
    ("175b", 8, FEWEST_GIBS), ("175b", 16, FEWEST_GIBS),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", sample(BY_MEMORY, every=len(BY_MEMORY)), ids=lambda case: f"{case[0]}-{case[1]}")
def test_more_gpu_memory_never_harms(case: tuple[str, int, tuple[int, ...]]) -> None:
    """Any split, and the one that the plan chooses."""
    name, rows, gibs = case
    for workload in splits(step_of(rows)):
        assert_no_cliff((rate(name, gib, workload) for gib in gibs), keeps_fitting=True)
    assert_no_cliff((planned(name, gib, rows) for gib in gibs), keeps_fitting=True)


STEPS = (1, 4, 16, 32, 64)
BY_STEP = [("13b", 8), ("13b", 12), ("13b", 24), ("30b", 12), ("30b", 24), ("70b", 16), ("70b", 24), ("175b", 24)]


@pytest.mark.full
@pytest.mark.parametrize("case", sample(BY_STEP, every=len(BY_STEP), offset=2), ids=lambda case: f"{case[0]}-{case[1]}")
def test_more_rows_never_harm_where_the_plan_splits_them(case: tuple[str, int]) -> None:
    """In one micro-batch they would: the larger it is, the less GPU memory it leaves for what need not be recomputed.
    The split gains what that loses, as long as the step fits."""
    name, gib = case
    assert_no_cliff((planned(name, gib, rows) for rows in STEPS), keeps_fitting=False)
    fitting = [planned(name, gib, rows).fits for rows in STEPS]
    assert fitting == sorted(fitting, reverse=True)


FIXED_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)
FIXED = [
    ("13b", 12), ("13b", 16), ("13b", 24), ("13b", 48), ("30b", 16), ("30b", 24), ("30b", 48), ("70b", 24), ("70b", 48),
    ("175b", 24), ("175b", 48),
]  # fmt: skip
LEAST_BELOW = 0.96
"""Of all but the largest micro-batch that fits: units that stay on a GPU with much memory spare the link, and the
larger they are, the fewer stay."""
LEAST_OF_LARGEST = 0.88
"""It leaves so little memory that some outputs are recomputed instead of swapped."""


@pytest.mark.full
@pytest.mark.parametrize("case", sample(FIXED, every=len(FIXED), offset=1), ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_larger_micro_batch_costs_little(case: tuple[str, int]) -> None:
    """A step in one micro-batch whose size the user has fixed."""
    fitting = [each for rows in FIXED_ROWS if (each := rate(*case, step_of(rows))).fits]
    fastest = 0.0
    for each in fitting:
        least = LEAST_OF_LARGEST if each is fitting[-1] else LEAST_BELOW
        assert each.tokens_per_second >= least * fastest, (fastest, each)
        fastest = max(fastest, each.tokens_per_second)
