"""Every form of data gives exactly these tokens with this loss mask, as the documents of its tool describe it.

The expected sample is written out, with the part that has loss in brackets; `mask_oracle` turns it into numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.files.lines import Reject, read_text_file
from ratel_cli.data.text.drafts import TrainOnInputs
from ratel_cli.data.text.rows import DatasetSource
from tests.data.conftest import CHATML, Load
from tests.data.mask_oracle import SPECIAL, marked_samples, vocabulary

NO_PROMPT = CHATML.partition("{% if add_generation_prompt %}")[0]
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
ALPACA_INPUT = ALPACA.replace("task.", "task, paired with an input that provides further context.")
U, S, A, T = (f"<|im_start|>{role}\n" for role in ("user", "system", "assistant", "tool"))
END = "<|im_end|>"


def message(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def shared(**turns: str) -> list[dict[str, str]]:
    """A conversation as ShareGPT has it."""
    return [{"from": role, "value": text} for role, text in turns.items()]


CALL = '{"name": "f", "arguments": {"x": 1}}'
TWO_ROUNDS = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A file as a user of some tool has it, and the samples that it must give."""

    content: str
    samples: tuple[str, ...]
    keys: Mapping[str, object] = field(default_factory=dict)
    name: str = "data.jsonl"
    template: str = CHATML
    train_on_inputs: TrainOnInputs = False


