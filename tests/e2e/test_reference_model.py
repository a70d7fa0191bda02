"""What the reference model gives: computed once, kept, and gone on with after a crash; and what evaluations say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratel_cli.run.train import reference
from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import Row, assert_same_figures, chats, keys_of, pairs, recipe, verdicts, write
from tests.e2e.runs import (
    assert_rejected,
    assert_same_result,
    finetune,
    metrics,
    output_of,
    ratel,
    run_until_killed,
    succeed,
)
from tests.tiers import thinned
from tests.trl_oracle import tune


class ConfigOf(Protocol):
    def __call__(
        self, name: str = "run", *, method: str = "dpo", rows: Sequence[Row] | None = None, **changes: object
    ) -> Path: ...


def reference_file(config: Path) -> Path:
    return output_of(config) / "run" / "reference.bin"


def values_in(path: Path) -> npt.NDArray[np.float32]:
    head, _, content = path.read_bytes().partition(b"\n")
    assert json.loads(head)["format_version"] == 1
    return np.frombuffer(content, "<f4").reshape(-1, 2)


@pytest.fixture
def config_of(make_config: MakeConfig, tmp_path: Path) -> ConfigOf:
    def make(name: str = "run", *, method: str = "dpo", rows: Sequence[Row] | None = None, **changes: object) -> Path:
        given = rows if rows is not None else verdicts() if method == "kto" else pairs()
        path = tmp_path / f"{method}-rows.jsonl"
        write(path, given)
        return make_config(name, rows=path, **{**keys_of(recipe(method)), "shuffle": True, **changes})

    return make


def test_the_file_has_the_log_probabilities_of_the_base_model(config_of: ConfigOf, base: Path) -> None:
    """Of the answers that the run needs, by a plain forward of each alone; the others are not computed."""
    config = config_of(max_steps=3)
    succeed(config)
    found = values_in(reference_file(config))
    known = ~np.isnan(found).any(axis=1)
    assert known.sum() == 3 * 4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    for number, row in enumerate(pairs()):
        for at, key in enumerate(("chosen", "rejected")):
            prompt = tokenizer(row["prompt"])["input_ids"]
            answer = [*tokenizer(row[key])["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                scores = model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])
            wanted = float(scores[len(prompt) - 1 :].sum())
            assert not known[number] or found[number, at] == pytest.approx(wanted, rel=2e-6)
    assert metrics(config)[0]["preferences"]["rewards/chosen"] == 0.0  # type: ignore[index]


@pytest.mark.parametrize("method", thinned(["dpo", "kto"], every=2))
def test_a_run_that_was_killed_ends_with_the_same_bits(config_of: ConfigOf, method: str) -> None:
    whole, killed = config_of("whole", method=method), config_of("killed", method=method)
    succeed(whole)
    run_until_killed(killed, kill_at="manifest.published:4")
    before = reference_file(killed).read_bytes()
    succeed(killed)
    assert reference_file(killed).read_bytes() == before
    assert_same_result(whole, killed)


def test_a_file_that_is_gone_or_damaged_is_made_again(config_of: ConfigOf) -> None:
    """Also when the model has been trained: the base model is still there. A longer run adds what it needs."""
    whole, stopped = config_of("whole", max_steps=6), config_of("stopped", max_steps=2)
    succeed(whole)
    succeed(stopped)
    path = reference_file(stopped)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    succeed(stopped, "max_steps=4")
    path.unlink()
    succeed(stopped, "max_steps=6")
    assert_same_result(whole, stopped)
    assert path.read_bytes() == reference_file(whole).read_bytes()


def test_what_was_computed_before_a_failure_stays(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved again and again; what is missing is computed by the next command."""
    config, whole = config_of("failed"), config_of("whole")
    succeed(whole)
    monkeypatch.setattr(reference, "_SAVED_EVERY_SECONDS", -1.0)
    written, original = [], reference.write_reference

    def write_twice(path: Path, *arguments: object) -> None:
        original(path, *arguments)  # type: ignore[arg-type]
        written.append(int((~np.isnan(values_in(path)).any(axis=1)).sum()))
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(reference, "write_reference", write_twice)
    assert finetune(config).code != 0
    assert written == [2, 4]
    monkeypatch.setattr(reference, "write_reference", original)
    succeed(config)
    assert_same_result(whole, config)


@pytest.mark.parametrize("method", thinned(["dpo", "orpo", "kto"], every=2))
def test_evaluations_are_those_of_trl(config_of: ConfigOf, method: str, base: Path, tmp_path: Path) -> None:
    """Of seven held-out samples, so that the last micro-batch has one."""
    rows, held_out = (verdicts(24), verdicts(31)[24:]) if method == "kto" else (pairs(24), pairs(31)[24:])
    tests = write(tmp_path / "test.jsonl", held_out)
    config = config_of(method=method, rows=rows, shuffle=False, test_datasets=[{"path": str(tests)}])
    stderr = succeed(config)
    wanted = tune(base, rows, recipe(method), held_out).evaluated
    last = metrics(config)[-1]
    assert last["eval_loss"] == pytest.approx(wanted["loss"], rel=2e-6)
    figures = {name: wanted[name] for name in last["eval_preferences"]}  # type: ignore[attr-defined]
    assert_same_figures(last["eval_preferences"], figures)  # type: ignore[arg-type]
    assert method == "kto" or "accuracy" in stderr


def test_a_run_from_another_ones_step_refers_to_that_step(config_of: ConfigOf) -> None:
    first, second = config_of("first", max_steps=2), config_of("second", max_steps=4)
    succeed(first)
    succeed(second, "--from", str(output_of(first)))
    assert metrics(second)[0]["preferences"]["rewards/margins"] == 0.0  # type: ignore[index]
    reference_file(second).unlink()
    assert_rejected(finetune(second, "max_steps=5"), 2, "run/reference.bin is missing or damaged")


@pytest.mark.parametrize(("rows", "words"), [(pairs(8), "the chosen answer"), (chats(8), "the rejected answer")])
def test_samples_are_shown_with_what_they_are(config_of: ConfigOf, rows: Sequence[Row], words: str) -> None:
    config = config_of(rows=rows)
    ended = ratel("data", config, "-n", "2")
    assert ended.code == 0, ended.stderr
    assert words in ended.stdout and "sample 2, the rejected" in ended.stdout
    shown = json.loads(ratel("data", config, "-n", "1", "--json").stdout)
    assert [each["answer"] for each in shown["samples"]] == ["chosen", "rejected"]
    assert shown["datasets"][0]["num_samples"] == shown["epoch"]["num_samples"] == 8


def test_eval_has_the_cross_entropy_of_answers(config_of: ConfigOf, rows: Path) -> None:
    config = config_of(max_steps=1)
    succeed(config)
    ended = ratel("eval", config, rows, "--json")
    assert ended.code == 0 and 4 < json.loads(ended.stdout)["loss"] < 7, ended.stderr


def test_rows_that_fill_their_length_are_tried_before_step_1(config_of: ConfigOf) -> None:
    """The micro-batch of the run itself, while nothing is known of the reference model yet."""
    config = config_of(rows=[{**row, "chosen": str(row["chosen"]) * 9, "rejected": " no" * 40} for row in pairs()])
    assert "reference  the answers of 4 steps go through the model before step 1" in succeed(config, "sequence_len=24")
    assert metrics(config)[-1]["tokens"] == 4 * 2 * 24
