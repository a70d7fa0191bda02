"""`ratel check`: all errors of config, model, data and machine at once, each with its place; nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.hardware.host import memory_bytes
from ratel_cli.run.inputs import inputs
from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import pairs, write
from tests.e2e.runs import Config, Ended, assert_rejected, ratel, works
from tests.tiers import thinned


def check(config: Path, *arguments: str) -> Ended:
    return ratel("check", config, *arguments)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_what_would_run(make_config: MakeConfig) -> None:
    config = make_config()
    ended = check(config, "max_steps=3")
    assert ended.code == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "data", "step"]
    assert "steps 1 to 3" in lines[2]
    assert lines[-1] == f"no errors; `ratel finetune {config} max_steps=3` runs it"
    assert files(config.parent) == [config], "nothing is written"


@pytest.mark.full
def test_what_would_run_as_json(make_config: MakeConfig) -> None:
    ended = check(make_config(), "--json", "lr=1e-3")
    found = json.loads(ended.stdout)
    assert (ended.code, found["ok"], found["errors"]) == (0, True, [])
    assert found["run"]["output"].endswith("/out")
    assert any("`lr` is read as `learning_rate`" in notice for notice in found["notices"])


def test_everything_at_once(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, model, data and device; in the order of the file."""
    config = tmp_path / "run.yaml"
    config.write_text(
        "base_model: /no/such/model\n"
        "learning_rte: 1e-5\n"
        "datasets:\n"
        "  - path: nowhere.jsonl\n"
        "    typ: alpaca\n"
        "  - neither.jsonl\n"
        "save_steps: -3\n"
        "test_datasets: nor.jsonl\n"
        f"output_dir: {base}\n"
        "device: cpu\n"
    )
    ended = check(config, "--json")
    assert ended.code == 2
    found = json.loads(ended.stdout)
    assert not found["ok"] and found["run"] == {}
    places = [(each["place"].removeprefix(f"{config}:"), each["key"]) for each in found["errors"]]
    assert places == [
        ("1:13", "base_model"),
        ("2:1", "learning_rte"),
        ("4:11", "datasets.0.path"),
        ("5:5", "datasets.0.typ"),
        ("6:5", "datasets.1.path"),
        ("7:13", "save_steps"),
        ("8:16", "test_datasets.0.path"),
        ("9:13", "output_dir"),
    ]
    assert all(each["message"] for each in found["errors"])
    assert found["errors"][1]["hint"] == "did you mean `learning_rate`?"
    shown = [line.removeprefix("error: ").split(": ")[0] for line in ended.errors]
    of_config = [
        each["place"] for each in found["errors"] if each["key"] in ("learning_rte", "datasets.0.typ", "save_steps")
    ]
    rest = [each["place"] for each in found["errors"] if each["place"] not in of_config]
    assert shown == [*of_config, *rest], "all of them are on stderr, and those of the config come first"
    assert files(tmp_path) == [config]


