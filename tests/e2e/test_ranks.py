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
from pathlib import Path

import pytest
from transformers import LlamaConfig

from ratel_cli.training.facts import FACTS_NAME
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    MOST_FILE_BYTES,
    PATIENCE,
    Config,
    assert_rejected,
    file_hash,
    json_lines,
    ratel,
    ratel_command,
    wait,
    works,
)
from tests.e2e.trained import (
    LORA_IN_PEFT,
    TRAINED,
    WHOLE_OR_ADAPTER,
    OfEach,
    assert_trained,
    in_plain_torch,
    run_of_each,
)
from tests.ranks.oracle import cuts_of
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
    return run_of_each(tmp_path_factory, base=base, rows=rows, run=lambda config: config.succeed_ranks(2), **CHANGES)


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
    config.succeed_ranks(size)
    whole = make_config("whole", **{**keys, "gradient_accumulation_steps": 2 * size})
    lora = LORA_IN_PEFT if what == "lora" else None
    cuts = cuts_of(LlamaConfig.from_pretrained(base), size, lora=lora)
    assert_trained(config, in_plain_torch(config, base, data_of=whole, of_rank=2, cuts=cuts, lora=lora))
    lines = config.metrics
    for rank in range(1, size):
        of_rank = config.output / "run" / "ranks" / str(rank) / "run" / "metrics.jsonl"
        of_others = json_lines(of_rank)
        assert len(of_others) == NUM_STEPS
        for key in ("slowest_rank", "slowest_bottleneck"):
            assert [line[key] for line in of_others] == [line[key] for line in lines]
        assert config.stderr_of(rank) == "", "rank 0 speaks for all"


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "killed", "what"), rotating(POINTS, [(0,), (1,), (0, 1)], WHOLE_OR_ADAPTER, full_rotation=True)
)
def test_ranks_that_are_killed_go_on(
    make_config: MakeConfig, undisturbed: OfEach, point: str, killed: tuple[int, ...], what: str
) -> None:
    """Those that are left say which one has ended, and end."""
    config = make_config(**{**CHANGES, **TRAINED[what]})
    codes = config.run_ranks(2, kill_at=dict.fromkeys(killed, point))
    for rank, code in enumerate(codes):
        assert code == (-9 if rank in killed else 75), config.stderr_of(rank)
        if rank not in killed:
            assert f"rank {1 - rank} has ended" in config.stderr_of(rank)
    config.succeed_ranks(2)
    assert ("resuming from step" in config.stderr) is point.endswith("4")
    config.assert_same_result(undisturbed(what))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(list(TRAINED), every=3))
def test_other_commands_read_the_state_of_all_ranks(
    make_config: MakeConfig, rows: Path, tmp_path: Path, what: str
) -> None:
    """In one process. Deleting the store deletes that of each rank."""
    config = make_config(**{**CHANGES, **TRAINED[what]})
    config.succeed_ranks(3)
    output = config.output
    for command in (
        ("verify", output), ("export", output, "-o", tmp_path / "export"), ("eval", output, rows),
        ("generate", output, "a", "--max-new-tokens", 2), ("status", output),
    ):  # fmt: skip
        works(*command)
    assert file_hash(tmp_path / "export" / config.weights_path.name) == config.export_hash
    assert_rejected(ratel("verify", output / "run" / "ranks" / "1"), 2, "is rank 1 of a run")
    damaged = config.store.parent / "rank-2.store" / "ratel.store"
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(bytes(range(256)) * 512)
    assert ratel("verify", output).code == 4
    works("clean", output, "--store", "--yes")
    assert not config.store.parent.exists()


@pytest.mark.full
def test_a_signal_to_one_is_a_stop_of_all(make_config: MakeConfig, undisturbed: OfEach) -> None:
    """After the same step."""
    config = make_config(**{**CHANGES, "max_steps": 2000})
    processes = config.start_ranks(2)
    config.wait_for_step(2, processes[0])
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGINT)
    assert [wait(process) for process in processes] == [130, 130]
    assert "Stopped at step" in config.stderr and config.stderr_of(1) == ""
    steps = [
        len(json_lines(directory / "run" / "metrics.jsonl"))
        for directory in (config.output, config.output / "run" / "ranks" / "1")
    ]
    assert steps[0] == steps[1]


@pytest.mark.full
def test_a_rank_that_starts_late_is_waited_for(make_config: MakeConfig, undisturbed: OfEach) -> None:
    config = make_config(**CHANGES)
    [*others] = config.start_ranks(2)
    assert [wait(process) for process in others] == [0, 0]
    config.assert_same_result(undisturbed("all weights"))


