"""What the reference model gives: computed once, kept, and gone on with after a crash; and what evaluations say."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratel_cli.data.pairs.reference import read_reference, write_reference
from ratel_cli.run.files.run_directory import rank_directory
from ratel_cli.run.files.run_files import list_run_files
from ratel_cli.run.inputs.streamed_blocks import BlockMemory
from ratel_cli.run.train import reference
from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import Row, assert_same_figures, chats, keys_of, pairs, recipe, verdicts, write
from tests.e2e.runs import Config, as_json, assert_rejected, ratel, save_base, tree, works
from tests.tiers import thinned
from tests.trl_oracle import tune


class ConfigOf(Protocol):
    def __call__(
        self, name: str = "run", *, method: str = "dpo", rows: Sequence[Row] | None = None, **changes: object
    ) -> Config: ...


def reference_file(config: Config) -> Path:
    return config.output / "run" / "reference.bin"


def values_in(path: Path) -> npt.NDArray[np.float32]:
    head, _, content = path.read_bytes().partition(b"\n")
    assert json.loads(head)["format_version"] == 1
    return np.frombuffer(content, "<f4").reshape(-1, 2)


@pytest.fixture
def config_of(make_config: MakeConfig, tmp_path: Path) -> ConfigOf:
    def make(name: str = "run", *, method: str = "dpo", rows: Sequence[Row] | None = None, **changes: object) -> Config:
        given = rows if rows is not None else verdicts() if method == "kto" else pairs()
        path = tmp_path / f"{method}-rows.jsonl"
        write(path, given)
        return make_config(name, rows=path, **{**keys_of(recipe(method)), "shuffle": True, **changes})

    return make


def test_the_file_has_the_log_probabilities_of_the_base_model(config_of: ConfigOf, base: Path) -> None:
    """Of the answers that the run needs, by a plain forward of each alone; the others are not computed."""
    config = config_of(max_steps=3)
    config.succeed()
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
    assert config.metrics[0]["preferences"]["rewards/chosen"] == 0.0  # type: ignore[index]


@pytest.mark.parametrize("method", thinned(["dpo", "kto"], every=2))
def test_a_run_that_was_killed_ends_with_the_same_bits(config_of: ConfigOf, method: str) -> None:
    whole, killed = config_of("whole", method=method), config_of("killed", method=method)
    whole.succeed()
    killed.run_until_killed(kill_at="manifest.published:4")
    before = reference_file(killed).read_bytes()
    killed.succeed()
    assert reference_file(killed).read_bytes() == before
    whole.assert_same_result(killed)


def test_a_file_that_is_gone_or_damaged_is_made_again(config_of: ConfigOf) -> None:
    """Also when the model has been trained: the base model is still there. A longer run adds what it needs."""
    whole, stopped = config_of("whole", max_steps=6), config_of("stopped", max_steps=2)
    whole.succeed()
    stopped.succeed()
    path = reference_file(stopped)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    stopped.succeed("max_steps=4")
    path.unlink()
    stopped.succeed("max_steps=6")
    whole.assert_same_result(stopped)
    assert path.read_bytes() == reference_file(whole).read_bytes()


def test_what_was_computed_before_a_failure_stays(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved again and again; what is missing is computed by the next command."""
    config, whole = config_of("failed"), config_of("whole")
    whole.succeed()
    written, original = [], reference.write_reference

    def write_thrice(path: Path, *arguments: object) -> None:
        original(path, *arguments)  # type: ignore[arg-type]
        written.append(int((~np.isnan(values_in(path)).any(axis=1)).sum()))
        if len(written) == 3:
            raise KeyboardInterrupt

    pass_of_few_batches(monkeypatch)
    monkeypatch.setattr(reference, "write_reference", write_thrice)
    assert config.finetune().code != 0
    assert written == [0, 4, 8]
    monkeypatch.undo()
    config.succeed()
    whole.assert_same_result(config)


