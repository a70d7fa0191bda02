"""Keys about data and tokenizer, through a whole run: what the model learns from, and what its export contains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ratel_cli.config.load import load_config
from ratel_cli.run.inputs.tokenizer import TEMPLATES
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    CHAT,
    assert_rejected,
    works,
)

ONE_STEP: dict[str, object] = {"max_steps": 1, "data_type": CHAT}


@pytest.mark.full
def test_the_export_has_the_template_and_the_special_tokens_of_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("run", chat_template="chatml", special_tokens={"eos_token": "<|user|>"}, **ONE_STEP)
    printed = config.succeed()
    assert "the tokenizer has no token <|im_start|>; it becomes several" in printed
    works("export", config, "-o", tmp_path / "again")
    for directory in (config.output, tmp_path / "again"):
        exported = AutoTokenizer.from_pretrained(directory)
        assert (exported.chat_template, exported.eos_token) == (TEMPLATES["chatml"], "<|user|>")
        assert exported.pad_token == "<|pad|>"
        messages = [{"role": "user", "content": "hi"}]
        text = exported.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_export_stops_where_answers_end(make_config: MakeConfig) -> None:
    """At a token of the vocabulary that no list of the base model has."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|assistant|>{% endfor %}"
    config = make_config(
        chat_template_jinja=template + "{% if add_generation_prompt %}assistant:{% endif %}", **ONE_STEP
    )
    assert (
        "answers end with <|assistant|> in 48 of 48 conversations, at which the model does not stop" in config.succeed()
    )
    tokenizer = AutoTokenizer.from_pretrained(config.output)
    ends = GenerationConfig.from_pretrained(config.output).eos_token_id
    assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")]


@pytest.mark.full
def test_a_template_from_a_file(make_config: MakeConfig, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    config = make_config("file", chat_template="jinja", chat_template_jinja=str(tmp_path / "t.jinja"), **ONE_STEP)
    assert "the chat template has no generation prompt" in config.succeed()
    assert AutoTokenizer.from_pretrained(config.output).chat_template == template
    inline = make_config("inline", chat_template_jinja=template, **ONE_STEP)
    inline.succeed()
    assert inline.metrics[0]["loss"] == config.metrics[0]["loss"]


@pytest.mark.full
def test_another_name_means_the_tokenizers_own_template(make_config: MakeConfig) -> None:
    config = make_config("run", chat_template="qwen3", **ONE_STEP)
    assert "using the tokenizer's own" in config.succeed("--dry-run")


@pytest.fixture
def bare_base(base: Path, tmp_path: Path) -> Path:
    """The base model without any tokenizer file."""
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template.jinja"):
        for path in bare.glob(pattern):
            path.unlink()
    return bare


@pytest.mark.full
@pytest.mark.parametrize("data_type", ["tokens", "auto"])
def test_token_ids_need_no_tokenizer(make_config: MakeConfig, bare_base: Path, tmp_path: Path, data_type: str) -> None:
    (tmp_path / "ids.jsonl").write_text("".join(f'{{"input_ids": [{i}, 5, 6, 299]}}\n' for i in range(4, 24)))
    config = make_config("run", base=bare_base, rows=tmp_path / "ids.jsonl", data_type=data_type, max_steps=2)
    config.succeed()
    assert not list(config.output.glob("tokenizer*"))
    assert_rejected(make_config("text", base=bare_base).finetune("--dry-run"), 2, "no usable tokenizer", "bare")
    for changes in ({"data_type": CHAT}, {"chat_template": "chatml"}):
        ended = make_config("chat", base=bare_base, **changes).finetune("--dry-run")
        assert_rejected(ended, 2, "no usable tokenizer")
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [300, 5]}\n')
    (rejected, *_) = (
        make_config("range", base=bare_base, rows=tmp_path / "ids.jsonl", data_type="tokens")
        .finetune("--dry-run")
        .errors
    )
    assert "rejected 1 of 1 rows" in rejected


@pytest.mark.full
def test_evaluation_on_files_of_its_own(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    """They change neither the weights nor the identity of the run, and their loss is reported."""
    plain = make_config("plain", max_steps=2)
    plain.succeed()
    short = tmp_path / "test.jsonl"
    short.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    config = make_config("tested", max_steps=2, eval_steps=1, test_datasets=[{"path": str(short)}])
    printed = config.succeed()
    assert f"{short}: type completion" in printed
    assert [row["loss"] for row in config.metrics] == [row["loss"] for row in plain.metrics]
    written = load_config(config.output / "run" / "config.yaml").config
    asked = load_config(config).config
    assert (written.datasets, written.test_datasets) == (asked.datasets, asked.test_datasets)


@pytest.mark.full
def test_a_streamed_run_resumes(make_config: MakeConfig) -> None:
    """Its tokens are thrown away in between: they are read again, and are the same."""
    config = make_config("run", streaming=True, max_steps=2, save_steps=1, save_total_limit=2)
    config.succeed()
    before = config.metrics
    shutil.rmtree(config.output / "run" / "tokens")
    config.succeed("--resume", "1")
    assert [row["loss"] for row in config.metrics] == [row["loss"] for row in before]


@pytest.mark.full
def test_a_streamed_run_goes_on_with_more_steps(make_config: MakeConfig) -> None:
    extended, whole = (make_config(name, streaming=True, max_steps=2) for name in ("extended", "whole"))
    extended.succeed()
    extended.succeed("max_steps=4")
    whole.succeed("max_steps=4")
    extended.assert_same_result(whole)


@pytest.mark.full
def test_keys_of_a_dataset_survive_the_written_config(make_config: MakeConfig, rows: Path) -> None:
    dataset: dict[str, object] = {
        "path": str(rows),
        "type": CHAT,
        "weight": 0.5,
        "roles": {"user": ["human"], "assistant": ["gpt", "bot"]},
        "roles_to_train": ["assistant"],
        "train_on_eos": "all",
        "message_property_mappings": {"role": "role", "content": "content"},
    }
    config = make_config("run", max_steps=1, datasets=[dataset])
    assert "loss on assistant turns and on the EOS token of every turn" in config.succeed()
    written = load_config(config.output / "run" / "config.yaml").config
    asked = load_config(config).config
    assert (written.datasets, written.test_datasets) == (asked.datasets, asked.test_datasets)
