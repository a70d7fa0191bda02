"""Configs of other trainers that say nothing about the loss: `ratel import` writes keys that give the tool's own mask.

The expected sample is what the documents of the tool say, with the part that has loss in brackets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratel_cli.data.text.rows import DatasetSource
from tests.config.config_loading import imported
from tests.data.conftest import CHATML, Load
from tests.data.mask_oracle import marked_samples
from tests.data.test_forms import ALPACA, ALPACA_INPUT, END, TWO_ROUNDS, A, S, U, char_tokenizer, message, samples_of

LLAMA_FACTORY = {"template": "qwen", "stage": "sft", "finetuning_type": "full"}
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def tune(name: str, **arguments: object) -> dict[str, object]:
    path = {} if name == "alpaca_dataset" else {"source": "json", "data_files": "rows.jsonl"}
    return {
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "dataset": {"_component_": f"torchtune.datasets.{name}", **path, **arguments},
        "epochs": 1,
    }


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What a user of a tool has, and the sample that training there has."""

    config: dict[str, object]
    row: dict[str, object]
    sample: str


FORMS = {
    "axolotl: chat_template has loss on words of the assistant and the EOS token": Imported(
        config={"datasets": [{"path": "rows.jsonl", "type": "chat_template"}], "strict": False},
        row={"messages": TWO_ROUNDS},
        sample=f"{U}a{END}\n{A}⟦b{END}⟧\n{U}c{END}\n{A}⟦d{END}⟧\n",
    ),
    "axolotl: a column system has the system prompt": Imported(
        config={"datasets": [{"path": "rows.jsonl", "type": "chat_template"}], "strict": False},
        row={"messages": TWO_ROUNDS[:2], "system": "s"},
        sample=f"{S}s{END}\n{U}a{END}\n{A}⟦b{END}⟧\n",
    ),
    "axolotl: chat_template with keys of its own": Imported(
        config={"datasets": [{"path": "rows.jsonl", "type": "chat_template", "train_on_eos": "last"}], "strict": False},
        row={"messages": TWO_ROUNDS},
        sample=f"{U}a{END}\n{A}⟦b⟧{END}\n{U}c{END}\n{A}⟦d{END}⟧\n",
    ),
    "axolotl: alpaca": Imported(
        config={"datasets": [{"path": "rows.jsonl", "type": "alpaca"}], "strict": False},
        row={"instruction": "do", "input": "it", "output": "done"},
        sample=f"{ALPACA_INPUT}\n\n### Instruction:\ndo\n\n### Input:\nit\n\n### Response:\n⟦done{END}⟧",
    ),
    "axolotl: pretraining": Imported(
        config={"pretraining_dataset": {"path": "rows.jsonl", "text_column": "body"}, "strict": False},
        row={"body": "ab", "text": "c"},
        sample=f"⟦ab{END}⟧",
    ),
    "TRL: conversational language modelling": Imported(
        config={"dataset_name": "rows.jsonl"},
        row={"messages": TWO_ROUNDS},
        sample=f"⟦{U}a{END}\n{A}b{END}\n{U}c{END}\n{A}d{END}\n⟧",
    ),
    "TRL: assistant_only_loss": Imported(
        config={"dataset_name": "rows.jsonl", "assistant_only_loss": True},
        row={"messages": TWO_ROUNDS},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧{U}c{END}\n{A}⟦d{END}\n⟧",
    ),
    "TRL: conversational prompt and completion": Imported(
        config={"dataset_name": "rows.jsonl"},
        row={"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:2]},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "TRL: prompt and completion with loss on both": Imported(
        config={"dataset_name": "rows.jsonl", "completion_only_loss": False},
        row={"prompt": TWO_ROUNDS[:1], "completion": TWO_ROUNDS[1:2]},
        sample=f"⟦{U}a{END}\n{A}b{END}\n⟧",
    ),
    "TRL: language modelling": Imported(
        config={"dataset_name": "rows.jsonl", "dataset_text_field": "text"}, row={"text": "ab"}, sample=f"⟦ab{END}⟧"
    ),
    "LLaMA-Factory: a set that is not described has its columns": Imported(
        config={"dataset": "rows.jsonl", **LLAMA_FACTORY},
        row={"conversations": TURNS},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "torchtune: instruct_dataset is a turn of the user and one of the assistant": Imported(
        config=tune("instruct_dataset"),
        row={"input": "a", "output": "b", "instruction": "c"},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "torchtune: instruct_dataset with other columns and a system prompt": Imported(
        config=tune("instruct_dataset", column_map={"input": "q", "output": "r"}, new_system_prompt="Be kind."),
        row={"q": "a", "r": "b", "messages": [], "question": "e", "answer": "f"},
        sample=f"{S}Be kind.{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "torchtune: instruct_dataset with loss on its input": Imported(
        config=tune("instruct_dataset", train_on_input=True),
        row={"input": "a", "output": "b"},
        sample=f"⟦{U}a{END}\n{A}b{END}\n⟧",
    ),
    "torchtune: chat_dataset": Imported(
        config=tune("chat_dataset", conversation_column="talk", conversation_style="sharegpt"),
        row={"talk": [*TURNS, *TURNS]},
        sample=f"{U}a{END}\n{A}⟦b{END}\n⟧{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "torchtune: chat_dataset with another system prompt": Imported(
        config=tune("chat_dataset", conversation_column="messages", conversation_style="openai", new_system_prompt="T"),
        row={"messages": [message("system", "s"), *TWO_ROUNDS[:2]]},
        sample=f"{S}T{END}\n{U}a{END}\n{A}⟦b{END}\n⟧",
    ),
    "torchtune: alpaca_dataset has loss on its prompt": Imported(
        config=tune("alpaca_dataset", source="json", data_files="rows.jsonl"),
        row={"instruction": "do", "input": "", "output": "done"},
        sample=f"⟦{ALPACA}\n\n### Instruction:\ndo\n\n### Response:\ndone{END}⟧",
    ),
    "torchtune: text_completion_dataset": Imported(
        config=tune("text_completion_dataset", column="body"), row={"body": "ab"}, sample=f"⟦ab{END}⟧"
    ),
}
"""By name. The tokenizer's EOS token is `<|im_end|>`, and its template has a new line behind it."""


@pytest.mark.parametrize("name", FORMS)
def test_tokens_and_mask(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    form = FORMS[name]
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(form.row) + "\n")
    model = {} if "torchtune" in name else {"model_name_or_path" if "TRL" in name else "base_model": "m"}
    found, config = imported(Path(), {**model, **form.config})
    assert found.tool == name.partition(":")[0]
    data = load(
        *(DatasetSource(**each.model_dump()) for each in config.datasets),
        tokenizer=char_tokenizer(CHATML, eos=END),
        sequence_len=512,
        train_on_inputs=config.train_on_inputs,
    )
    assert samples_of(data) == marked_samples(form.sample)
