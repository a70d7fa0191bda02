"""`ratel init`: a config to begin with, which is right as it stands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from ratel_cli.config.json_schema import config_schema
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import LoadedConfig, load_config
from ratel_cli.config.yaml.yaml_marks import plain, read_text
from ratel_cli.console import RunLog
from ratel_cli.hardware.host import gpu_names
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.run.ask.plan_inputs import find_hardware
from ratel_cli.run.train import profile_machine
from tests.e2e.encoders import CLASSES, encoder_rows, save_encoder
from tests.e2e.preferences import pairs, write
from tests.e2e.runs import BRIEFLY, ROWS, Ended, assert_rejected, ratel, works


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_machine, "BRIEF", BRIEFLY)
    return tmp_path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Rows that are conversations and nothing else."""
    write(tmp_path / "chats.jsonl", [{"messages": row["messages"]} for row in ROWS])
    return tmp_path / "chats.jsonl"


def written(path: str = "run.yaml") -> LoadedConfig:
    return load_config(Path(path))


def init(*arguments: object) -> Ended:
    return ratel("init", *arguments)


@pytest.mark.full
def test_the_config_is_right_as_it_stands(base: Path, chats: Path) -> None:
    ended = init(base, "--data", chats)
    assert (ended.code, ended.stdout) == (0, ""), ended.stderr
    lines = ended.stderr.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("note: ")][:4] == [
        "model",
        "data",
        "store",
        "plan",
    ]
    assert "wrote run.yaml; now" in lines
    assert [line.split()[:3] for line in lines[-5:]] == [
        ["ratel", name, "run.yaml"] for name in ("check", "data", "plan", "finetune", "report")
    ]
    loaded = written()
    assert loaded.notices == ()
    config = loaded.config
    assert (config.base_model, config.output_dir) == (str(base), Path("outputs/run"))
    [dataset] = config.datasets
    assert (dataset.path, dataset.type) == (str(chats), "chat_template")
    assert config.sequence_len == 64, "the model has no more positions"
    assert config.num_epochs == 3 and config.split is None
    assert config.dtype == ("bfloat16" if gpu_names() else "float32")
    text = Path("run.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=file:///")
    assert "learning_rate: 1e-5" in text and "# limits:\n#   host_memory: 48GiB" in text
    schema = config_schema()
    Draft202012Validator(schema).validate(plain(read_text(text, "run.yaml", [])))
    works("check", "run.yaml")
    assert not Path("outputs").exists()


@pytest.mark.full
def test_every_commented_line_is_right_too(base: Path, rows: Path) -> None:
    assert init(base, "--data", rows).code == 0
    text = Path("run.yaml").read_text()
    head, options = text.split("# What you may want to set, too:\n")
    Path("all.yaml").write_text(head + "".join(line.removeprefix("# ") for line in options.splitlines(keepends=True)))
    config = written("all.yaml").config
    assert config.limits.host_memory == 48 << 30 and len(config.storage.paths) == 2
    assert (config.save_steps, config.val_set_size) == (100, 0.02)


_SHAREGPT = '[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]'


@pytest.mark.parametrize(
    ("name", "text", "type_"),
    [
        ("a.jsonl", '{"text": "some words to learn"}\n' * 3, "completion"),
        ("a.jsonl", '{"prompt": "a b", "completion": "c d"}\n', "completion"),
        ("a.jsonl", '{"instruction": "a", "input": "", "output": "b"}\n', "alpaca"),
        ("a.jsonl", '{"question": "a", "answer": "b"}\n', "chat_template"),
        ("a.jsonl", '{"input_ids": [5, 6, 7]}\n', "tokens"),
        ("a.csv", "instruction,output\na,b\n", "alpaca"),
        ("a.json", _SHAREGPT, "chat_template"),
        ("a.txt", "a line\nanother line\n", "completion"),
        ("a.jsonl", "not json\n" + '{"text": "some words"}\n', "completion"),
    ],
)
def test_the_type_of_the_data(base: Path, name: str, text: str, type_: str) -> None:
    Path(name).write_text(text)
    ended = init(base, "--data", name, "-o", "my.yaml")
    assert ended.code == 0, ended.stderr
    [dataset] = written("my.yaml").config.datasets
    assert (dataset.path, dataset.type) == (name, type_)
    assert written("my.yaml").config.output_dir == Path("outputs/my")


