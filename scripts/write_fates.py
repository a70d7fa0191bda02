"""Writes into the tables of `ratel_cli/config/fates` what `ratel import` does with the example of each row.

    python -m scripts.write_fates

Run it when a change gives a key another fate, and look at the difference: the tables have what `ratel import` reports.
`tests/config/test_fates.py` fails while a table differs from what this module would write. A row is one key with one
value: its columns `key`, `default`, `null`, `empty`, `zero`, `given` (other keys that the value needs), `example` and
`source` are written by hand, or from `scripts/foreign_keys.py --list`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ratel_cli.config.importing import Imported, import_config
from ratel_cli.config.load import dump
from ratel_cli.config.yaml.yaml_marks import Plain
from ratel_cli.errors import BadInput
from scripts.foreign_keys import table_of, table_path

CONFIGS: Mapping[str, dict[str, Plain]] = {
    "axolotl": {
        "base_model": "m",
        "datasets": [{"path": "d.jsonl", "type": "chat_template"}],
        "sequence_len": 512,
        "micro_batch_size": 1,
        "num_epochs": 1,
    },
    "LLaMA-Factory": {
        "model_name_or_path": "m",
        "stage": "sft",
        "finetuning_type": "full",
        "dataset": "d.jsonl",
        "template": "llama3",
        "cutoff_len": 512,
    },
    "LLaMA-Factory v1": {"model": "m", "model_class": "llm", "train_dataset": "d.jsonl", "cutoff_len": 512},
    "TRL": {"model_name_or_path": "m", "dataset_name": "d.jsonl", "max_length": 512},
    "transformers": {
        "model_name_or_path": "m",
        "datasets": "d.jsonl",
        "per_device_train_batch_size": 2,
        "logging_dir": "logs",
    },
    "torchtune": {
        "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t", "max_seq_len": 512},
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": "d.jsonl",
        },
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "batch_size": 1,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    },
}
"""By tool: a config that has what each run needs, to which a row adds its key."""
_FATES = {"kept": "kept", "translated": "translated", "ignored": "dropped", "noted": "dropped", "undecided": "decision"}


def outcome_of(tool: str, row: Mapping[str, str], folder: Path) -> tuple[dict[str, str], Imported | None]:
    """What `import` does with the example of a row: its columns `fate`, `ours` and `why`; and what was imported."""
    config: dict[str, Plain] = json.loads(json.dumps(CONFIGS[tool]))
    for key, value in json.loads(row["given"] or "{}").items():
        _put(config, key, value)
    key = row["key"]
    _put(config, key, json.loads(row["example"]))
    path = folder / "theirs.yaml"
    path.write_text(dump(config))
    try:
        found = import_config(path)
    except BadInput as error:
        return {"fate": "refused", "ours": "", "why": _why_refused(error, key)}, None
    named = [
        (".".join(part for part in each.written.split(".") if not part.isdigit()), each) for each in found.outcomes
    ]
    exact = [each for written, each in named if written == key]
    for outcome in exact[-1:] or [each for written, each in named if key.startswith(f"{written}.")]:
        return {"fate": _FATES[outcome.fate], "ours": outcome.ours, "why": outcome.reason}, found
    inside = any(written.startswith(f"{key}.") for written, _ in named)
    return {"fate": "parts" if inside else "lost", "ours": "", "why": "its keys have rows of their own"}, found


def _put(config: dict[str, Plain], key: str, value: Plain) -> None:
    """Set a dotted key; in a list, of the first item."""
    *path, last = key.split(".")
    for part in path:
        inner = config.get(part)
        if isinstance(inner, list) and inner:
            inner = inner[0]
        if not isinstance(inner, dict):
            inner = config[part] = {}
        config = inner
    config[last] = value


def _why_refused(error: BadInput, key: str) -> str:
    """The message that names the key, without the place and the name; else the first one."""
    messages = [each.message.split(": ", 1)[1] for each in (error, *error.others) if isinstance(each, BadInput)]
    named = [each for each in messages if f"`{key}" in each or f"`{key.rpartition('.')[2]}" in each]
    message = (named or messages)[0]
    return message.split(" is not a key of Ratel: ", 1)[-1]


def written_rows(tool: str) -> Iterator[dict[str, str]]:
    """The rows of a table, with what `import` does today."""
    with tempfile.TemporaryDirectory() as folder:
        for row in table_of(tool):
            yield {**row, **outcome_of(tool, row, Path(folder))[0]}


def main() -> None:
    for tool in CONFIGS:
        rows = list(written_rows(tool))
        lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
        table_path(tool).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