@pytest.mark.full
def test_the_command_starts_them(make_config: MakeConfig, undisturbed: OfEach) -> None:
    """By torchrun's agent; its exit code is that of what went wrong."""
    config = make_config(**CHANGES)
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "W1" not in ended.stderr and "Traceback" not in ended.stderr
    config.assert_same_result(undisturbed("all weights"))
    other = subprocess.run([*command[:-1], "3"], check=False, capture_output=True, text=True, timeout=300)
    assert other.returncode == 2, other.stderr
    errors = [line for line in other.stderr.splitlines() if line.startswith("error")]
    assert errors == ["error: a step of this run has 4 micro-batches, and not 3 x 2"]
    assert "hint: resume it with --ranks 2\n" in other.stderr


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_passes_signals_on(make_config: MakeConfig, number: signal.Signals, code: int) -> None:
    """Once to each rank. They end after the same step, and the command after them."""
    config = make_config(**{**CHANGES, "max_steps": 5000})
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log = config.output / "run" / "metrics.jsonl"
        while not log.exists() or len(json_lines(log)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert stderr.count("Stopped at step") == 1 and "error" not in stderr and "W1" not in stderr
    other = config.output / "run" / "ranks" / "1" / "run" / "metrics.jsonl"
    assert len(json_lines(log)) == len(json_lines(other))


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_names_the_rank_that_was_killed(make_config: MakeConfig, rank: int) -> None:
    """As the kernel kills what takes too much memory; the others, which end for that reason, do not count."""
    config = make_config(**{**CHANGES, "max_steps": 5000})
    command = [str(ratel_command()), "finetune", str(config), "--ranks", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        log, runs = config.output / "run" / "metrics.jsonl", ("run", "run/ranks/1/run")
        while not log.exists() or len(json_lines(log)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        facts = json.loads((config.output / runs[rank] / FACTS_NAME).read_text())
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
    config.succeed_ranks(2)
    assert all(next((tmp_path / f"disk{rank}").rglob("ratel.store")).is_file() for rank in range(2))
    for run in (config, config.output):
        works("verify", run)
    config.succeed_ranks(2, f"max_steps={NUM_STEPS}")
    config.assert_same_result(undisturbed("all weights"))


def test_what_ranks_do_not_do_is_rejected(make_config: MakeConfig) -> None:
    config = make_config(**CHANGES, storage={"durability": "none"})
    assert config.run_ranks(2) == [2, 2], config.stderr
    assert "storage.durability: none is not supported" in config.stderr and config.stderr_of(1) == ""
    assert_rejected(config.finetune("--ranks", "0"), 2, "ranks")


@pytest.mark.full
@pytest.mark.parametrize("hung", [0, 1])
def test_a_rank_that_hangs_ends_all(make_config: MakeConfig, hung: int) -> None:
    """After some time, with an error that names it. It ends when it goes on; then all resume."""
    config = make_config(**CHANGES)
    processes = config.start_ranks(2, "max_steps=4000", environments={rank: {PATIENCE: "5"} for rank in (0, 1)})
    config.wait_for_step(2, processes[0])
    assert processes[hung].pid is not None
    os.kill(processes[hung].pid, signal.SIGSTOP)
    start = time.monotonic()
    assert wait(processes[1 - hung]) == 75, config.stderr_of(1 - hung)
    assert time.monotonic() - start < 60
    assert f"rank {hung} does not answer" in config.stderr_of(1 - hung)
    os.kill(processes[hung].pid, signal.SIGCONT)
    assert wait(processes[hung]) == 75
    assert "error" not in config.stderr_of(hung), "the other one has said it"
    step = len(config.metrics)
    config.succeed_ranks(2, f"max_steps={step + 2}")
    assert "resuming from step" in config.stderr


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 1])
def test_a_full_disk_of_one_rank_ends_all(
    make_config: MakeConfig, undisturbed: OfEach, small_disk: Path, tmp_path: Path, short: int
) -> None:
    """With its own drive. With another one, all begin."""
    (tmp_path / f"drive{short}").symlink_to(small_disk)
    subprocess.run(["mount", "-o", "remount,size=256k", str(small_disk)], check=True)
    config = make_config(**CHANGES, storage={"engine": "threads", "paths": [str(tmp_path / "drive{rank}")]})
    codes = config.run_ranks(2)
    assert codes[short] == 3 and codes[1 - short] == 75, [config.stderr_of(rank) for rank in range(2)]
    assert "not enough space for the store: " in config.stderr_of(short)
    assert "error" not in config.stderr_of(1 - short), "the other one has said it"
    (tmp_path / f"drive{short}").unlink()
    config.succeed_ranks(2)
    config.assert_same_result(undisturbed("all weights"))


@pytest.mark.full
@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_without_space_ends_all(make_config: MakeConfig, undisturbed: OfEach, short: int) -> None:
    """It says what is missing. With more space, all begin."""
    config = make_config(**CHANGES)
    processes = config.start_ranks(2, environments={short: {MOST_FILE_BYTES: "100000"}})
    codes = [wait(process) for process in processes]
    assert codes[short] == 3 and codes[1 - short] == 75, [config.stderr_of(rank) for rank in range(2)]
    assert "the limit of this process on the size of files" in config.stderr_of(short)
    assert "error" not in config.stderr_of(1 - short)
    config.succeed_ranks(2)
    config.assert_same_result(undisturbed("all weights"))


@pytest.mark.full
def test_ranks_that_diverge_end_together(make_config: MakeConfig) -> None:
    """One of them says so."""
    config = make_config(**{**CHANGES, "max_steps": 30, "learning_rate": 1e15, "max_grad_norm": None})
    assert config.run_ranks(2) == [5, 5], config.stderr
    assert config.stderr.count("error:") == 1 and config.stderr_of(1) == ""


def restart(config: Config, num_kills: int, *, seed: int) -> None:
    """Run two ranks under torchrun, which starts them again whenever one of them is killed."""
    draw = random.Random(seed)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(num_kills), "--monitor-interval", "0.1", "-m", "ratel_cli", "finetune", str(config),
    ]  # fmt: skip
    run = config.output / "run"
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
    config.assert_same_result(undisturbed("all weights"))


@pytest.mark.nightly
def test_torchrun_starts_them_again_and_again(make_config: MakeConfig) -> None:
    """Killed 20 times, at whatever they do."""
    changes = {**CHANGES, "max_steps": 400}
    config, other = make_config("killed", **changes), make_config("undisturbed", **changes)
    restart(config, 20, seed=1)
    other.succeed_ranks(2)
    config.assert_same_result(other)
