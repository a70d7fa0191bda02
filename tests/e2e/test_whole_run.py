"""Everything that a run prints and leaves behind, by the installed program too."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratel_cli.config.load import load_config
from ratel_cli.sizes import LOGITS_CHUNK_BYTES
from scripts.complete import answer
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import CHAT, ROWS, Config, as_json, ratel, ratel_command, works, write_config

METRICS = {
    "step", "loss", "learning_rate", "grad_norm", "tokens", "step_seconds", "forward_seconds", "backward_seconds",
    "tokens_per_second", "tflops_model", "tflops_hardware", "swapped_bytes", "nvme_read_bytes", "nvme_written_bytes",
    "gpu_peak_bytes", "host_peak_bytes", "bottleneck", "predicted_seconds", "planned_nvme_bytes", "clipped",
}  # fmt: skip
OPENING = ["model", "data", "step", "compute", "memory", "NVMe", "predicted", "output", "export"]


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Config:
    """The config of a run on conversations. Tests must not change it."""
    config = write_config(tmp_path_factory.mktemp("chat"), base=base, rows=rows, data_type=CHAT, max_grad_norm=1000.0)
    config.succeed()
    return config


@pytest.fixture(scope="module")
def program_run(tmp_path_factory: pytest.TempPathFactory, chat_run: Config) -> tuple[Config, str]:
    """The same run by the installed program: its config, and what it wrote to stderr."""
    directory = tmp_path_factory.mktemp("program")
    config = Config(directory / "run.yaml")
    config.write_text(chat_run.read_text().replace(str(chat_run.parent), str(directory)))
    command, environment = [str(ratel_command()), "finetune", str(config)], {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    return config, result.stderr


@pytest.mark.full
def test_a_fresh_process_does_the_same(program_run: tuple[Config, str], chat_run: Config) -> None:
    config, _ = program_run
    theirs, ours = config.exported, chat_run.exported
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_it_reports_its_plan_and_its_result(program_run: tuple[Config, str]) -> None:
    config, stderr = program_run
    lines = [line for line in stderr.splitlines() if not line.startswith("note: ")]
    assert [line.split()[0] for line in lines[: len(OPENING)]] == OPENING
    steps, summary = lines[len(OPENING) : len(OPENING) + 4], lines[len(OPENING) + 4 : -2]
    assert [line.split()[:2] for line in steps] == [["step", f"{number}/4"] for number in range(1, 5)]
    assert all("stall" in line and "tokens/s" in line and "loss" in line for line in steps)
    assert summary[0].startswith("mean of") and "3 steps" in summary[0]
    assert {line.split()[0] for line in summary[1:]} == {"step", "compute", "NVMe", "optimizer", "stalled"}
    assert lines[-2].startswith(f"exported the model to {config.output}")
    assert str(config.store.parent) in lines[-1]
    assert "\x1b" not in stderr


def test_transformers_loads_it_with_everything_that_belongs_to_it(chat_run: Config, base: Path) -> None:
    directory = chat_run.output
    model = AutoModelForCausalLM.from_pretrained(directory)
    before = AutoModelForCausalLM.from_pretrained(base)
    assert model.dtype == torch.float32
    assert model.generation_config.max_new_tokens == 7
    assert model.generation_config.to_dict() == before.generation_config.to_dict()
    tokenizer, tokenizer_before = (AutoTokenizer.from_pretrained(path) for path in (directory, base))
    assert tokenizer.get_vocab() == tokenizer_before.get_vocab()
    text = tokenizer.apply_chat_template(ROWS[0]["messages"][:1], add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>Which number is 0?<|assistant|>"
    prompt = tokenizer(str(text), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits, logits_before = model(prompt).logits, before(prompt).logits
    completion = cast(torch.Tensor, model.generate(prompt))  # type: ignore[misc]
    assert prompt.shape[1] < completion.shape[1] <= prompt.shape[1] + 7
    assert not torch.equal(logits, logits_before)
    assert {path.name for path in directory.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "run", "ratel.files",
    }  # fmt: skip


def test_the_metrics_are_those_of_the_interface(chat_run: Config) -> None:
    lines = chat_run.metrics
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= METRICS for line in lines)
    assert all(line["learning_rate"] == 0.01 and line["gpu_peak_bytes"] == 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    plan = json.loads((chat_run.output / "run" / "plan.json").read_text())["traffic"]
    # A step's update overlaps with the next step, so only sums are exact. What stays in memory is read once,
    # though a new plan follows from the first step.
    first_bytes = plan["nvme_first_read_bytes"]
    assert sum(line["nvme_read_bytes"] for line in lines) == 4 * plan["nvme_read_bytes"] + first_bytes
    assert {line["planned_nvme_bytes"] for line in lines} == {plan["nvme_read_bytes"] + plan["nvme_written_bytes"]}
    # Step 4 is reported before its own commit, which writes a page of checksums.
    assert sum(line["nvme_written_bytes"] for line in lines) == 4 * plan["nvme_written_bytes"] - 4096


@pytest.mark.full
def test_a_trace_has_a_track_for_each_resource(make_config: MakeConfig) -> None:
    config = make_config(trace=True, max_steps=3, optimizer_overlap="naive", limits={"host_memory": "4GiB"})
    config.succeed()
    events = json.loads((config.output / "run" / "trace.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = {tracks[event["tid"]] for event in events if event["ph"] == "X"}
    assert list(tracks.values()) == ["step", "compute", "up", "down", "nvme read", "nvme write", "optimizer", "network"]
    assert drawn == {"step", "compute", "nvme read", "nvme write", "optimizer"}
    assert {event["name"] for event in events if event["ph"] == "X" and tracks[event["tid"]] == "step"} == {
        "step 1", "step 2", "step 3",
    }  # fmt: skip
    assert any(event["ph"] == "s" for event in events)


def test_the_run_directory_has_config_machine_and_plan(chat_run: Config) -> None:
    run = chat_run.output / "run"
    config = load_config(chat_run).config
    assert load_config(run / "config.yaml").config == config.model_copy(update={"head_chunk": LOGITS_CHUNK_BYTES})
    hardware, plan, model = (json.loads((run / f"{name}.json").read_text()) for name in ("hardware", "plan", "model"))
    assert hardware["nvme"]["write_bytes_per_second"] > 0
    assert plan["memory"]["fits"] is True
    num_parameters = sum(tensor.numel() for tensor in chat_run.exported.values())
    assert model["num_parameters"] == plan["model"]["num_parameters"] == num_parameters
    assert model["segment_names"] == ["embedding", "layer 0", "layer 1", "head"]


@pytest.mark.full
def test_held_out_loss_is_that_of_the_exported_model(make_config: MakeConfig, base: Path) -> None:
    config = make_config(val_set_size=8, eval_steps=2, max_steps=3)
    stderr = config.succeed()
    lines = config.metrics
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 3]
    assert stderr.count("eval loss") == 2
    model = AutoModelForCausalLM.from_pretrained(config.output).eval()
    total, num_targets = 0.0, 0
    for batch in config.load_data().eval_batches():
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
        )
        num_targets += batch.num_targets
    assert lines[-1]["eval_loss"] == pytest.approx(total / num_targets, rel=1e-6)


def test_the_demo_prints_an_answer(chat_run: Config, base: Path) -> None:
    question = ROWS[4]["messages"][0]["content"]
    before, after = answer(base, question), answer(chat_run.output, question)
    assert before != after
    assert "<|" not in after


def test_its_report_has_what_it_did(plain_run: Config, tmp_path: Path) -> None:
    works("report", plain_run, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Finished: step 4 of 4; the model is exported." in page and 'class="notes"' not in page
    assert f"{plain_run.metrics[-1]['loss']:.4f}" in page
    assert "loss, by step" in ratel("report", plain_run.output, "--terminal").stdout


def test_its_status_is_that_of_a_finished_run(plain_run: Config) -> None:
    [row] = as_json("status", plain_run.output)["runs"]
    assert (row["state"], row["step"], row["num_steps"], row["seconds_left"]) == ("finished", 4, 4, 0)
    assert row["loss"] == plain_run.metrics[-1]["loss"]
    assert row["store_bytes"] == plain_run.store.stat().st_size
    by_config, by_directory = (
        re.sub(r"\d[\d hmins]* ago", "just now", ratel("status", name).stdout) for name in (plain_run, plain_run.output)
    )
    assert "just now" in by_config
    assert by_config == by_directory
