"""Keys about data and tokenizer, through a whole run: what the model learns from, and what its export contains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from ratel_cli.config.load import load_config
from ratel_cli.run.inputs.tokenizer import TEMPLATES
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import CHAT, assert_rejected, assert_same_result, finetune, metrics, output_of, ratel, succeed

ONE_STEP: dict[str, object] = {"max_steps": 1, "data_type": CHAT}


@pytest.mark.full
def test_the_export_has_the_template_and_the_special_tokens_of_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("run", chat_template="chatml", special_tokens={"eos_token": "<|user|>"}, **ONE_STEP)
    printed = succeed(config)
    assert "the tokenizer has no token <|im_start|>; it becomes several" in printed
    assert ratel("export", config, "-o", tmp_path / "again").code == 0
    for directory in (output_of(config), tmp_path / "again"):
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
    assert "answers end with <|assistant|> in 48 of 48 conversations, at which the model does not stop" in succeed(
        config
    )
    tokenizer = AutoTokenizer.from_pretrained(output_of(config))
    ends = GenerationConfig.from_pretrained(output_of(config)).eos_token_id
    assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")]


@pytest.mark.full
def test_a_template_from_a_file(make_config: MakeConfig, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    config = make_config("file", chat_template="jinja", chat_template_jinja=str(tmp_path / "t.jinja"), **ONE_STEP)
    assert "the chat template has no generation prompt" in succeed(config)
    assert AutoTokenizer.from_pretrained(output_of(config)).chat_template == template
    inline = make_config("inline", chat_template_jinja=template, **ONE_STEP)
    succeed(inline)
    assert metrics(inline)[0]["loss"] == metrics(config)[0]["loss"]


@pytest.mark.full
def test_another_name_means_the_tokenizers_own_template(make_config: MakeConfig) -> None:
    config = make_config("run", chat_template="qwen3", **ONE_STEP)
    assert "using the tokenizer's own" in succeed(config, "--dry-run")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"special_tokens": {"eos_token": "<|new|>"}}, ["the tokenizer has no token '<|new|>', for eos_token"]),
        ({"eot_tokens": ["<|new|>"]}, ["eot_tokens: the tokenizer has no token '<|new|>'"]),
        ({"chat_template": "jinja"}, ["`chat_template: jinja` needs `chat_template_jinja`"]),
        ({"chat_template_jinja": "none.jinja"}, ["none.jinja: cannot be read"]),
        ({"chat_template": "chatml", "chat_template_jinja": "{{ 1 }}"}, ["name two templates"]),
        ({"test_datasets": ["a.jsonl"], "val_set_size": 2}, ["`test_datasets` and `val_set_size` are both set"]),
        ({"test_datasets": ["none.jsonl"]}, ["none.jsonl: no such file"]),
        ({"streaming": True, "max_steps": None}, ["`streaming` needs `max_steps`"]),
        ({"streaming": True, "val_set_size": 0.1}, ["`streaming` and `val_set_size` are both set"]),
    ],
)
def test_what_cannot_be_done_is_said(make_config: MakeConfig, changes: dict[str, object], parts: list[str]) -> None:
    assert_rejected(finetune(make_config("run", **changes), "--dry-run"), 2, *parts)


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
    succeed(config)
    assert not list(output_of(config).glob("tokenizer*"))
    assert_rejected(finetune(make_config("text", base=bare_base), "--dry-run"), 2, "no usable tokenizer", "bare")
    for changes in ({"data_type": CHAT}, {"chat_template": "chatml"}):
        ended = finetune(make_config("chat", base=bare_base, **changes), "--dry-run")
        assert_rejected(ended, 2, "no usable tokenizer")
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [300, 5]}\n')
    (rejected, *_) = finetune(
        make_config("range", base=bare_base, rows=tmp_path / "ids.jsonl", data_type="tokens"), "--dry-run"
    ).errors
    assert "rejected 1 of 1 rows" in rejected


@pytest.mark.full
def test_evaluation_on_files_of_its_own(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    """They change neither the weights nor the identity of the run, and their loss is reported."""
    plain = make_config("plain", max_steps=2)
    succeed(plain)
    short = tmp_path / "test.jsonl"
    short.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    config = make_config("tested", max_steps=2, eval_steps=1, test_datasets=[{"path": str(short)}])
    printed = succeed(config)
    assert f"{short}: type completion" in printed
    assert [row["loss"] for row in metrics(config)] == [row["loss"] for row in metrics(plain)]
    written = load_config(output_of(config) / "run" / "config.yaml").config
    asked = load_config(config).config
    assert (written.datasets, written.test_datasets) == (asked.datasets, asked.test_datasets)


@pytest.mark.full
def test_a_streamed_run_resumes(make_config: MakeConfig) -> None:
    """Its tokens are thrown away in between: they are read again, and are the same."""
    config = make_config("run", streaming=True, max_steps=2, save_steps=1, save_total_limit=2)
    succeed(config)
    before = metrics(config)
    shutil.rmtree(output_of(config) / "run" / "tokens")
    succeed(config, "--resume", "1")
    assert [row["loss"] for row in metrics(config)] == [row["loss"] for row in before]


@pytest.mark.full
def test_a_streamed_run_goes_on_with_more_steps(make_config: MakeConfig) -> None:
    extended, whole = (make_config(name, streaming=True, max_steps=2) for name in ("extended", "whole"))
    succeed(extended)
    succeed(extended, "max_steps=4")
    succeed(whole, "max_steps=4")
    assert_same_result(extended, whole)


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
    assert "loss on assistant turns and on the EOS token of every turn" in succeed(config)
    written = load_config(output_of(config) / "run" / "config.yaml").config
    asked = load_config(config).config
    assert (written.datasets, written.test_datasets) == (asked.datasets, asked.test_datasets)
