"""`ratel export`: any saved step becomes a Hugging Face directory; wrong arguments are rejected."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.trainer_utils import align_special_tokens

from ratel_cli.config.load import load_config
from ratel_cli.run.inputs.tokenizer import read_tokenizer, tokenizer_files
from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import Config, assert_rejected, file_hash, ratel, works
from tests.e2e.trained import TRAINED, WHOLE_OR_ADAPTER, OfEach, load_export, run_of_each
from tests.tiers import rotating, sample, thinned

SAVING: dict[str, object] = {"max_steps": 6, "save_steps": 2, "save_total_limit": 2, "dtype": "bfloat16"}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved_of(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs that have saved steps 4 and 6."""
    return run_of_each(tmp_path_factory, base=base, rows=rows, **SAVING)


@pytest.fixture
def saved(saved_of: OfEach) -> Config:
    """The config of such a run of all weights. Tests must not change it."""
    return saved_of("all weights")


@pytest.mark.full
@pytest.mark.parametrize(("what", "by"), rotating(WHOLE_OR_ADAPTER, ["config", "directory"], full_rotation=True))
def test_the_last_step_is_the_runs_own_export(saved_of: OfEach, tmp_path: Path, what: str, by: str) -> None:
    saved = saved_of(what)
    before = file_hash(saved.store)
    ended = ratel("export", saved if by == "config" else saved.output, "-o", tmp_path / "new" / "out")
    assert (ended.code, ended.stdout) == (0, "")
    library = "transformers'" if what == "all weights" else "PEFT's"
    assert [line for line in ended.stderr.splitlines() if not line.startswith("note: ")] == [
        f"exported step 6 to {tmp_path / 'new' / 'out'}; load it with {library} from_pretrained"
    ]
    names = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    assert names == {path.name for path in saved.output.iterdir()} - {"run"}
    for name in names - {"ratel.files"}:
        assert file_hash(tmp_path / "new" / "out" / name) == file_hash(saved.output / name), name
    assert file_hash(saved.store) == before


@pytest.mark.full
@pytest.mark.parametrize("what", sample(TRAINED, every=2))
def test_a_saved_step_is_the_export_of_a_shorter_run(
    saved_of: OfEach, make_config: MakeConfig, tmp_path: Path, what: str
) -> None:
    saved, shorter = saved_of(what), make_config("shorter", **{**SAVING, **TRAINED[what], "max_steps": 4})
    shorter.succeed()
    works("export", saved.output, "--step", 4, "-o", tmp_path / "four")
    works("export", saved.output, "--step", 6, "-o", tmp_path / "six")
    assert file_hash(tmp_path / "four" / saved.weights_path.name) == shorter.export_hash
    assert file_hash(tmp_path / "six" / saved.weights_path.name) == saved.export_hash
    assert re.search("4 (optimizer )?updates", (tmp_path / "four" / "README.md").read_text())
    load_export(saved, tmp_path / "four")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "four")) == 300


@pytest.mark.full
def test_a_tied_model_and_random_weights(tied_base: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    for name, changes in (("tied", {"base": tied_base}), ("drawn", {"random_init": True})):
        config = make_config(name, max_steps=1, **changes)
        config.succeed()
        works("export", config, "-o", tmp_path / f"{name}-out")
        assert file_hash(tmp_path / f"{name}-out" / WEIGHTS) == file_hash(config.output / WEIGHTS)


def test_wrong_arguments_are_rejected(saved: Config, base: Path, tmp_path: Path) -> None:
    """Afterwards neither the store nor the run's export has changed, and nothing was written."""
    before = file_hash(saved.store), file_hash(saved.output / WEIGHTS), file_hash(base / WEIGHTS)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    copy = tmp_path / "bad.yaml"
    copy.write_text(saved.read_text() + "\nlearning_rte: 1\n")
    run, out = saved.output, tmp_path / "out"
    for arguments, code, parts in (
        ([tmp_path / "none.yaml", "-o", out], 2, ("none.yaml: no such file",)),
        ([tmp_path / "none", "-o", out], 2, ("none: no such file",)),
        ([tmp_path / "empty", "-o", out], 2, ("not the output directory of a run", "run/config.yaml")),
        ([copy, "-o", out], 2, ("bad.yaml:", "learning_rte")),
        ([run, "--step", 5, "-o", out], 2, ("step 5 is not saved in the store; saved steps: 4, 6",)),
        ([run, "--step", -1, "-o", out], 2, ("invalid value for '--step'",)),
        ([run], 2, ("missing option '--output'",)),
        ([run, "-o", base], 2, ("-o and base_model are the same directory",)),
        ([run, "-o", tmp_path / "file"], 2, ("file is not a directory",)),
    ):
        assert_rejected(ratel("export", *arguments), code, *parts)
        assert not out.exists()
    after = file_hash(saved.store), file_hash(saved.output / WEIGHTS), file_hash(base / WEIGHTS)
    assert after == before


def test_a_store_that_is_missing_or_of_another_model(
    saved: Config, tied_base: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    lost = make_config("lost", **SAVING)
    assert_rejected(ratel("export", lost, "-o", tmp_path / "out"), 2, "there is no store in", str(lost.store.parent))
    output = str(saved.output)
    for name, changes in (("tied", {"base": tied_base}), ("wide", {"dtype": "float32"})):
        other = make_config(name, **{**SAVING, "output_dir": output, **changes})
        assert_rejected(ratel("export", other, "-o", tmp_path / "out"), 2, "was made for another model, not for")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=2))