@pytest.mark.full
def test_each_dataset_is_looked_at(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    """Unfit columns in two of three datasets and in the one for evaluation, and the model's own fault."""
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two", "three")}
    for name, path in paths.items():
        path.write_text(json.dumps({f"{name} column": 1}) + "\n")
    sets = [{"path": str(path)} for path in (paths["one"], rows, paths["two"])]
    config = make_config(datasets=sets, test_datasets=[{"path": str(paths["three"])}], sequence_len=70)
    ended = check(config)
    assert_rejected(ended, 2, "one.jsonl: no dataset type fits the columns one column", num_errors=3)
    assert "two column" in ended.errors[1] and "three column" in ended.errors[2]
    assert all(f"{config}:" in line for line in ended.errors)


@pytest.mark.full
def test_bad_rows_have_their_own_places(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(rows.read_text() + "{}\n" * 7)
    config = make_config(rows=path)
    ended = check(config)
    assert_rejected(ended, 2, "rejected 7 of 55 rows", num_errors=6)
    assert ended.errors[1].startswith(f"error: {path}:49: ")
    doubtful = check(config, "datasets.0.type=alpacca")
    assert_rejected(doubtful, 2, "`datasets.0.type` must be")
    assert "rows" not in doubtful.stderr, "of which type they are is not known"


@pytest.mark.parametrize(
    "arguments",
    thinned(
        [
            (),
            ("limits.host_memory=200MiB",),
            ("datasets=/no/such.jsonl",),
            ("base_model=/no/such",),
            ("learning_rate=0.02",),
            ("max_steps=2",),
            ("seed=1", "device=cpu"),
            ("storage.max_tb_written=1e-9",),
            ("lr_scheduler=polynomial", "learning_rate=1e-9"),
            ("warmup_stepz=1",),
        ],
        every=3,
        offset=1,
    ),
    ids=" ".join,
)
def test_the_verdict_is_that_of_the_dry_run(plain_run: Config, arguments: tuple[str, ...]) -> None:
    """Also over the store of a finished run, which rejects other settings and fewer steps than it has done."""
    before = files(plain_run.parent)
    dry, checked = plain_run.finetune("--dry-run", *arguments), check(plain_run, *arguments)
    assert checked.code == dry.code, checked.stderr
    # The memory of this process has grown in between.
    expected, found = ([re.sub(r"\d+", "N", line) for line in ended.errors] for ended in (dry, checked))
    messages = [line.removeprefix("error: ") for line in expected]
    assert [each for each in messages if not any(line.endswith(each) for line in found)] == []
    assert files(plain_run.parent) == before


def test_files_that_are_no_config(tmp_path: Path) -> None:
    broken, shape = (tmp_path / f"{name}.yaml" for name in ("broken", "shape"))
    broken.write_text("base_model: [a\n")
    shape.write_text("model_shape: {num_layers: 2, num_heads: 2, hidden_size: 8}\n")
    assert_rejected(check(tmp_path / "none.yaml"), 2, "none.yaml: no such file")
    assert_rejected(check(tmp_path), 2, "not the output directory of a run")
    assert_rejected(check(broken), 2, "broken.yaml:2:1: not valid YAML")
    assert json.loads(check(broken, "--json").stdout)["ok"] is False
    assert_rejected(check(shape), 2, "`model_shape` is only for `ratel plan`")


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("learning_rate: 1\n", ["`base_model` is missing", "`datasets` is missing"]),
        ("datasets: /no/such.jsonl\n", ["`base_model` is missing", "/no/such.jsonl: no such file or directory"]),
        ("base_model: /no/such\n", ["`datasets` is missing", "there is no directory /no/such"]),
        ("base_model: /no/such\nmodel_shape: {num_layers: 2, num_heads: 2, hidden_size: 8}\n", ["both set"]),
        ("base_model: 3\ndatasets: [{split: x}]\n", ["`base_model` must be text", "`datasets.0.path` is missing"]),
        (
            "warmup_steps: 3\nwarmup_ratio: 0.1\nbase_model: /no\ndatasets: /no.txt\n",
            ["both set", "/no,", "/no.txt: no"],
        ),
        ("storage: {paths: [/a, /a]}\nbase_model: /no\ndatasets: /no.txt\n", ["twice", "/no,", "/no.txt: no"]),
    ],
)
def test_what_a_wrong_key_leaves_is_checked(tmp_path: Path, text: str, errors: list[str]) -> None:
    """Nothing is said about values that Ratel put in the place of wrong ones."""
    config = tmp_path / "run.yaml"
    config.write_text(text)
    ended = check(config)
    assert ended.code == 2
    assert len(ended.errors) == len(errors), ended.stderr
    assert [part for part in errors if not any(part in line for line in ended.errors)] == [], ended.stderr


