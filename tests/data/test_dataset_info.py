"""LLaMA-Factory's dataset_info.json: each form of description gives the tokens and the mask that it documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratel_cli.config.keys.sections import DatasetConfig
from ratel_cli.config.others.dataset_info import describe_set
from ratel_cli.config.yaml.yaml_marks import Plain
from ratel_cli.data.text.rows import DatasetSource
from tests.data.conftest import CHATML, Load
from tests.data.mask_oracle import marked_samples
from tests.data.test_forms import CALL, END, WITH_CALLS, A, S, T, U, char_tokenizer, rows, samples_of, shared


@dataclass(frozen=True, kw_only=True)
class Described:
    """A description without its file name, one row, and the sample that it must give."""

    entry: Mapping[str, Plain]
    row: dict[str, object]
    sample: str


OPENAI_TAGS: Plain = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "pupil",
    "assistant_tag": "teacher",
    "system_tag": "system",
}
FORMS = {
    "alpaca by default": Described(
        entry={},
        row={"instruction": "a", "input": "x", "output": "b"},
        sample=f"{U}a\nx{END}\n{A}⟦b{END}\n⟧",
    ),
    "alpaca with all columns": Described(
        entry={"columns": {"prompt": "p", "query": "q", "response": "r", "system": "s", "history": "h"}},
        row={"p": "c", "q": "", "r": "d", "s": "be", "h": [["a", "b"]]},
        sample=f"{S}be{END}\n{U}a{END}\n{A}⟦b{END}\n⟧{U}c{END}\n{A}⟦d{END}\n⟧",
    ),
    "sharegpt": Described(
        entry={"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "sys", "tools": "tools"}},
        row={
            "conversations": shared(human="a", function_call=CALL, observation="o", gpt="b"),
            "sys": "be",
            "tools": "[]",
        },
        sample=f'{S}be{END}\n{U}a{END}\n{A}⟦[f{{"x": 1}}]{END}\n⟧{T}o{END}\n{A}⟦b{END}\n⟧',
    ),
    "sharegpt with another name for function calls": Described(
        entry={"formatting": "sharegpt", "tags": {"function_tag": "called"}},
        row={"conversations": shared(human="a", called='{"name": "function_call", "arguments": {}}')},
        sample=f"{U}a{END}\n{A}⟦[function_call{{}}]{END}\n⟧",
    ),
    "OpenAI's messages with other roles": Described(
        entry={"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS},
        row={"messages": [{"role": "pupil", "content": "a"}, {"role": "teacher", "content": "b"}]},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_tokens_and_mask(load: Load, tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    (tmp_path / "d.jsonl").write_text(rows(form.row))
    ours = describe_set({"file_name": "d.jsonl", **form.entry}, tmp_path, is_text=False)
    template = WITH_CALLS if "function_call" in str(form.row) else CHATML
    data = load(
        DatasetSource(**DatasetConfig.model_validate(ours).model_dump()),
        tokenizer=char_tokenizer(template, eos="<|im_end|>"),
        sequence_len=512,
    )
    assert samples_of(data) == marked_samples(form.sample)
