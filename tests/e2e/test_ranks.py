"""`ratel finetune` in several ranks: the weights of plain PyTorch, whatever ends them and whenever they go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from ratel_cli.training.facts import FACTS_NAME
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    MOST_FILE_BYTES,
    PATIENCE,
    assert_rejected,
    assert_same_result,
    curve,
    export_hash,
    exported,
    file_hash,
    finetune,
    json_lines,
    load_data,
    metrics,
    output_of,
    ratel,
    ratel_command,
    recipe_of,
    start_ranks,
    stderr_of,
    store_of,
    succeed_ranks,
    wait,
    wait_for_step,
    weights_name,
)
from tests.e2e.trained import (
    LORA_IN_PEFT,
    TRAINED,
    WHOLE_OR_ADAPTER,
    OfEach,
    named_as_exported,
    run_of_each,
)
from tests.ranks.oracle import cuts_of
from tests.reference import train_in_memory
from tests.tiers import rotating, sample

NUM_STEPS = 8
CHANGES: dict[str, object] = {"max_steps": NUM_STEPS, "micro_batch_size": 1, "gradient_accumulation_steps": 2}
POINTS = (
    "commit.written:4", "commit.synced:4", "commit.published:4", "manifest.ready:4", "manifest.published:4",
    "create.filled:1", "manifest.published:1",
)  # fmt: skip
"""Of the third commit, and of an import."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs of two ranks."""
    return run_of_each(tmp_path_factory, base=base, rows=rows, run=lambda config: succeed_ranks(config, 2), **CHANGES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "dtype", "what"),
    [(2, "bfloat16", "all weights"), (3, "float32", "all weights"), (3, "bfloat16", "lora")],
)
def test_the_export_is_what_pytorch_trains(
    make_config: MakeConfig, base: Path, size: int, dtype: str, what: str
) -> None:
    """With the batches of one rank that has as many micro-batches; what each rank has is added up in its order."""
    keys = {**CHANGES, **TRAINED[what], "dtype": dtype}
    config = make_config("ranks", **keys)
    succeed_ranks(config, size)
    whole = make_config("whole", **{**keys, "gradient_accumulation_steps": 2 * size})
    data, model_config = load_data(whole), LlamaConfig.from_pretrained(base)
    lora = LORA_IN_PEFT if what == "lora" else None
    wanted = train_in_memory(
        model_config,
        load_file(base / "model.safetensors"),
        [data.step(step) for step in range(NUM_STEPS)],
        replace(recipe_of(config), of_rank=2, cuts=cuts_of(model_config, size, lora=lora), lora=lora),
    )
    found, weights = exported(config), wanted.weights if lora is None else named_as_exported(wanted.weights)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(found[name], values.to(found[name].dtype)), name
    lines = metrics(config)
    assert [line["loss"] for line in lines] == list(wanted.losses)
    assert [line["grad_norm"] for line in lines] == list(wanted.norms)
    for rank in range(1, size):
        of_rank = output_of(config) / "run" / "ranks" / str(rank) / "run" / "metrics.jsonl"
        of_others = json_lines(of_rank)
        assert len(of_others) == NUM_STEPS
        for key in ("slowest_rank", "slowest_bottleneck"):
            assert [line[key] for line in of_others] == [line[key] for line in lines]
        assert stderr_of(config, rank) == "", "rank 0 speaks for all"


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "killed", "what"), rotating(POINTS, [(0,), (1,), (0, 1)], WHOLE_OR_ADAPTER, full_rotation=True)
)
def test_ranks_that_are_killed_go_on(
    make_config: MakeConfig, undisturbed: OfEach, point: str, killed: tuple[int, ...], what: str
) -> None:
    """Those that are left say which one has ended, and end."""
    config = make_config(**{**CHANGES, **TRAINED[what]})
    processes = start_ranks(config, 2, kill_at=dict.fromkeys(killed, point))
    codes = [wait(process) for process in processes]
    for rank, code in enumerate(codes):
        assert code == (-9 if rank in killed else 75), stderr_of(config, rank)
        if rank not in killed:
            assert f"rank {1 - rank} has ended" in stderr_of(config, rank)
    succeed_ranks(config, 2)
    assert ("resuming from step" in stderr_of(config)) is point.endswith("4")
    assert_same_result(config, undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=3))
