"""`ratel eval`: the loss is that of transformers in memory, bit for bit, from a store and from a directory."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import ROWS, Config, as_json, assert_rejected, ratel, works

UNPACKED = ("sample_packing=false", "micro_batch_size=1")


def whole_loss(directory: Path, rows: list[dict[str, object]], *, longest: int = 64) -> tuple[float, int]:
    """The mean loss over the tokens of the answers, row by row with the whole model in memory, and their number."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    total, count = 0.0, 0
    for row in rows:
        prompt, answer = (tokenizer(row[key], add_special_tokens=False).input_ids for key in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id][:longest]])
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1]).unsqueeze(0), use_cache=False).logits
        targets = ids[0, 1:].clone()
        targets[: len(prompt) - 1] = -100
        total += float(cross_entropy(logits[0, :-1].float(), targets, reduction="sum", ignore_index=-100))
        count += int((targets != -100).sum())
    return total / count, count


def found(*arguments: object) -> dict[str, object]:
    result = as_json("eval", *arguments)
    assert isinstance(result, dict)
    return result


def test_a_run_and_its_export_have_the_loss_of_the_model_in_memory(plain_run: Config, rows: Path) -> None:
    wanted, count = whole_loss(plain_run.output, ROWS)
    before = plain_run.store.read_bytes()
    for model in (plain_run, plain_run.output):
        result = found(model, rows, *UNPACKED)
        assert (result["loss"], result["num_loss_tokens"]) == (wanted, count)
        assert result["perplexity"] == math.exp(wanted)
        assert result["model"] == f"{plain_run.output}, step 4"
        assert (result["num_samples"], result["is_packed"], result["num_sequences"]) == (48, False, 48)
    assert plain_run.store.read_bytes() == before


def test_packed_samples_have_the_same_loss(plain_run: Config, rows: Path) -> None:
    apart, packed = (found(plain_run, rows, f"sample_packing={each}") for each in ("false", "true"))
    assert packed["is_packed"] and packed["num_sequences"] < apart["num_sequences"]  # type: ignore[operator]
    assert packed["num_loss_tokens"] == apart["num_loss_tokens"]
    assert packed["loss"] == pytest.approx(apart["loss"], rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_without_a_run(base: Path, tied_base: Path, rows: Path, tied: bool) -> None:
    directory = tied_base if tied else base
    result = found(directory, rows, *UNPACKED, "device=cpu", "datasets.0.type=completion")
    assert result["loss"] == whole_loss(directory, ROWS)[0]
    assert (result["dtype"], result["sequence_len"]) == ("float32", 64), "as config.json says"
    assert result["model"] == f"{directory}, float32"


def test_an_export_whose_store_is_gone(plain_run: Config, rows: Path, tmp_path: Path) -> None:
    copied = tmp_path / "moved"
    shutil.copytree(plain_run.output, copied)
    config = (copied / "run" / "config.yaml").read_text().replace(str(plain_run.store.parent), str(tmp_path / "no"))
    (copied / "run" / "config.yaml").write_text(config)
    ended = works("eval", copied, rows, *UNPACKED, "--json")
    assert "there is no store in" in ended.stderr and f"using the exported model in {copied}" in ended.stderr
    assert json.loads(ended.stdout)["loss"] == whole_loss(plain_run.output, ROWS)[0]
    assert_rejected(ratel("eval", copied, rows, "--step", 2), 2, "has no saved steps")


@pytest.mark.full
def test_saved_steps(make_config: MakeConfig, base: Path, rows: Path) -> None:
    config = make_config("run", save_steps=2, save_total_limit=2, max_steps=3)
    config.succeed()
    losses = {step: found(config, rows, "--step", step)["loss"] for step in (2, 3)}
    assert losses[3] == found(config, rows)["loss"] != losses[2]
    assert_rejected(ratel("eval", config, rows, "--step", 1), 2, "step 1")


def test_the_table_and_chosen_rows(plain_run: Config, rows: Path, tmp_path: Path) -> None:
    ended = works("eval", plain_run.output, rows, *UNPACKED, "datasets.0.max_samples=5")
    lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert lines["data"] == f"{rows}: 5 samples"
    assert lines["tokens"].endswith("in 5 sequences, not packed")
    assert lines["loss"] == f"{whole_loss(plain_run.output, ROWS[:5])[0]:.4f}"
    assert set(lines) == {"model", "data", "tokens", "loss", "perplexity", "time"}
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_store_or_an_export(make_config: MakeConfig, rows: Path) -> None:
    assert_rejected(ratel("eval", make_config(), rows), 2, "there is no store in")


@pytest.mark.full
def test_what_is_no_model(tmp_path: Path, base: Path, rows: Path) -> None:
    assert_rejected(ratel("eval", tmp_path / "none", rows), 2, "none: no such file or directory")
    assert_rejected(ratel("eval", tmp_path, rows), 2, "neither a run's output directory nor a model")
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    assert_rejected(ratel("eval", tmp_path / "base", rows), 2, "no weights")
    assert_rejected(ratel("eval", base, tmp_path / "none.jsonl"), 2, "none.jsonl")
    assert_rejected(ratel("eval", base, rows, "nonsense=1"), 2, "nonsense")
    assert_rejected(ratel("eval", base, rows, "sequence_len=1000000000"), 3, "RAM")


def test_no_tokenizer(base: Path, rows: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    assert_rejected(ratel("eval", tmp_path / "base", rows), 2, "no usable tokenizer")
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [5, 6, 7]}\n')
    assert found(tmp_path / "base", ids)["num_loss_tokens"] == 2


def test_a_loss_that_is_not_finite(base: Path, rows: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.weight.data[0, 0] = math.inf
    model.save_pretrained(tmp_path / "base")
    assert_rejected(ratel("eval", tmp_path / "base", rows), 5, "the loss is nan")


@pytest.mark.parametrize(("limit", "parts"), [("300MiB", ("evaluating needs", "short by")), ("1MiB", ("RAM",))])
def test_too_little_memory(plain_run: Config, rows: Path, limit: str, parts: tuple[str, ...]) -> None:
    assert_rejected(ratel("eval", plain_run, rows, f"limits.host_memory={limit}"), 3, *parts)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(plain_run: Config, rows: Path, signal_at: SignalAt, number: int) -> None:
    before = plain_run.store.read_bytes()
    signal_at(3, number)
    ended = ratel("eval", plain_run, rows)
    assert (ended.code, ended.stdout) == (128 + number, "")
    assert "Stopped. Run the same command again." in ended.stderr
    assert found(plain_run, rows)["num_samples"] == 48, "the store is free"
    assert plain_run.store.read_bytes() == before


def test_hints_about_bad_rows_are_about_these_rows(plain_run: Config, base: Path, tmp_path: Path) -> None:
    """They name a command that lists them, where there is one."""
    bad = tmp_path / "weird rows.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{}\n')
    ended = ratel("eval", plain_run, bad)
    assert_rejected(ended, 2, "rejected 1 of 2 rows; at most 1 % may be bad", num_errors=2)
    [hint] = [line for line in ended.stderr.splitlines() if line.startswith("hint: ")]
    words = shlex.split(hint.split("`")[1])
    assert words == ["ratel", "data", str(plain_run), f"datasets.0.path={bad}", "--bad"]
    assert f"{bad}:2: " in ratel(*words[1:]).stdout
    bare = ratel("eval", base, bad, "datasets.0.type=completion")
    assert "hint: repair or remove these rows\n" in bare.stderr
    bad.write_text("")
    empty = ratel("eval", plain_run, bad)
    assert_rejected(empty, 2, f"no samples: no rows were read from {bad}")