def rows(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


FORMS = {
    "completion": Form(content=rows({"text": "ab"}), samples=("⟦ab<eos>⟧",)),
    "completion, another column": Form(
        content=rows({"body": "ab"}), keys={"type": "completion", "field": "body"}, samples=("⟦ab<eos>⟧",)
    ),
    "text, a sample in each line": Form(name="a.txt", content="ab\n\nc\n", samples=("⟦ab<eos>⟧", "⟦c<eos>⟧")),
    "text, the file is the sample": Form(
        name="a.txt", content="ab\n\nc\n", keys={"text_unit": "file"}, samples=("⟦ab\n\nc\n<eos>⟧",)
    ),
    "CSV with text": Form(
        name="a.csv", content='id,text\n1,ab\n2,"c ""d""\n,e"\n', samples=("⟦ab<eos>⟧", '⟦c "d"\n,e<eos>⟧')
    ),
    "TSV with prompt and completion": Form(
        name="a.tsv", content="prompt\tcompletion\nQ: x\ty, z\n", samples=("Q: x⟦y, z<eos>⟧",)
    ),
    "CSV with alpaca columns": Form(
        name="a.csv",
        content="instruction,input,output\ndo,,done\n",
        samples=(f"{ALPACA}\n\n### Instruction:\ndo\n\n### Response:\n⟦done<eos>⟧",),
    ),
    "alpaca with input": Form(
        content=rows({"instruction": "do", "input": "it", "output": "done"}),
        samples=(f"{ALPACA_INPUT}\n\n### Instruction:\ndo\n\n### Input:\nit\n\n### Response:\n⟦done<eos>⟧",),
    ),
    "alpaca with a system prompt (axolotl: alpaca_w_system)": Form(
        content=rows({"instruction": "do", "output": "done", "system": "be {kind}"}),
        keys={"type": "alpaca", "field_system": "system"},
        samples=("be {kind}\n\n### Instruction:\ndo\n\n### Response:\n⟦done<eos>⟧",),
    ),
    "TRL: prompt and completion": Form(
        content=rows({"prompt": "Q: x", "completion": " y"}), samples=("Q: x⟦ y<eos>⟧",)
    ),
    "TRL: conversational prompt and completion, loss on the completion only": Form(
        content=rows({"prompt": TWO_ROUNDS[:3], "completion": TWO_ROUNDS[3:]}),
        samples=(f"{U}a{END}\n{A}b{END}\n{U}c{END}\n{A}⟦d{END}\n⟧",),
    ),
    "TRL: a completion of several turns has loss throughout": Form(
        content=rows({"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:]}),
        samples=(f"{U}a{END}\n{A}⟦b{END}\n{U}c{END}\n{A}d{END}\n⟧",),
    ),
    "messages": Form(
        content=rows({"messages": TWO_ROUNDS}),
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧{U}c{END}\n{A}⟦d{END}\n⟧",),
    ),
    "TRL: conversational language modelling has loss on all of it": Form(
        content=rows({"messages": TWO_ROUNDS}),
        train_on_inputs="conversations",
        samples=(f"⟦{U}a{END}\n{A}b{END}\n{U}c{END}\n{A}d{END}\n⟧",),
    ),
    "TRL: with the same settings, a completion has loss and its prompt has none": Form(
        content=rows({"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:2]}),
        train_on_inputs="conversations",
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "TRL: and so for texts": Form(
        content=rows({"prompt": "Q: x", "completion": " y"}),
        train_on_inputs="conversations",
        samples=("Q: x⟦ y<eos>⟧",),
    ),
    "train_on_inputs: a prompt has loss too": Form(
        content=rows({"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:2]}),
        train_on_inputs=True,
        samples=(f"⟦{U}a{END}\n{A}b{END}\n⟧",),
    ),
    "a system prompt for all rows, in place of their own": Form(
        content=rows({"messages": [message("system", "s"), *TWO_ROUNDS[:2]]}, {"messages": TWO_ROUNDS[:2]}),
        keys={"system_prompt": "be kind", "field_system": "system"},
        samples=(f"{S}be kind{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",) * 2,
    ),
    "a system prompt that is left out": Form(
        content=rows(
            {"messages": [message("system", "s"), *TWO_ROUNDS[:2]]},
            {"messages": TWO_ROUNDS[:2], "system": "t"},
        ),
        keys={"drop_system_message": True, "field_system": "system"},
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",) * 2,
    ),
    "a system prompt before a prompt and its completion": Form(
        content=rows({"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:2]}),
        keys={"system_prompt": "s"},
        samples=(f"{S}s{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "a system prompt before question and answer": Form(
        content=rows({"question": "a", "answer": "b"}),
        keys={"system_prompt": "s"},
        samples=(f"{S}s{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "a system prompt in place of Alpaca's first sentences": Form(
        content=rows({"instruction": "do", "output": "done", "system": "x"}),
        keys={"type": "alpaca", "field_system": "system", "system_prompt": "be {kind}"},
        samples=("be {kind}\n\n### Instruction:\ndo\n\n### Response:\n⟦done<eos>⟧",),
    ),
    "columns that are named are read, whatever else a row has": Form(
        content=rows({"q": "a", "x": "b", "messages": TWO_ROUNDS, "question": "e", "answer": "f", "input": "i"}),
        keys={"type": "chat_template", "field_instruction": "q", "field_input": "q", "field_output": "x"},
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "a template without a generation prompt: the header has no loss": Form(
        content=rows({"messages": TWO_ROUNDS}),
        template=NO_PROMPT,
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧{U}c{END}\n{A}⟦d{END}\n⟧",),
    ),
    "a template whose turns have no header": Form(
        content=rows({"messages": TWO_ROUNDS}),
        template="{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %} {{ m.content }}<eos>{% endif %}{% endfor %}",
        samples=("[a]⟦ b<eos>⟧[c]⟦ d<eos>⟧",),
    ),
    "question and answer": Form(content=rows({"question": "a", "answer": "b"}), samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",)),
    "ShareGPT": Form(
        content=rows({"conversations": shared(system="s", human="a", gpt="b")}),
        samples=(f"{S}s{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "axolotl: roles_to_train, the EOS token of trained turns": Form(
        content=rows({"messages": TWO_ROUNDS}),
        keys={"type": "chat_template", "roles_to_train": ("assistant",)},
        samples=(f"{U}a{END}\n{A}⟦b{END}⟧\n{U}c{END}\n{A}⟦d{END}⟧\n",),
    ),
    "axolotl: roles_to_train: [user]": Form(
        content=rows({"messages": TWO_ROUNDS}),
        keys={"roles_to_train": ("human",), "train_on_eos": "turn"},
        samples=(f"{U}⟦a{END}⟧\n{A}b{END}\n{U}⟦c{END}⟧\n{A}d{END}\n",),
    ),
    "axolotl: train_on_eos: all": Form(
        content=rows({"messages": TWO_ROUNDS}),
        keys={"train_on_eos": "all"},
        samples=(f"{U}a⟦{END}⟧\n{A}⟦b{END}⟧\n{U}c⟦{END}⟧\n{A}⟦d{END}⟧\n",),
    ),
    "axolotl: train_on_eos: last": Form(
        content=rows({"messages": TWO_ROUNDS}),
        keys={"train_on_eos": "last"},
        samples=(f"{U}a{END}\n{A}⟦b⟧{END}\n{U}c{END}\n{A}⟦d{END}⟧\n",),
    ),
    "axolotl: train_on_eos: none": Form(
        content=rows({"messages": TWO_ROUNDS}),
        keys={"train_on_eos": "none"},
        samples=(f"{U}a{END}\n{A}⟦b⟧{END}\n{U}c{END}\n{A}⟦d⟧{END}\n",),
    ),
    "axolotl: message_field_training": Form(
        content=rows(
            {"messages": [message("user", "a", train=True), message("assistant", "b", train=False), *TWO_ROUNDS[2:]]}
        ),
        keys={"message_field_training": "train"},
        samples=(f"{U}⟦a{END}⟧\n{A}b{END}\n{U}c{END}\n{A}⟦d{END}⟧\n",),
    ),
    "axolotl: message_property_mappings": Form(
        content=rows({"chat": [{"speaker": "human", "says": "a"}, {"speaker": "gpt", "says": "b"}]}),
        keys={
            "type": "chat_template",
            "field_messages": "chat",
            "message_property_mappings": {"role": "speaker", "content": "says"},
        },
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "axolotl: roles": Form(
        content=rows({"messages": [message("pupil", "a"), message("teacher", "b")]}),
        keys={"roles": {"user": ("pupil",), "assistant": ("teacher",)}},
        samples=(f"{U}a{END}\n{A}⟦b{END}\n⟧",),
    ),
    "LLaMA-Factory: alpaca with system and history": Form(
        content=rows(
            {"instruction": "c", "input": "x", "output": "d", "system": "s", "history": [["a", "b"]]},
            {"instruction": "c", "input": "", "output": "d", "system": "", "history": []},
        ),
        keys={"type": "chat_template", "field_system": "system", "field_history": "history"},
        samples=(f"{S}s{END}\n{U}a{END}\n{A}⟦b{END}\n⟧{U}c\nx{END}\n{A}⟦d{END}\n⟧", f"{U}c{END}\n{A}⟦d{END}\n⟧"),
    ),
    "LLaMA-Factory: sharegpt with a function call": Form(
        content=rows(
            {
                "conversations": shared(human="a", function_call=CALL, observation="o", gpt="b"),
                "system": "s",
                "tools": '[{"name": "f"}]',
            }
        ),
        keys={"field_system": "system"},
        template=WITH_CALLS,
        samples=(f'{S}s{END}\n{U}a{END}\n{A}⟦[f{{"x": 1}}]{END}\n⟧{T}o{END}\n{A}⟦b{END}\n⟧',),
    ),
    "OpenAI: tool calls are trained": Form(
        content=rows(
            {
                "messages": [
                    message("user", "a"),
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                ]
            }
        ),
        template=WITH_CALLS,
        keys={"roles_to_train": ("assistant",)},
        samples=(f"{U}a{END}\n{A}⟦[f{{}}]{END}⟧\n",),
    ),
}
"""By name: the forms of data. The tokenizer's EOS token is `<|im_end|>` for conversations and `<eos>` for texts."""


def char_tokenizer(template: str, *, eos: str) -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel(vocab=vocabulary(), unk_token="<pad>"))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token="<pad>")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


def samples_of(data: TrainingData) -> list[tuple[list[int], list[int]]]:
    """The ids of each sample, and its targets shifted back to labels."""
    found = []
    for index in range(data.steps_per_epoch):
        (batch,) = data.step(index)
        found.append((batch.input_ids[0].tolist(), [-100, *batch.targets[0].tolist()[:-1]]))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_tokens_and_mask(load: Load, tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    path = tmp_path / form.name
    path.write_text(form.content)
    is_chat = "<|im_end|>" in form.samples[0]
    data = load(
        DatasetSource(path=str(path), **form.keys),  # type: ignore[arg-type]
        tokenizer=char_tokenizer(form.template, eos="<|im_end|>" if is_chat else "<eos>"),
        sequence_len=512,
        train_on_inputs=form.train_on_inputs,
    )
    assert samples_of(data) == marked_samples(*form.samples)


HEADERLESS = (
    "the chat template has no generation prompt: loss begins at the first word of an assistant turn, after its header"
)


def test_what_the_template_does_is_said(load: Load, tmp_path: Path, notices: list[str]) -> None:
    """A missing generation prompt, and what the template leaves out of conversations, once each and with counts."""
    calls = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    thinks = message("assistant", "b", reasoning_content="because of a")
    path = tmp_path / "rows.jsonl"
    path.write_text(rows({"messages": [TWO_ROUNDS[0], calls]}, *({"messages": [TWO_ROUNDS[0], thinks]},) * 2))
    for _ in range(2):  # the second time from the cache
        notices.clear()
        load(path, tokenizer=char_tokenizer(NO_PROMPT, eos="<|im_end|>"))
        calls_lost, reasoning_lost, header = notices[1:]
        assert calls_lost.startswith("the chat template leaves out tool calls in 1 of 3 conversations; ")
        assert reasoning_lost.startswith(
            "the chat template leaves out the reasoning of the last assistant turn in 2 of 3 conversations; "
        )
        assert header == HEADERLESS


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff", b"a\0", b"x" * 65])
def test_whole_files_that_cannot_be_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    reasons = {
        b"\xff": "not UTF-8: byte 0xff at byte 1",
        b"a\0": "a NUL byte at byte 2",
        b"x" * 65: "the file is longer than 64 bytes",
    }
    expected = [Reject(file="f", line=1, reason=reasons[content])] if content in reasons else []
    assert list(read_text_file(path, "f", max_row_bytes=64)) == expected


def test_keys_that_are_not_set_change_no_hash() -> None:
    """The token cache of a run that an earlier version began is found again, so the run resumes."""
    assert DatasetSource(path="p", text_unit="line", weight=1.0).described() == {
        "path": "p",
        "type": "auto",
        "split": "train",
        "name": None,
        "field": "text",
        "field_messages": "messages",
        "field_instruction": "instruction",
        "field_input": "input",
        "field_output": "output",
        "max_samples": None,
    }
    changed = DatasetSource(path="p", roles_to_train=("user",)).described()
    assert changed.pop("roles_to_train") == ("user",) and changed == DatasetSource(path="p").described()