def pass_of_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pass of the reference model hold two micro-batches."""
    original = reference.fit_blocks

    def little(*arguments: Any, least_bytes: int, **options: Any) -> BlockMemory:  # noqa: ANN401
        return replace(original(*arguments, least_bytes=least_bytes, **options), left_bytes=5 * least_bytes // 2)

    monkeypatch.setattr(reference, "fit_blocks", little)


@pytest.mark.full
def test_other_samples_for_evaluation(config_of: ConfigOf, tmp_path: Path) -> None:
    """As many as before: only these are computed again."""
    of_first, of_second = (
        write(tmp_path / name, rows) for name, rows in (("a", pairs(28)[24:]), ("b", pairs(32)[28:]))
    )
    changed, whole = (
        config_of(name, test_datasets=[{"path": str(tmp_path / "t.jsonl")}]) for name in ("changed", "whole")
    )
    shutil.copy(of_first, tmp_path / "t.jsonl")
    changed.succeed("max_steps=1")
    before = values_in(reference_file(changed))
    shutil.copy(of_second, tmp_path / "t.jsonl")
    changed.succeed("max_steps=2")
    whole.succeed("max_steps=2")
    after = values_in(reference_file(changed))
    assert reference_file(changed).read_bytes() == reference_file(whole).read_bytes()
    assert changed.metrics[-1]["eval_loss"] == whole.metrics[-1]["eval_loss"]
    known = ~np.isnan(before).any(axis=1)
    assert known[:24].sum() == 4 and known[24:].all()
    assert (after[:24] == before[:24])[known[:24]].all() and (after[24:] != before[24:]).all()


def test_the_samples_for_training_stay_known_without_evaluation(config_of: ConfigOf, tmp_path: Path) -> None:
    """They refer to a step that is gone, so they could not be computed again."""
    tests = write(tmp_path / "test.jsonl", pairs(28)[24:])
    first, second = config_of("first", max_steps=1), config_of("second", max_steps=3)
    first.succeed()
    second.succeed("--from", str(first.output), f"test_datasets=[{{path: {tests}}}]")
    before = reference_file(second).read_bytes()
    second.succeed("max_steps=4")
    assert reference_file(second).read_bytes() == before and len(second.metrics) == 3


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_base_model_that_was_replaced_is_no_reference(is_dry: bool, config_of: ConfigOf, tmp_path: Path) -> None:
    """It is refused where something is still to be computed, before anything is written."""
    config = config_of(base=save_base(tmp_path / "base"), max_steps=1)
    config.succeed()
    shutil.copytree(tmp_path / "base", tmp_path / "kept")
    path = tmp_path / "base" / "model.safetensors"
    scale_weights(path, 1.5)
    before = tree(tmp_path)
    words = ("base_model", "changed since the run began", "are still to be computed")
    assert_rejected(config.finetune("max_steps=3", *(["--dry-run"] if is_dry else [])), 2, *words)
    assert tree(tmp_path) == before
    shutil.copy(tmp_path / "kept" / "model.safetensors", path)
    config.succeed("max_steps=3")


def test_a_run_that_starts_over_forgets_the_reference(config_of: ConfigOf, tmp_path: Path) -> None:
    again, fresh = (config_of(name, base=save_base(tmp_path / "base")) for name in ("again", "fresh"))
    again.succeed()
    scale_weights(tmp_path / "base" / "model.safetensors", 1.5)
    again.succeed("--resume", "no")
    fresh.succeed()
    again.assert_same_result(fresh)
    assert reference_file(again).read_bytes() == reference_file(fresh).read_bytes()


def test_a_reference_that_is_not_finite(config_of: ConfigOf, tmp_path: Path) -> None:
    config = config_of(base=save_base(tmp_path / "base"))
    scale_weights(tmp_path / "base" / "model.safetensors", float("nan"))
    assert_rejected(config.finetune(), 5, "the reference log-probabilities are not finite")


def scale_weights(path: Path, factor: float) -> None:
    save_file({name: each * factor for name, each in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.full
def test_ranks_that_were_killed_at_different_places(config_of: ConfigOf) -> None:
    """One has nothing, the other has some of its part and one of the other's."""
    whole, killed = (config_of(name, max_steps=3) for name in ("whole", "killed"))
    whole.succeed_ranks(2)
    killed.succeed_ranks(2, "max_steps=1")
    ends = [killed.output / "run" / "reference.bin", rank_directory(killed.output, 1) / "run" / "reference.bin"]
    kept = read_reference(ends[0])
    assert kept is not None
    known = np.flatnonzero(~np.isnan(kept.sets[0].values).any(axis=1))
    assert len(known) == 8
    kept.sets[0].values[known[2:6]] = np.nan
    write_reference(ends[0], kept.weights, kept.sets)
    ends[1].unlink()
    killed.succeed_ranks(2)
    whole.assert_same_result(killed)
    assert ends[0].read_bytes() == ends[1].read_bytes() == reference_file(whole).read_bytes()


@pytest.mark.full
def test_ranks_cannot_refer_to_the_step_of_another_run(config_of: ConfigOf) -> None:
    """That is refused before a store is made."""
    first, second = config_of("first", max_steps=1), config_of("second", max_steps=2)
    first.succeed()
    ended = second.run_ranks(2, "--from", str(first.output))
    assert 2 in ended and "not supported with several ranks" in second.stderr + second.stderr_of(1)
    assert not second.store.exists()