def test_other_commands_read_the_state_of_all_ranks(
    make_config: MakeConfig, rows: Path, tmp_path: Path, what: str
) -> None:
    """In one process. Deleting the store deletes that of each rank."""
    config = make_config(**{**CHANGES, **TRAINED[what]})
    succeed_ranks(config, 3)
    output = output_of(config)
    for command in (
        ("verify", output), ("export", output, "-o", tmp_path / "export"), ("eval", output, rows),
        ("generate", output, "a", "--max-new-tokens", 2), ("status", output),
    ):  # fmt: skip
        ended = ratel(*command)
        assert ended.code == 0, ended.stderr
    assert file_hash(tmp_path / "export" / weights_name(config)) == export_hash(config)
    assert_rejected(ratel("verify", output / "run" / "ranks" / "1"), 2, "is rank 1 of a run")
    damaged = store_of(config).parent / "rank-2.store" / "ratel.store"
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(bytes(range(256)) * 512)
    assert ratel("verify", output).code == 4
    assert ratel("clean", output, "--store", "--yes").code == 0
    assert not store_of(config).parent.exists()


@pytest.mark.full
def test_a_signal_to_one_is_a_stop_of_all(make_config: MakeConfig, undisturbed: OfEach) -> None:
    """After the same step."""
    config = make_config(**{**CHANGES, "max_steps": 2000})
    processes = start_ranks(config, 2)
    wait_for_step(config, 2, processes[0])
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGINT)
    assert [wait(process) for process in processes] == [130, 130]
    assert "Stopped at step" in stderr_of(config) and stderr_of(config, 1) == ""
    steps = [
        len(json_lines(directory / "run" / "metrics.jsonl"))
        for directory in (output_of(config), output_of(config) / "run" / "ranks" / "1")
    ]
    assert steps[0] == steps[1]


@pytest.mark.full
def test_a_rank_that_starts_late_is_waited_for(make_config: MakeConfig, undisturbed: OfEach) -> None:
    config = make_config(**CHANGES)
    [*others] = start_ranks(config, 2)
    assert [wait(process) for process in others] == [0, 0]
    assert_same_result(config, undisturbed("all weights"))


@pytest.mark.full
def test_the_command_starts_them(make_config: MakeConfig, undisturbed: OfEach) -> None:
    """By torchrun's agent; its exit code is that of what went wrong."""
    config = make_config(**CHANGES)
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "W1" not in ended.stderr and "Traceback" not in ended.stderr
    assert_same_result(config, undisturbed("all weights"))
    other = subprocess.run([*command[:-1], "3"], check=False, capture_output=True, text=True, timeout=300)
    assert other.returncode == 2, other.stderr
    errors = [line for line in other.stderr.splitlines() if line.startswith("error")]
    assert errors == ["error: a step of this run has 4 micro-batches, and not 3 x 2"]
    assert "hint: resume it with --ranks 2\n" in other.stderr