_SHAREGPT_CALL = [
    {"from": "human", "value": "a"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    {"from": "observation", "value": "1"},
    {"from": "gpt", "value": "b"},
]


def test_preference_data(base: Path) -> None:
    write(Path("a.jsonl"), pairs(40))
    given = ("limits.host_memory=20GiB", "adapter=lora")
    assert init(base, *given, "--data", "a.jsonl").code == 0
    config = written().config
    assert (config.rl, config.micro_batch_size, config.tokens_per_step) == ("dpo", 2, None)
    assert init(base, *given, "rl=orpo", "--data", "a.jsonl", "-o", "b.yaml").code == 0
    assert written("b.yaml").config.rl == "orpo"
    keys = ("datasets.0.field_completion=chosen",)
    assert init(base, *keys, "--data", "a.jsonl", "-o", "c.yaml").code == 0
    config = written("c.yaml").config
    assert (config.rl, config.datasets[0].type, config.datasets[0].field_completion) == (None, "completion", "chosen")


@pytest.mark.parametrize("columns", [{"text": "text", "label": "label"}, {"text": "review", "label": "stars"}])
def test_what_an_encoder_learns(tmp_path: Path, columns: dict[str, str]) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    rows = [{columns[key]: str(value) for key, value in row.items()} for row in encoder_rows()[1::2]]
    write(Path("a.jsonl"), rows)
    given = [f"datasets.0.field{'_label' * (key == 'label')}={name}" for key, name in columns.items() if key != name]
    if "field_label" in "".join(given):
        assert_rejected(init(encoder, *given, "--data", "a.jsonl"), 2, "`field_label` is not read for `type: auto`")
        given.append("datasets.0.type=classification")
    ended = init(encoder, *given, "--data", "a.jsonl")
    assert ended.code == 0, ended.stderr
    [dataset] = written().config.datasets
    assert (dataset.type, dataset.labels) == ("classification", tuple(sorted(CLASSES)))
    assert (dataset.field, dataset.field_label) == tuple(columns.values())
    write(Path("b.jsonl"), [{columns["text"]: row[columns["text"]]} for row in rows])
    assert init(encoder, *given[:1], "--data", "b.jsonl", "-o", "b.yaml").code == 0
    assert written("b.yaml").config.datasets[0].type == "mlm"


@pytest.mark.full
def test_rows_with_images_are_read_without_them(base: Path) -> None:
    Path("a.jsonl").write_text('{"image": "a.png", "prompt": "a b", "completion": "c d"}\n')
    assert init(base, "--data", "a.jsonl").code == 0
    assert written().config.datasets[0].media == "ignore"


@pytest.mark.full
def test_why_no_row_can_be_used_is_said(base: Path) -> None:
    Path("a.jsonl").write_text(json.dumps({"conversations": _SHAREGPT_CALL}) + "\n")
    text = "{{ m.content if m.content else raise_exception('none') }}"
    Path("t.jinja").write_text("{% for m in messages %}" + text + "{% endfor %}")
    ended = init(base, "chat_template_jinja=t.jinja", "--data", "a.jsonl")
    assert_rejected(ended, 2, "a.jsonl: no row can be used: the chat template cannot write tool calls")


@pytest.mark.full
def test_several_datasets_and_overrides(base: Path, chats: Path) -> None:
    Path("more.jsonl").write_text(json.dumps({"text": "word " * 200}) + "\n")
    """Their numbers stand as they are given."""
    given = ("num_epochs=2", "lr=3e-4", "limits.host_memory=20GiB", "micro_batch_size=2", "storage.max_tb_written=0.50")
    ended = init(base, *given, "--data", chats, "--data", "more.jsonl")
    assert ended.code == 0, ended.stderr
    config = written().config
    assert [dataset.type for dataset in config.datasets] == ["chat_template", "completion"]
    assert (config.num_epochs, config.learning_rate, config.micro_batch_size) == (2, 3e-4, 2)
    assert (config.limits.host_memory, config.tokens_per_step) == (20 << 30, None)
    text = Path("run.yaml").read_text()
    assert {"learning_rate: 3e-4", "num_epochs: 2", "  max_tb_written: 0.50"} <= {*text.splitlines()}
    assert "host_memory: 48GiB" not in text


@pytest.mark.full
def test_max_steps_takes_the_place_of_epochs(base: Path, rows: Path) -> None:
    assert init(base, "--data", rows, "max_steps=7", "sequence_len=32").code == 0
    assert "num_epochs" not in Path("run.yaml").read_text()
    assert (written().config.max_steps, written().config.sequence_len) == (7, 32)


@pytest.mark.full
def test_a_step_of_large_data_has_more_sequences(base: Path) -> None:
    Path("large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 450))
    ended = init(base, "--data", "large.jsonl")
    assert "more than 20000 rows" in ended.stderr
    config = written().config
    assert config.num_epochs == 1, "the data has not been seen whole"
    assert config.sequences_per_step > 1
    assert "sequences, which the plan splits into micro-batches, here" in Path("run.yaml").read_text()


@pytest.mark.full
def test_without_data_its_place_is_kept(base: Path) -> None:
    ended = init(base)
    assert ended.code == 0 and "replace train.jsonl in run.yaml" in ended.stderr
    assert written().config.datasets[0].path == "train.jsonl"
    assert_rejected(ratel("check", "run.yaml"), 2, "train.jsonl: no such file")


def test_without_a_model_and_data_there_is_nothing_to_begin_with() -> None:
    assert_rejected(init("-o", "my.yaml"), 2, "which model?")
    assert not Path("my.yaml").exists()


@pytest.mark.nightly
def test_with_data_the_place_of_the_model_is_kept(base: Path, rows: Path) -> None:
    ended = init("--data", str(rows), "-o", "my.yaml")
    assert ended.code == 0 and "put it where my.yaml has OWNER/NAME" in ended.stderr, ended.stderr
    lines = Path("my.yaml").read_text().splitlines()
    [place] = [line for line in lines if "base_model" in line]
    assert place.startswith("# base_model: OWNER/NAME ")
    checked = ratel("check", "my.yaml")
    assert_rejected(checked, 2, "`base_model` is missing")
    Path("my.yaml").write_text("\n".join(lines).replace("# base_model: OWNER/NAME", f"base_model: {base}"))
    works("check", "my.yaml")
    assert init("--data", str(rows), "-o", "other.yaml", f"base_model={base}").code == 0
    assert f"base_model: {base}" in Path("other.yaml").read_text()


@pytest.mark.full
def test_files_that_exist_stay(base: Path, rows: Path) -> None:
    Path("run.yaml").write_text("mine")
    Path("outputs/run").mkdir(parents=True)
    assert_rejected(init(base, "--data", rows), 2, "run.yaml: the file exists")
    assert_rejected(init(), 2, "run.yaml: the file exists")
    assert Path("run.yaml").read_text() == "mine"
    assert init(base, "--data", rows, "--overwrite").code == 0
    assert written().config.output_dir == Path("outputs/run-2"), "outputs/run is there already"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/no/such/model"], "there is no directory /no/such/model"),
        (["{base}", "--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["{base}", "--data", "empty.jsonl"], "empty.jsonl: there is no row that can be read"),
        (["{base}", "--data", "odd.jsonl"], "no dataset type fits the columns a"),
        (["{base}", "--data", "bad.jsonl"], "bad.jsonl: no row can be used: bad.jsonl:1: "),
        (["{base}", "learning_rte=1"], "unknown key `learning_rte`"),
        (["{bare}"], "no weights"),
        (["."], ".: no weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_an_error(base: Path, arguments: list[str], part: str) -> None:
    Path("empty.jsonl").write_text("")
    Path("odd.jsonl").write_text('{"a": 1}\n')
    Path("bad.jsonl").write_text('{"messages": 3}\n')
    bare = shutil.copytree(base, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    ended = init(*(argument.format(base=base, bare=bare) for argument in arguments))
    assert_rejected(ended, 2, part)
    assert not Path("run.yaml").exists()


def test_a_model_without_weights_that_shall_be_random(base: Path, rows: Path) -> None:
    bare = shutil.copytree(base, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert init(bare, "random_init=true", "--data", rows).code == 0
    assert written().config.random_init


@pytest.mark.full
def test_a_tokenizer_without_a_chat_template(base: Path, chats: Path) -> None:
    plain_base = Path(shutil.copytree(base, "plain", ignore=shutil.ignore_patterns("*.jinja")))
    settings = json.loads((plain_base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (plain_base / "tokenizer_config.json").write_text(json.dumps(settings))
    assert init(plain_base, "--data", chats).code == 0
    assert written().config.chat_template == "chatml"
    assert ratel("check", "run.yaml").code in (0, 2)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, rows: Path) -> None:
    def offline(repository: str) -> str:
        raise OfflineModeIsEnabled(repository)

    monkeypatch.setattr("ratel_cli.run.start.init._download_small", offline)
    Path("models").mkdir()
    assert_rejected(init("models/smal"), 2, "there is no directory models/smal, and the hub cannot be reached")
    ended = init("org/name", "--data", rows)
    assert ended.code == 0 and "the config is written without reading the model" in ended.stderr
    config = written().config
    assert (config.base_model, config.datasets[0].path, config.sequence_len) == ("org/name", str(rows), 2048)


def test_a_hub_model_is_looked_at_without_its_weights(monkeypatch: pytest.MonkeyPatch, base: Path, rows: Path) -> None:
    small = shutil.copytree(base, "small", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr("ratel_cli.run.start.init._download_small", lambda repository: str(small))
    assert init("org/name", "--data", rows).code == 0
    assert (written().config.base_model, written().config.sequence_len) == ("org/name", 64)


@pytest.mark.full
def test_an_adapter_is_chosen_where_all_weights_do_not_fit(
    base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this model they take 872 KiB; an adapter of rank 1, and a copy of the base, a third of that."""

    def full_drive(config: RunConfig, file: Path | None, log: RunLog) -> HardwareProfile:
        hardware = find_hardware(config, file, log)
        return replace(hardware, nvme=replace(hardware.nvme, free_bytes=600 << 10))

    monkeypatch.setattr("ratel_cli.run.start.init.find_hardware", full_drive)
    for name, chosen in (("run.yaml", "lora"), ("all.yaml", None)):
        given = ("lora_r=1",) if chosen else ("lora_r=1", "adapter=null")
        ended = init(base, *given, "--data", rows, "-o", name)
        assert ended.code == 0, ended.stderr
        config = written(name).config
        assert (config.adapter, config.learning_rate) == (chosen, 2e-4 if chosen else 1e-5), ended.stderr
        lines = [line for line in ended.stderr.splitlines() if line.startswith("adapter ")]
        assert bool(lines) is bool(chosen)
        if chosen:
            assert " lora: full fine-tuning is short by " in lines[0] and " of NVMe" in lines[0]
            assert "remove this line to train all weights" in Path(name).read_text()


@pytest.mark.full
def test_the_learning_rate_follows_an_adapter_that_is_asked_for(base: Path, rows: Path) -> None:
    ended = init(base, "--data", rows, "adapter=lora")
    assert ended.code == 0 and "\nadapter" not in ended.stderr
    assert written().notices == () and written().config.learning_rate == 2e-4


def test_a_place_where_nothing_can_be_written_is_reported_at_once(base: Path) -> None:
    ended = init(base, "-o", "nodir/x.yaml")
    assert_rejected(ended, 2, "argument '-o nodir/x.yaml': there is no directory nodir")
    assert ended.stderr.splitlines()[1:] == ["hint: name a file in a directory that exists"]


@pytest.mark.full
def test_all_directories_of_the_store_are_named(base: Path, here: Path) -> None:
    ended = init(base, "storage.paths=[one,two]")
    [store] = [line for line in ended.stderr.splitlines() if line.startswith("store ")]
    assert " in one, two; " in store
