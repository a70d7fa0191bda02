"""`ratel generate`: the text is that of the model's own `generate` in memory, from a store and from a directory."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.e2e.conftest import SignalAt
from tests.e2e.runs import Config, as_json, assert_rejected, ratel, works
from tests.model.tiny import save_tiny
from tests.tiers import thinned

QUESTIONS = ["Which number is 3?", "Which number is 12, and is it even or odd?", "4"]
CHATS = [f"<|user|>{question}<|assistant|>" for question in QUESTIONS]


def whole_texts(directory: Path, texts: Sequence[str], **changes: object) -> list[str]:
    """What the model in memory adds to these texts, given as one batch with padding on the left."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    batch = tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=False)
    settings = {"max_new_tokens": 9, "do_sample": False, **changes}
    torch.manual_seed(42)
    made = model.generate(batch.input_ids, attention_mask=batch.attention_mask, **settings)
    new = made[:, batch.input_ids.shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in new]


def generated(*arguments: object) -> dict[str, object]:
    result = as_json("generate", *arguments, "--max-new-tokens", 9)
    assert isinstance(result, dict)
    return result


def texts_of(found: dict[str, object]) -> list[object]:
    completions = found["completions"]
    assert isinstance(completions, list)
    return [each["text"] for each in completions]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS) + "\n\n")
    return path


def test_a_run_and_its_export_answer_as_the_model_in_memory(plain_run: Config, questions: Path) -> None:
    wanted = whole_texts(plain_run.output, CHATS)
    assert any(wanted)
    for model in (plain_run, plain_run.output):
        found = generated(model, "--prompts", questions)
        assert texts_of(found) == wanted
        assert (found["model"], found["batch_size"]) == (f"{plain_run.output}, step 4", 3)
        tokenizer = AutoTokenizer.from_pretrained(plain_run.output)
        completions = cast(list[dict[str, object]], found["completions"])
        assert [each["num_prompt_tokens"] for each in completions] == [len(tokenizer(chat).input_ids) for chat in CHATS]
    one = generated(plain_run, QUESTIONS[1])
    assert texts_of(one) == whole_texts(plain_run.output, CHATS[1:2])


@pytest.mark.full
def test_a_directory_and_texts_without_the_template(base: Path, tied_base: Path, questions: Path) -> None:
    for directory in (base, tied_base):
        assert texts_of(generated(directory, "--raw", "--prompts", questions)) == whole_texts(directory, QUESTIONS)
    assert texts_of(generated(base, "--prompts", questions)) == whole_texts(base, CHATS)


@pytest.mark.full
def test_prompts_as_arguments(base: Path) -> None:
    """What looks like a key changes the config, wherever it stands; alone it is the prompt."""
    wanted = whole_texts(base, CHATS)
    found = generated(base, QUESTIONS[0], "seed=7", *QUESTIONS[1:], "limits.host_memory=4GiB")
    assert (texts_of(found), found["batch_size"]) == (wanted, 3)
    assert texts_of(generated(base, "seed=7")) == whole_texts(base, ["<|user|>seed=7<|assistant|>"])
    for argument in ("learning_rte=1", "learning-rte=1"):
        assert_rejected(ratel("generate", base, argument, QUESTIONS[0]), 2, "unknown key", argument.partition("=")[0])


@pytest.mark.full
@pytest.mark.parametrize("option", [[], ["--prompts"]])
@pytest.mark.parametrize("as_rows", [False, True])
def test_prompts_from_stdin(base: Path, as_rows: bool, option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"prompt": each}) for each in QUESTIONS] if as_rows else QUESTIONS
    give(monkeypatch, "\n".join(["", *lines, " ", ""]).encode())
    assert texts_of(generated(base, *option, "-", "seed=7")) == whole_texts(base, CHATS)


def test_wrong_prompts_from_stdin(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, reason in (
        (b"", "stdin: there are no prompts"),
        (b" \n", "stdin: there are no prompts"),
        (b"\xff", "stdin: cannot be read: it is not UTF-8 text"),
        (b'{"prompt": "a"}\n{', "stdin:2: not valid JSON"),
        (b'{"text": "a"}', "stdin:1: no prompt"),
        (b"a" * ((64 << 20) + 1), "stdin: larger than 64.0 MiB"),
    ):
        give(monkeypatch, content)
        assert_rejected(ratel("generate", base, "-"), 2, reason)
    monkeypatch.setattr(sys, "stdin", None)
    assert_rejected(ratel("generate", base, "-"), 2, "stdin: there are no prompts")
    assert_rejected(ratel("generate", base, "-", "a"), 2, "arguments 'PROMPT' and '-': both name prompts")


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """The next command has this on its stdin."""
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(content)))