@pytest.mark.full
def test_the_command_starts_them_from_another_run(make_config: MakeConfig, undisturbed: OfEach) -> None:
    """With the weights of the other run, not with those of the base model."""
    source = output_of(undisturbed("all weights"))
    config = make_config(**{**CHANGES, "max_steps": 1})
    command = [str(ratel_command()), "finetune", str(config), "--from", str(source), "--fresh-optimizer", "--ranks=2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (first,) = curve(config)
    assert first[1] < 0.9 * curve(undisturbed("all weights"))[0][1], "the loss of weights that have learnt"


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_passes_signals_on(make_config: MakeConfig, number: signal.Signals, code: int) -> None:
    """Once to each rank. They end after the same step, and the command after them."""
    config = make_config(**{**CHANGES, "max_steps": 5000})
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log = output_of(config) / "run" / "metrics.jsonl"
        while not log.exists() or len(json_lines(log)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert stderr.count("Stopped at step") == 1 and "error" not in stderr and "W1" not in stderr
    other = output_of(config) / "run" / "ranks" / "1" / "run" / "metrics.jsonl"
    assert len(json_lines(log)) == len(json_lines(other))


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_names_the_rank_that_was_killed(make_config: MakeConfig, rank: int) -> None:
    """As the kernel kills what takes too much memory; the others, which end for that reason, do not count."""
    config = make_config(**{**CHANGES, "max_steps": 5000})
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log, runs = output_of(config) / "run" / "metrics.jsonl", ("run", "run/ranks/1/run")
        while not log.exists() or len(json_lines(log)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        facts = json.loads((output_of(config) / runs[rank] / FACTS_NAME).read_text())
        os.kill(facts["pid"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 137, stderr
    assert f"error: rank {rank} was killed by signal 9 (SIGKILL): out of memory?" in stderr
    assert stderr.rindex("was killed by signal") > stderr.rfind("Stopped")


@pytest.mark.full
def test_paths_of_each_rank(make_config: MakeConfig, undisturbed: OfEach, tmp_path: Path) -> None:
    """They are found again by the config and by the run's directory, in one process and in several."""
    storage = {"engine": "threads", "paths": [str(tmp_path / "disk{rank}")]}
    config = make_config(**{**CHANGES, "max_steps": 4}, storage=storage)
    succeed_ranks(config, 2)
    assert all(next((tmp_path / f"disk{rank}").rglob("ratel.store")).is_file() for rank in range(2))
    for run in (config, output_of(config)):
        assert ratel("verify", run).code == 0
    succeed_ranks(config, 2, f"max_steps={NUM_STEPS}")
    assert_same_result(config, undisturbed("all weights"))


def test_what_ranks_do_not_do_is_rejected(make_config: MakeConfig, tmp_path: Path) -> None:
    rejected: dict[str, dict[str, object]] = {
        "storage.durability: none": {"storage": {"durability": "none"}},
    }  # fmt: skip
    for number, (part, changes) in enumerate(rejected.items()):
        config = make_config(str(number), **{**CHANGES, **changes})
        processes = start_ranks(config, 2)
        assert [wait(process) for process in processes] == [2, 2], stderr_of(config)
        assert f"{part} is not supported" in stderr_of(config) and stderr_of(config, 1) == ""
    assert_rejected(finetune(config, "--ranks", "0"), 2, "ranks")


@pytest.mark.full
@pytest.mark.parametrize("hung", [0, 1])
def test_a_rank_that_hangs_ends_all(make_config: MakeConfig, hung: int) -> None:
    """After some time, with an error that names it. It ends when it goes on; then all resume."""
    config = make_config(**CHANGES)
    processes = start_ranks(config, 2, "max_steps=4000", environments={rank: {PATIENCE: "5"} for rank in (0, 1)})
    wait_for_step(config, 2, processes[0])
    assert processes[hung].pid is not None
    os.kill(processes[hung].pid, signal.SIGSTOP)
    start = time.monotonic()
    assert wait(processes[1 - hung]) == 75, stderr_of(config, 1 - hung)
    assert time.monotonic() - start < 60
    assert f"rank {hung} does not answer" in stderr_of(config, 1 - hung)
    os.kill(processes[hung].pid, signal.SIGCONT)
    assert wait(processes[hung]) == 75
    assert "error" not in stderr_of(config, hung), "the other one has said it"
    step = len(metrics(config))
    succeed_ranks(config, 2, f"max_steps={step + 2}")
    assert "resuming from step" in stderr_of(config)


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 1])
def test_a_full_disk_of_one_rank_ends_all(
    make_config: MakeConfig, undisturbed: OfEach, small_disk: Path, tmp_path: Path, short: int
) -> None:
    """With its own drive. With another one, all begin."""
    (tmp_path / f"drive{short}").symlink_to(small_disk)
    subprocess.run(["mount", "-o", "remount,size=256k", str(small_disk)], check=True)
    config = make_config(**CHANGES, storage={"engine": "threads", "paths": [str(tmp_path / "drive{rank}")]})
    codes = [wait(process) for process in start_ranks(config, 2)]
    assert codes[short] == 3 and codes[1 - short] == 75, [stderr_of(config, rank) for rank in range(2)]
    assert "not enough space for the store: " in stderr_of(config, short)
    assert "error" not in stderr_of(config, 1 - short), "the other one has said it"
    (tmp_path / f"drive{short}").unlink()
    succeed_ranks(config, 2)
    assert_same_result(config, undisturbed("all weights"))


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_without_space_ends_all(make_config: MakeConfig, undisturbed: OfEach, short: int) -> None:
    """It says what is missing. With more space, all begin."""
    config = make_config(**CHANGES)
    processes = start_ranks(config, 2, environments={short: {MOST_FILE_BYTES: "100000"}})
    codes = [wait(process) for process in processes]
    assert codes[short] == 3 and codes[1 - short] == 75, [stderr_of(config, rank) for rank in range(2)]
    assert "the limit of this process on the size of files" in stderr_of(config, short)
    assert "error" not in stderr_of(config, 1 - short)
    succeed_ranks(config, 2)
    assert_same_result(config, undisturbed("all weights"))


@pytest.mark.full
def test_ranks_that_diverge_end_together(make_config: MakeConfig) -> None:
    """One of them says so."""
    config = make_config(**{**CHANGES, "max_steps": 30, "learning_rate": 1e15, "max_grad_norm": None})
    processes = start_ranks(config, 2)
    assert [wait(process) for process in processes] == [5, 5], stderr_of(config)
    assert stderr_of(config).count("error:") == 1 and stderr_of(config, 1) == ""


def restart(config: Path, num_kills: int, *, seed: int) -> None:
    """Run two ranks under torchrun, which starts them again whenever one of them is killed."""
    draw = random.Random(seed)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(num_kills), "--monitor-interval", "0.1", "-m", "ratel_cli", "finetune", str(config),
    ]  # fmt: skip
    run = output_of(config) / "run"
    facts = [run / "run.json", run / "ranks" / "1" / "run" / "run.json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        killed = set[int]()
        for _ in range(num_kills):
            time.sleep(draw.uniform(0.0, 1.0))
            pids = set[int]()
            while not pids:  # those of ranks that have begun to train since the last kill
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.02)
                with suppress(OSError, ValueError):
                    pids = {json.loads(each.read_text())["pid"] for each in facts} - killed
            for pid in draw.sample(sorted(pids), k=draw.randint(1, len(pids))):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= pids
        _, stderr = process.communicate(timeout=500)
    assert process.returncode == 0, stderr


@pytest.mark.full
def test_torchrun_starts_them_again(make_config: MakeConfig, undisturbed: OfEach) -> None:
    config = make_config(**CHANGES)
    restart(config, 2, seed=0)
    assert_same_result(config, undisturbed("all weights"))


@pytest.mark.nightly
def test_torchrun_starts_them_again_and_again(make_config: MakeConfig) -> None:
    """Killed 20 times, at whatever they do."""
    changes = {**CHANGES, "max_steps": 400}
    config, other = make_config("killed", **changes), make_config("undisturbed", **changes)
    restart(config, 20, seed=1)
    succeed_ranks(other, 2)
    assert_same_result(config, other)