def test_a_run_reports_all_of_its_inputs_at_once(make_config: MakeConfig) -> None:
    config = make_config(base="/no/such", datasets=["/no.jsonl", "/nor.txt"])
    for arguments in ((), ("--dry-run",)):
        ended = config.finetune(*arguments)
        assert_rejected(ended, 2, "base_model: there is no directory /no/such", num_errors=3)
        assert "/no.jsonl: no such file" in ended.errors[1] and "/nor.txt: no such file" in ended.errors[2]
    assert not config.output.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_that_fails_reads_no_rows(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    """Nor does it write any; the dry run does read them."""
    (tmp_path / "bad.jsonl").write_text("{}\n")
    config = make_config(rows=tmp_path / "bad.jsonl", device="cuda")
    ended = config.finetune()
    assert_rejected(ended, 3, "device: cuda")
    assert "hint: set device: cpu" in ended.stderr
    ended = config.finetune("--dry-run")
    assert_rejected(ended, 2, "rejected 1 of 1 rows", num_errors=3)
    assert "device: cuda" in ended.errors[2]
    assert not config.output.exists()


@pytest.mark.full
def test_a_finished_run_is_right(plain_run: Config) -> None:
    before = files(plain_run.parent)
    ended = check(plain_run, "max_steps=6")
    assert ended.code == 0, ended.stderr
    assert "steps 5 to 6" in ended.stdout
    ended = check(plain_run.output, "max_steps=7")
    assert ended.code == 0 and "steps 5 to 7" in ended.stdout, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("/out max_steps=7` runs it")
    assert files(plain_run.parent) == before
    plain_run.succeed()


@pytest.mark.full
@pytest.mark.parametrize(("limit", "is_too_much"), [("400TiB", True), ("all", False)])
def test_a_limit_that_the_machine_does_not_have(make_config: MakeConfig, limit: str, is_too_much: bool) -> None:
    """No small limit: this process may have taken more than that in earlier tests."""
    limit = str(memory_bytes()) if limit == "all" else limit
    config = make_config()
    for command in (["check", config], ["finetune", config, "--dry-run"]):
        ended = works(*command, f"limits.host_memory={limit}")
        assert ("warning: limits.host_memory is 400 TiB, but this machine has " in ended.stderr) == is_too_much


def test_nothing_is_measured_for_a_run_that_cannot_begin(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But its rows are looked at."""
    (tmp_path / "bad.jsonl").write_text('{"no": "text"}\n')
    config = make_config(datasets=[{"path": str(tmp_path / "bad.jsonl")}])
    config.output.write_text("a file")
    monkeypatch.setattr("ratel_cli.run.train.finetune.run_finetune", lambda *_, **__: pytest.fail("it is measured"))
    ended = check(config)
    assert ended.code == 2
    assert all(part in ended.stderr for part in ("output_dir", "bad.jsonl"))


def test_a_set_that_cannot_be_used_is_not_looked_for(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one error about it, and none about the hub, where nothing of its name is."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"pref": {"file_name": "pref.json", "ranking": true}}')
    config = Path("run.yaml")
    config.write_text(f"base_model: {base}\ndataset: pref\ndevice: cpu\noutput_dir: out\n")
    found = json.loads(check(config, "--json").stdout)["errors"]
    [message] = [each["message"] for each in found]
    assert message.startswith("`dataset`: 'pref' cannot be used: it is preference data (chosen and rejected answers)")
    assert message.endswith("which needs `rl: dpo`")


@pytest.mark.full
@pytest.mark.parametrize("command", [check, Config.finetune])
def test_flash_attention_that_cannot_be_deterministic(
    make_config: MakeConfig, command: Callable[[Config], Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for a machine on which the model takes it: no version of the package is installed here."""
    read = inputs.read_base
    monkeypatch.setattr(
        inputs, "read_base", lambda config, log: replace(read(config, log), attention="flash_attention_2")
    )
    config = make_config()
    ended = command(config)
    assert_rejected(ended, 2)
    assert "flash_attention_2 may give other bits each time" in ended.stderr
    assert files(config.parent) == [config]
    assert check(make_config(deterministic=False)).code == 0


def test_rows_are_not_read_as_others_than_they_may_be(make_config: MakeConfig, tmp_path: Path) -> None:
    """Where a key beside `rl` is wrong, nobody knows which of both goes: pairs are not said to be no answers."""
    config = make_config(datasets=[{"path": str(write(tmp_path / "pairs.jsonl", pairs()))}], rl="dpo", sequence_len=64)
    ended = check(config, "label_smoothing_factor=0.1")
    assert_rejected(ended, 2, "`rl` and `label_smoothing_factor` are both set", num_errors=1)