def test_rows_with_prompts_and_conversations(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [("user", "2?"), ("assistant", "even"), ("user", "3?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text("\n".join(map(json.dumps, [{"prompt": QUESTIONS[0]}, {"messages": messages}, QUESTIONS[2]])))
    chat = "<|user|>2?<|assistant|>even<|end|><|user|>3?<|assistant|>"
    assert texts_of(generated(base, "--prompts", path)) == whole_texts(base, [CHATS[0], chat, CHATS[2]])
    assert_rejected(ratel("generate", base, "--prompts", path, "--raw"), 2, "prompt 2 is a conversation")


@pytest.mark.parametrize("family", thinned(["gpt2", "qwen3_moe", "gemma2"], every=3, offset=2))
def test_other_architectures(base: Path, tmp_path: Path, family: str) -> None:
    """With the tokenizer of the base model, whose vocabulary is larger than theirs."""
    save_tiny(family, tmp_path / "model", vocab_size=400)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS))
    found = generated(tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--raw")
    assert texts_of(found) == whole_texts(tmp_path / "model", QUESTIONS)


@pytest.mark.full
def test_drawn_tokens_follow_the_seed(base: Path) -> None:
    one, same, other = (
        texts_of(generated(base, QUESTIONS[0], "--temperature", 1.5, f"seed={seed}")) for seed in (42, 42, 7)
    )
    assert one == same != other
    assert one == whole_texts(base, CHATS[:1], do_sample=True, temperature=1.5)


@pytest.mark.full
def test_the_end_token_ends_a_text(base: Path, tmp_path: Path, questions: Path) -> None:
    """The second token of the first answer is made an end token; the other answers go on."""
    first = generated(base, "--prompts", questions)["completions"]
    assert isinstance(first, list)
    end = first[0]["token_ids"][1]
    shutil.copytree(base, tmp_path / "base")
    GenerationConfig(eos_token_id=[299, end], pad_token_id=1).save_pretrained(tmp_path / "base")
    found = generated(tmp_path / "base", "--prompts", questions)["completions"]
    assert isinstance(found, list)
    for before, after in zip(first, found, strict=True):
        ids = before["token_ids"]
        assert after["token_ids"] == ids[: ids.index(end) + 1 if end in ids else None]
    assert len(found[0]["token_ids"]) == 2


@pytest.mark.full
def test_what_is_printed(base: Path, questions: Path) -> None:
    ended = works("generate", base, "--prompts", questions, "--max-new-tokens", "9", "limits.host_memory=4GiB")
    assert "--- prompt 1" in ended.stdout and "--- prompt 3" in ended.stdout
    assert "27 tokens in " in ended.stderr and "a token for 3 prompts at once takes " in ended.stderr
    single = works("generate", base, QUESTIONS[2], "--max-new-tokens", "1")
    assert "---" not in single.stdout and "; a token takes " in single.stderr
    assert whole_texts(base, CHATS[2:], max_new_tokens=1)[0] == single.stdout.removesuffix("\n")


def test_blocks_stay_in_memory_if_they_fit(base: Path) -> None:
    found = generated(base, QUESTIONS[0])
    size_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    assert found["num_resident_blocks"] == 4
    assert size_bytes * 0.8 < float(str(found["bytes_read"])) < size_bytes * 1.6, "read once"


def test_wrong_prompts(base: Path, tmp_path: Path) -> None:
    assert_rejected(ratel("generate", base), 2, "there is no prompt")
    assert "write it after the model" in ratel("generate", base).stderr
    ended = ratel("generate", base, "a prompt", "temperature=0.7")
    assert_rejected(ended, 2, "'temperature=0.7': this is no key of a config")
    assert "hint: write --temperature 0.7" in ended.stderr
    assert_rejected(ratel("generate", base, " \n"), 2, "the prompt is empty")
    assert_rejected(ratel("generate", base, "a", ""), 2, "prompt 2 is empty")
    assert_rejected(ratel("generate", base, "a", "--prompts", tmp_path), 2, "'PROMPT' and '--prompts': both name")
    assert_rejected(ratel("generate", base, "--prompts", tmp_path / "none.txt"), 2, "none.txt: cannot be read")
    (tmp_path / "empty.txt").write_text("\n \n")
    assert_rejected(ratel("generate", base, "--prompts", tmp_path / "empty.txt"), 2, "there are no prompts")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert_rejected(ratel("generate", base, "--prompts", tmp_path / "binary.txt"), 2, "it is not UTF-8 text")
    rows = tmp_path / "rows.jsonl"
    for row, reason in (
        ("{", "rows.jsonl:2: not valid JSON"),
        ('{"text": "a"}', "rows.jsonl:2: no prompt"),
        ('{"prompt": 3}', "rows.jsonl:2: no prompt"),
        ('{"messages": ["a"]}', "rows.jsonl:2: no prompt"),
        ('{"prompt": ""}', "prompt 2 is empty"),
        ('{"messages": []}', "prompt 2 is empty"),
        ('{"messages": [{}]}', "rows.jsonl:2: no prompt"),
    ):
        rows.write_text('{"prompt": "a"}\n' + row)
        assert_rejected(ratel("generate", base, "--prompts", rows), 2, reason)


def test_a_template_that_fails(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ raise_exception('only on Sundays') }}")
    ended = ratel("generate", tmp_path / "base", "a")
    assert_rejected(ended, 2, "prompt 1: the chat template fails on this conversation", "only on Sundays")
    assert "hint: continue a text without the chat template: --raw" in ended.stderr


@pytest.mark.full
def test_what_cannot_generate(base: Path, tmp_path: Path) -> None:
    assert_rejected(ratel("generate", tmp_path / "none", "a"), 2, "none: no such file or directory")
    assert_rejected(ratel("generate", tmp_path, "a"), 2, "neither a run's output directory nor a model")
    shutil.copytree(base, tmp_path / "mute", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    ended = ratel("generate", tmp_path / "mute", "a")
    assert_rejected(ended, 2, "no usable tokenizer")
    assert "hint: put the tokenizer's files next to the model" in ended.stderr
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text("[")
    assert_rejected(ratel("generate", tmp_path / "base", "a"), 2, "generation_config.json")
    assert_rejected(ratel("generate", base, "a", "limits.host_memory=300MiB"), 3, "generating for 1 prompt needs")
    assert_rejected(ratel("generate", base, "a", "--step", 3), 2, "has no saved steps")
    assert_rejected(ratel("generate", base, "a", "--temperature", "-1"), 2, "temperature")


def test_longer_than_the_positions(base: Path, tmp_path: Path) -> None:
    """A table has no more positions; computed positions have, and there is a notice."""
    ended = works("generate", base, "1 " * 70, "--raw", "--max-new-tokens", 1)
    assert "the model was trained with up to 64 tokens" in ended.stderr
    save_tiny("gpt2", tmp_path / "model", vocab_size=400)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "model")
    works("generate", tmp_path / "model", "1", "--raw", "--max-new-tokens", 63)
    ended = ratel("generate", tmp_path / "model", "1", "--raw", "--max-new-tokens", 64)
    assert_rejected(ended, 2, "prompt 1 has 1 token and gets up to 64 more, but transformer.wpe.weight has only 64")


@pytest.mark.full
def test_a_signal_ends_it(plain_run: Config, signal_at: SignalAt) -> None:
    signal_at(7, signal.SIGINT)
    ended = ratel("generate", plain_run, "2?")
    assert (ended.code, ended.stdout) == (130, "")
    assert "Stopped. Run the same command again." in ended.stderr
    assert len(texts_of(generated(plain_run, "2?"))) == 1, "the store is free"


def test_a_prompt_and_a_file_with_prompts_exclude_each_other(base: Path, questions: Path) -> None:
    for prompt in ("hi", "What is 1=1?", "x = y?"):
        ended = ratel("generate", base, prompt, "--prompts", questions)
        assert_rejected(ended, 2, "arguments 'PROMPT' and '--prompts': both name prompts")
    works("generate", base, "seed=3", "--prompts", questions, "--max-new-tokens", 1, "--raw")
