"""The split of a run and the chunks of its head: what does not fit any more, what would be faster now, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.placement import LEAST_UNITS, Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.head_chunk import CHUNK_BYTES
from ratel_cli.run.inputs.settings import as_recorded, settings_hash
from ratel_cli.run.train.engine import engine_settings
from ratel_cli.run.train.planner import Planner
from ratel_cli.run.train.split import plan_split, report_better_split
from ratel_cli.units import GIB, MIB
from tests.planning.profiles import estimated
from tests.planning.shapes import gpt, machine, unit_of

SPEC = gpt(num_layers=4, hidden_size=256, vocab_size=4000)
WHOLE = Workload(micro_batch_size=16, num_micro_batches=1, sequence_len=128)
HALVES = Workload(micro_batch_size=8, num_micro_batches=2, sequence_len=128)


def needed_bytes(workload: Workload) -> int:
    profile = estimated(SPEC, workload)
    inputs_bytes = profile.profiles[0].input_bytes
    return GpuMemory(SPEC, workload, profile).needed_bytes(unit_of(inputs_bytes), units=LEAST_UNITS)


def planner(workload: Workload, *, device_limit_bytes: int) -> Planner:
    """For a GPU that computes slowly, so that it pays to offload."""
    return Planner(
        spec=SPEC,
        workload=workload,
        decisions=Decisions(
            holds_gradients=False, num_slots=2, host_limit_bytes=GIB, device_limit_bytes=device_limit_bytes
        ),
        hardware=machine(flops_per_second=1e10),
        process_bytes=0,
    )


@pytest.mark.parametrize(
    ("is_new", "message", "hint"),
    [
        (
            True,
            "no split of 2048 tokens into micro-batches fits; 1 micro-batch of 16 sequences comes closest: GPU",
            "raise the limits, or lower tokens_per_step or sequence_len",
        ),
        (
            False,
            "the split that this run began with, 1 micro-batch of 16 sequences, does not fit any more: GPU",
            "free memory or raise the limits; the split cannot change during a run, but --resume no starts over",
        ),
    ],
)
def test_a_split_that_does_not_fit(is_new: bool, message: str, hint: str) -> None:
    limit_bytes = needed_bytes(WHOLE)
    assert plan_split(planner(WHOLE, device_limit_bytes=limit_bytes), estimated(SPEC, WHOLE), is_new=is_new)
    with pytest.raises(DoesNotFit) as raised:
        plan_split(planner(WHOLE, device_limit_bytes=limit_bytes - 7), estimated(SPEC, WHOLE), is_new=is_new)
    assert raised.value.message.startswith(message)
    assert raised.value.hint == hint
    assert (raised.value.shortfall_bytes, raised.value.is_gpu_memory) == (7, True)


def test_a_split_that_would_be_faster_now_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole step fits with nothing swapped. In smaller micro-batches everything can be."""
    of, profile = planner(WHOLE, device_limit_bytes=needed_bytes(WHOLE)), estimated(SPEC, WHOLE)
    report_better_split(of, profile, of.plan(profile), RunLog())
    [line] = capsys.readouterr().err.splitlines()
    begun, _, chosen = line.partition("; the plan would now choose ")
    assert begun == "the run keeps the split that it began with, 1 micro-batch of 16 sequences"
    assert " micro-batches of " in chosen
    assert chosen.endswith(" % faster")


def test_nothing_is_reported_where_no_split_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    for workload in (WHOLE, HALVES):
        of, profile = planner(workload, device_limit_bytes=4 * GIB), estimated(SPEC, workload)
        report_better_split(of, profile, of.plan(profile), RunLog())
    assert capsys.readouterr().err == ""


def test_each_size_of_chunks_has_a_hash_of_its_own() -> None:
    config = RunConfig(base_model="org/name", datasets=(DatasetConfig(path="a"),))
    hashes = {settings_hash(config.chunked_by(size)) for size in CHUNK_BYTES}
    assert len({settings_hash(config), *hashes}) == 1 + len(CHUNK_BYTES)


def test_the_engine_follows_the_plan_s_chunks() -> None:
    config = RunConfig(base_model="org/name", datasets=(DatasetConfig(path="a"),))
    for chunk_tokens in (100, 200):
        of = planner(replace(WHOLE, chunk_tokens=chunk_tokens), device_limit_bytes=4 * GIB)
        assert engine_settings(config, of.plan(estimated(SPEC, WHOLE))).chunk_tokens == chunk_tokens


def test_without_a_store_the_plan_has_to_choose(tmp_path: Path) -> None:
    config = RunConfig(base_model="org/name", datasets=(DatasetConfig(path="a"),), tokens_per_step=24 * 1024)
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"paths": (tmp_path,)})})
    assert as_recorded(config) is config
    known = config.split_by(6)
    assert as_recorded(known) is known
    chunked = known.chunked_by(64 * MIB)
    assert as_recorded(chunked) is chunked
    written_out = RunConfig(
        base_model="org/name", datasets=(DatasetConfig(path="a"),), micro_batch_size=6, gradient_accumulation_steps=4
    )
    assert settings_hash(known) == settings_hash(written_out) != settings_hash(config.split_by(4))