@pytest.mark.full
def test_a_reference_that_cannot_be_kept(config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base model can give it again; the step of another run cannot, so that run does not begin."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first, second = config_of("first", max_steps=1), config_of("second", max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "write_reference", full)
        assert "reference.bin: cannot be written (No space left on device)" in first.succeed()
        ended = second.finetune("--from", str(first.output))
    assert_rejected(ended, 3, "reference.bin: cannot be written", "may be gone when the run is resumed")
    assert not (second.output / "run" / "metrics.jsonl").exists()
    second.succeed()


def test_an_unfinished_file_is_no_link_and_is_cleaned(config_of: ConfigOf, tmp_path: Path) -> None:
    config, mine = config_of(max_steps=1), tmp_path / "mine"
    mine.write_text("mine")
    config.succeed()
    new = reference_file(config).with_name("reference.bin.new")
    new.symlink_to(mine)
    assert_rejected(config.finetune("max_steps=2"), 2, "reference.bin.new is a link")
    assert mine.read_text() == "mine"
    new.unlink()
    list_run_files(config.output, [new.name])
    new.write_text("left by a process that was killed")
    works("clean", config, "--yes")
    assert not new.parent.exists()


@pytest.mark.parametrize("method", thinned(["dpo", "orpo", "kto"], every=2))
def test_evaluations_are_those_of_trl(config_of: ConfigOf, method: str, base: Path, tmp_path: Path) -> None:
    """Of seven held-out samples, so that the last micro-batch has one."""
    rows, held_out = (verdicts(24), verdicts(31)[24:]) if method == "kto" else (pairs(24), pairs(31)[24:])
    tests = write(tmp_path / "test.jsonl", held_out)
    config = config_of(method=method, rows=rows, shuffle=False, test_datasets=[{"path": str(tests)}])
    stderr = config.succeed()
    wanted = tune(base, rows, recipe(method), held_out).evaluated
    last = config.metrics[-1]
    assert last["eval_loss"] == pytest.approx(wanted["loss"], rel=2e-6)
    figures = {name: wanted[name] for name in last["eval_preferences"]}  # type: ignore[attr-defined]
    assert_same_figures(last["eval_preferences"], figures)  # type: ignore[arg-type]
    assert method == "kto" or "accuracy" in stderr


def test_a_run_from_another_ones_step_refers_to_that_step(config_of: ConfigOf) -> None:
    first, second = config_of("first", max_steps=2), config_of("second", max_steps=4)
    first.succeed()
    second.succeed("--from", str(first.output))
    assert second.metrics[0]["preferences"]["rewards/margins"] == 0.0  # type: ignore[index]
    reference_file(second).unlink()
    assert_rejected(
        second.finetune("max_steps=5"), 2, "run/reference.bin lacks reference log-probabilities that this run needs"
    )


@pytest.mark.parametrize(("rows", "words"), [(pairs(8), "the chosen answer"), (chats(8), "the rejected answer")])
def test_samples_are_shown_with_what_they_are(config_of: ConfigOf, rows: Sequence[Row], words: str) -> None:
    config = config_of(rows=rows)
    ended = works("data", config, "-n", "2")
    assert words in ended.stdout and "sample 2, the rejected" in ended.stdout
    shown = as_json("data", config, "-n", "1")
    assert [each["answer"] for each in shown["samples"]] == ["chosen", "rejected"]
    assert shown["datasets"][0]["num_samples"] == shown["epoch"]["num_samples"] == 8


def test_eval_has_the_cross_entropy_of_answers(config_of: ConfigOf, rows: Path) -> None:
    config = config_of(max_steps=1)
    config.succeed()
    assert 4 < as_json("eval", config, rows)["loss"] < 7
    words = ("its rows are preference data", "`ratel eval` takes supervised data only")
    assert_rejected(ratel("eval", config, config.parents[1] / "dpo-rows.jsonl"), 2, *words)


def test_rows_that_fill_their_length_are_tried_before_step_1(config_of: ConfigOf) -> None:
    """The micro-batch of the run itself, while nothing is known of the reference model yet."""
    config = config_of(rows=[{**row, "chosen": str(row["chosen"]) * 9, "rejected": " no" * 40} for row in pairs()])
    assert "reference  log-probabilities of 4 steps, computed before step 1" in config.succeed("sequence_len=24")
    assert config.metrics[-1]["tokens"] == 4 * 2 * 24
