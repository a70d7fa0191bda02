"""`ratel explain`: keys of ours, their other names, keys of other trainers, and names that nobody knows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.describe import all_keys, changed_value, explain, explain_json
from ratel_cli.config.keys.topics import TOPICS, Topic
from ratel_cli.config.others.aliases import ALIASES, SECTIONS, canonical_key
from ratel_cli.config.others.foreign import FOREIGN
from scripts.foreign_keys import table_of
from scripts.write_fates import CONFIGS
from tests.test_console import Terminal, as_terminal

SECTION_NAMES = "datasets, lr_scheduler_kwargs, optim_args, storage, limits, model_shape, storage.snapshot"


def text_of(key: str) -> str:
    return "".join(f"{line.text}\n" for line in explain(key))


def test_a_key_and_its_other_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "learning_rate"]) == 0
    meaning = "  The peak learning rate, which is reached at the end of the warm-up.\n"
    facts = "  number, not negative, default 2e-5, also lr\n"
    relation = "  Without optimizer: sgd, learning_rate above 0.1 gets a warning: every weight moves"
    assert capsys.readouterr().out.startswith("learning_rate\n" + facts + meaning + relation)
    assert main(["explain", "lr"]) == 0
    assert capsys.readouterr().out.startswith("lr: another name of learning_rate\n" + facts + meaning + relation)


def test_what_a_key_needs_and_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "load_in_8bit"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  Needs adapter: quantised weights cannot be trained.",
        "  Excludes load_in_4bit.",
        "  Excludes peft_use_dora: DoRA beside a quantised model is not supported.",
    ]


@pytest.mark.parametrize("key", ["storage.max_tb_written", "storage", "nvfp4"])
def test_lines_are_folded_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    as_terminal(monkeypatch, columns=60)
    assert main(["explain", key]) == 0
    plain = capsys.readouterr().out
    assert plain == text_of(key), "COLUMNS is not that of a pipe"
    assert max(map(len, plain.splitlines())) > 60
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", key]) == 0
    assert stream.getvalue().split() == plain.split(), "every word is there"
    assert max(map(len, stream.getvalue().splitlines())) <= 60


def test_the_keys_of_a_section_are_folded_in_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, columns=60)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", "storage"]) == 0
    assert (
        "\n  storage.paths             Directories for stores, one on\n" + " " * 28 + "each SSD\n" in stream.getvalue()
    )


def test_where_the_column_is_too_narrow_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, columns=50)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", "storage"]) == 0
    assert "\n  storage.paths             Directories for\n  stores, " in stream.getvalue()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lr", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meaning = (
        "The peak learning rate, which is reached at the end of the warm-up. Without optimizer: sgd, learning_rate"
    )
    assert found.pop("meaning").startswith(meaning), "with its relations"
    assert found == {
        "key": "learning_rate",
        "fate": None,
        "other_names": ["lr"],
        "type": "number, not negative",
        "is_required": False,
        "default": 2e-5,
        "keys": [],
    }
    assert main(["explain", "storage.snapshot", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["default"], found["keys"]) == (None, ["storage.snapshot.path", "storage.snapshot.every"])
    assert main(["explain", "datasets.0.path", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["key"], found["is_required"], found["keys"]) == ("datasets.path", True, [])
    assert main(["explain", "nvfp4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    reason = "Ratel does not quantise in this way"
    assert (found["key"], found["fate"], found["reason"]) == ("nvfp4", "impossible", reason)
    assert main(["explain", "zzz", "--json"]) == 2


def test_every_key_has_json() -> None:
    for key in [*all_keys(), *FOREIGN]:
        assert json.loads(json.dumps(explain_json(key), allow_nan=False))["key"] == key


def test_a_key_of_another_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nvfp4"]) == 0
    assert capsys.readouterr().out == (
        "nvfp4: a key of other trainers (impossible)\n"
        "  Ratel does not quantise in this way\n"
        "  remove it; with an adapter, use load_in_4bit or load_in_8bit\n"
    )


def test_keys_of_other_trainers_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Who has such a key, with which value, and what it becomes; with what it needs, of others why it is not."""
    expected = {
        "wandb_project": ["  axolotl: wandb_project: x, with use_wandb: true, is read as project: x"],
        "save_strategy": [
            "  axolotl, transformers: save_strategy: epoch is read as saves_per_epoch: 1",
            "  save_steps decides this",
        ],
        "checkpointer": ["  each of its own keys is read, or not, by itself"],
    }
    for key, lines in expected.items():
        assert main(["explain", key]) == 0
        assert capsys.readouterr().out.splitlines() == [f"{key}: a key of other trainers (translated)", *lines]
    assert main(["explain", "bf16"]) == 0
    assert "bf16: true is read as dtype: bfloat16\n" in capsys.readouterr().out, "also of a word"
    assert main(["explain", "wandb_project", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fate"], found["hint"]) == ("translated", None)
    assert found["reason"] == "axolotl: `wandb_project: x`, with `use_wandb: true`, is read as `project: x`"


@pytest.mark.parametrize("tool", CONFIGS)
def test_every_key_of_every_other_trainer_is_explained(tool: str) -> None:
    """What it is read as, if it is read; else that it is ours, or why it is not read."""
    for row in table_of(tool):
        text = text_of(row["key"])
        ours = re.split(r"[:,]", row["ours"])[0]
        assert text.startswith(row["key"]) and len(text.splitlines()) > 1
        assert ours in text or row["key"] in all_keys()


def test_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    """All keys in their groups, and a word for each topic."""
    assert main(["explain"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("ratel explain KEY explains a key, such as learning_rate")
    groups = dict(line.split(": ") for line in lines)
    words = groups.pop("words").split(", ")
    named = [
        f"{title.removeprefix('in ')}.{key}" if title.startswith("in ") else key
        for title, keys in groups.items()
        for key in keys.split(", ")
    ]
    assert sorted(named) == sorted(all_keys())
    assert all(text_of(word) for word in words) and len(words) == len(TOPICS)
    assert main(["explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["keys"] == all_keys() and {*words} < {*found["words"]}


def test_a_section_and_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "storage.snapshot"]) == 0
    assert capsys.readouterr().out == (
        "storage.snapshot\n"
        "  mapping\n"
        "  A second copy of the state on another device, in case this one fails. ratel restore makes a store from it. "
        "Default: none.\n"
        "  Needs durability: step: with none there is no second generation to copy from.\n"
        "\n"
        "  storage.snapshot.path   The directory of the snapshot, which no other run may use\n"
        "  storage.snapshot.every  Copy the state every N steps, in the background\n"
    )


@pytest.mark.parametrize("section", [each for each in SECTIONS if each])
def test_every_key_of_a_section_has_a_line(section: str) -> None:
    _, _, lines = text_of(section).partition("\n\n")
    assert [line.split()[0] for line in lines.splitlines()] == [
        f"{section}.{key}" for key in SECTIONS[section].model_fields
    ]
    assert all(len(line.split()) > 2 and "`" not in line for line in lines.splitlines())


def test_every_key_is_explained() -> None:
    for section, model in SECTIONS.items():
        for name in [*model.model_fields, *ALIASES.get(section, {})]:
            key = f"{section}.{name}" if section else name
            assert text_of(key).startswith(key)
    assert text_of("datasets.0.path").startswith("datasets.0.path\n")
    assert all(text_of(key).startswith(key) for key in FOREIGN)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rat", "did you mean `learning_rate`?"),
        ("durability", "did you mean `storage.durability`?"),
        ("zzz", "docs/config.md has all keys"),
        ("warmup", "did you mean `warmup_steps` or `warmup_ratio` or `warmup_rounding`?"),
        ("wramup", "did you mean `warmup_steps` or `warmup_ratio` or `warmup_rounding`?"),
        ("path", "did you mean `datasets.path` or `storage.snapshot.path`?"),
        ("durabilty", "did you mean `storage.durability`?"),
        ("storage.path", "did you mean `storage.paths` or `datasets.path` or `storage.snapshot.path`?"),
        ("storge.paths", "did you mean `storage.paths`?"),
        ("nowhere.path", "did you mean `datasets.path` or `storage.snapshot.path`?"),
        ("nowhere.zzz", f"sections: {SECTION_NAMES}"),
    ],
)
def test_a_name_that_nobody_knows(key: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", key]) == 2
    assert capsys.readouterr().err.endswith(f"hint: {hint}\n")


@pytest.mark.parametrize(
    ("value", "words"), [(16.0, "16"), (0.5, "0.5"), (2e-5, "2e-5"), (None, "not set"), (True, "True"), (4, "4")]
)
def test_values_that_are_compared(value: object, words: str) -> None:
    """As in `num_epochs was 16, is now 8`."""
    assert changed_value(value) == words


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_what_people_call_things(topic: Topic, capsys: pytest.CaptureFixture[str]) -> None:
    """Each word gives what Ratel has of it: keys that there are, a page that there is; or what to do instead."""
    for word in topic.words.split():
        if canonical_key("", word) in SECTIONS[""].model_fields:
            continue  # `wandb` might be a key one day
        title, *lines = text_of(word).splitlines()
        assert title == f"{word}: {topic.name}" + ("" if topic.is_supported else " (not supported)")
        assert lines[0] == "  " + topic.text.replace("`", "") and all(line.startswith("  ") for line in lines)
    assert set(topic.keys) <= set(all_keys())
    assert not topic.page or (Path(__file__).parents[2] / topic.page).is_file()
    assert main(["explain", topic.words.split()[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fate"] == (None if topic.is_supported else "impossible")
    assert found.get("keys", []) == list(topic.keys)


def test_what_is_not_supported_is_no_key_or_value() -> None:
    """Nothing that works is called unsupported, and no word belongs to two topics."""
    words = [word for topic in TOPICS for word in topic.words.split()]
    assert len(set(words)) == len(words)
    known = {re.sub(r"\W|_", "", each.rpartition(".")[2]) for each in all_keys()}
    for section, model in SECTIONS.items():
        for name in model.model_fields:
            known |= {re.sub(r"\W|_", "", str(each)) for each in choices_of(section, name)}
    of_missing = {word for topic in TOPICS if not topic.is_supported for word in topic.words.split()}
    assert of_missing & known == set()


def choices_of(section: str, name: str) -> list[object]:
    """The values that a key may have by its type."""

    def literals(annotation: object) -> list[object]:
        arguments = get_args(annotation)
        if get_origin(annotation) is Literal:
            return list(arguments)
        return [each for argument in arguments for each in literals(argument)]

    return literals(SECTIONS[section].model_fields[name].annotation)


def test_words_of_another_spelling() -> None:
    assert text_of("4-bit").startswith("4-bit: A quantised base model\n")
    assert text_of("Multi-GPU").startswith("Multi-GPU: Several GPUs or machines\n")
    assert text_of("qlora").splitlines()[0] == "qlora: LoRA, QLoRA and DoRA"
    assert text_of("rl").startswith("rl\n"), "a key of ours comes first"
    assert text_of("NEFTune").startswith("NEFTune: NEFTune\n")
    assert "read as dtype: bfloat16" in " ".join(text_of("bf16").split())
    assert "reads no DeepSpeed config" in " ".join(text_of("ZeRO").split())