def test_a_damaged_chunk_is_not_exported(make_config: MakeConfig, tmp_path: Path, what: str) -> None:
    config = make_config(max_steps=2, **TRAINED[what])
    config.succeed()
    before = config.export_hash
    data = config.store
    content = bytearray(data.read_bytes())
    content[3 * 4096 :] = bytes(byte ^ 1 for byte in content[3 * 4096 :])
    data.write_bytes(content)
    for output in (tmp_path / "out", config.output):
        assert_rejected(ratel("export", config, "-o", output), 4, "damaged")
    assert not (tmp_path / "out").exists()
    assert config.export_hash == before


def test_a_full_disk_and_a_read_only_disk(saved: Config, small_disk: Path) -> None:
    assert_rejected(ratel("export", saved, "-o", small_disk / "out"), 3, str(small_disk / "out"), "needs", "available")
    assert not (small_disk / "out").exists()


COMMANDS = {
    "export": ("export", "all weights"),
    "export an adapter": ("export", "lora"),
    "merge with a quantised model": ("merge", "qlora"),
    "merge": ("merge", "lora"),
}
"""What writes a model or an adapter: the command, and what its run trains."""


@pytest.mark.parametrize(
    ("call", "number", "command"),
    rotating([1, 3], [signal.SIGINT, signal.SIGTERM], list(COMMANDS), offset=3, full_rotation=True),
)
def test_a_signal_leaves_the_earlier_export(
    saved_of: OfEach, tmp_path: Path, signal_at: SignalAt, call: int, number: signal.Signals, command: str
) -> None:
    name, what = COMMANDS[command]
    saved, out = saved_of(what), tmp_path / "out"
    works(name, saved, "-o", out)
    before = {path.name: file_hash(path) for path in out.iterdir() if path.is_file()}
    signal_at(call, number)
    ended = ratel(name, saved, "--step", 4, "-o", out, "--overwrite")
    assert (ended.code, ended.stderr.splitlines()[-1]) == (128 + number, "Stopped. Run the same command again.")
    assert {path.name: file_hash(path) for path in out.iterdir() if path.is_file()} == before
    assert not (out / ".export-in-progress").exists()


def failing_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file of this name can be put into place."""
    move = os.replace

    def fail(source: Path, destination: Path) -> None:
        if Path(destination).name == name:
            raise PermissionError(13, "Permission denied")
        move(source, destination)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize(("kind", "command"), rotating(["card", "weights"], list(COMMANDS), full_rotation=True))
def test_an_export_that_broke_off_is_finished_without_being_asked(
    saved_of: OfEach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    name, what = COMMANDS[command]
    saved, out = saved_of(what), tmp_path / "out"
    weights = saved.weights_path.name if name == "export" else WEIGHTS
    works(name, saved, "-o", tmp_path / "whole")
    works(name, saved, "--step", 4, "-o", out)
    (out / "notes.txt").write_text("mine")
    with monkeypatch.context() as broken:
        failing_at("README.md" if kind == "card" else weights, broken)
        assert_rejected(ratel(name, saved, "-o", out, "--overwrite"), 3, "cannot be written")
        assert_rejected(ratel(name, saved, "-o", out), 3, "the export that was begun", "cannot be finished")
    assert_rejected(ratel(name, saved, "--step", 4, "-o", out), 2, "holds step 6")
    assert f"{out}: finished the export of step 6, which was interrupted" in works(name, saved, "-o", out).stderr
    assert file_hash(out / weights) == file_hash(tmp_path / "whole" / weights)
    assert (out / "notes.txt").read_text() == "mine" and not (out / ".export-in-progress").exists()


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=1))
def test_a_run_finishes_its_export(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    config = make_config(max_steps=1, **TRAINED[what])
    config.succeed()
    with monkeypatch.context() as broken:
        failing_at("README.md", broken)
        assert config.finetune("max_steps=2").code == 3
    assert not config.weights_path.exists()
    before = sorted(config.output.rglob("*"))
    config.succeed("max_steps=3", "--dry-run")
    assert sorted(config.output.rglob("*")) == before
    assert "finished the export of step 2" in config.succeed("max_steps=3")
    assert not (config.output / ".export-in-progress").exists()


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=2))
def test_what_broke_off_is_cleaned(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    config = make_config(max_steps=1, **TRAINED[what])
    config.succeed()
    with monkeypatch.context() as broken:
        failing_at(config.weights_path.name, broken)
        assert config.finetune("max_steps=2").code == 3
    works("clean", config, "--output", "--yes")
    assert not config.output.exists()


def test_an_index_of_the_users_is_renamed(saved: Config, tmp_path: Path) -> None:
    """It would lead a loader to other weights than the single file of the export."""
    out, index = tmp_path / "out", "model.safetensors.index.json"
    out.mkdir()
    (out / index).write_text("mine")
    ended = works("export", saved, "-o", out, "--overwrite")
    assert f"{out / index} was in the way of the model, and is now {index}.old" in ended.stderr
    assert (out / f"{index}.old").read_text() == "mine" and not (out / index).exists()
    (out / index).write_text("mine")
    ended = ratel("export", saved, "-o", out)
    assert_rejected(ended, 2, f"{out / index} would lead to other weights")
    assert f"with --overwrite it is renamed to {index}.old" in ended.stderr
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def aligned_by_trainer(base: Path, output: Path, **special: str) -> Path:
    """The base model as transformers' Trainer saves it, before any step, with other special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name, token in special.items():
        setattr(tokenizer, name, token)
    model = AutoModelForCausalLM.from_pretrained(base)
    align_special_tokens(model, tokenizer)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return output


IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@pytest.mark.parametrize(
    ("what", "has_defaults"), thinned(rotating(WHOLE_OR_ADAPTER, [True, False], full_rotation=True), every=3)
)
def test_the_export_ends_texts_where_the_run_did(
    base: Path, make_config: MakeConfig, tmp_path: Path, what: str, has_defaults: bool
) -> None:
    """As transformers' Trainer leaves the configurations; an adapter's model gets them when it is merged."""
    own = Path(shutil.copytree(base, tmp_path / "own"))
    (own / "tokenizer_config.json").unlink()  # so that nothing names a token but the run
    if not has_defaults:
        (own / "generation_config.json").unlink()
    tokens = {"eos_token": "<|user|>", "pad_token": "<|end|>"}
    config = make_config(base=own, max_steps=1, special_tokens=tokens, **TRAINED[what])
    config.succeed()
    output = config.output
    if what != "all weights":
        output = tmp_path / "merged"
        works("merge", config, "-o", output)
    assert has_defaults == ("max_new_tokens" in json.loads((output / "generation_config.json").read_text()))
    trainers = aligned_by_trainer(own, tmp_path / "trainers", **tokens)
    for read in (AutoConfig, GenerationConfig):
        theirs, ours = read.from_pretrained(trainers), read.from_pretrained(output)
        assert [getattr(ours, name) for name in IDS] == [getattr(theirs, name) for name in IDS]
    for directory in (output, config.output):
        assert {name: AutoTokenizer.from_pretrained(directory).special_tokens_map[name] for name in tokens} == tokens


def test_a_run_and_its_export_stop_at_the_runs_end_token(base: Path, make_config: MakeConfig) -> None:
    """It is a token that the model writes anyhow."""
    before = make_config("before", max_steps=1, learning_rate=1e-12)
    before.succeed()
    asked = ("--raw", "--json", "--max-new-tokens", 9)
    ids = json.loads(ratel("generate", before, "Which number", *asked).stdout)["completions"][0]["token_ids"]
    end = AutoTokenizer.from_pretrained(base).convert_ids_to_tokens(ids[1])
    config = make_config(max_steps=1, learning_rate=1e-12, special_tokens={"eos_token": end})
    config.succeed()
    model, tokenizer = (each.from_pretrained(config.output) for each in (AutoModelForCausalLM, AutoTokenizer))
    made = model.generate(**tokenizer("Which number", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    alone = made[0, -2:].tolist()
    assert alone == ids[:2]
    for named in (config, config.output):
        [completion] = json.loads(ratel("generate", named, "Which number", *asked).stdout)["completions"]
        assert completion["token_ids"] == alone


def test_other_ends_of_turns_are_among_the_exports(base: Path, make_config: MakeConfig) -> None:
    config = load_config(make_config(eot_tokens=["<|assistant|>"])).config
    files = tokenizer_files(config, base, read_tokenizer(config, base, AutoConfig.from_pretrained(base)))
    end = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("<|assistant|>")
    assert files.special_tokens.other_ends == (end,)


def test_an_end_that_a_run_teaches_is_in_its_export(base: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    """Whatever other data has left tokens in the same directory."""
    rows, template = tmp_path / "rows.jsonl", tmp_path / "ends.jinja"
    turns = [{"role": "user", "content": "Which number?"}, {"role": "assistant", "content": "one"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|assistant|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    made = {"max_steps": 1, "datasets": [{"path": str(rows), "type": "chat_template"}]}
    end, eos = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    config = make_config(**made, chat_template_jinja=str(template))
    config.succeed()
    assert GenerationConfig.from_pretrained(config.output).eos_token_id == [eos, end]
    make_config(**made).succeed("--resume", "no", "--overwrite-store")
    assert GenerationConfig.from_pretrained(config.output).eos_token_id == eos
