"""Writes docs/config.md, every key of a run's config from the docstrings of `config/keys/schema.py` and the alias
tables; and from the same the JSON schema that the package has for editors.

    python -m scripts.write_config_docs

`tests/test_docs.py` fails while a file differs from what this module would write. Only the introduction and the
titles of the sections stand here; types, bounds, defaults, meanings and aliases come from the schema itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ratel_cli.config.describe import GROUPS, facts_of, meaning_of, relations_in_words
from ratel_cli.config.json_schema import SCHEMA_FILE, schema_text
from ratel_cli.config.others.aliases import SECTIONS, TOP
from ratel_cli.config.others.foreign import LISTED
from ratel_cli.config.others.row import ForeignKey

DESTINATION = Path(__file__).parents[1] / "docs" / "config.md"
COMMAND = "python -m scripts.write_config_docs"

SECTION_TITLES: Mapping[str, str] = {
    TOP: "",
    "datasets": "Each item of `datasets`",
    "lr_scheduler_kwargs": "In `lr_scheduler_kwargs`",
    "optim_args": "In `optim_args`",
    "storage": "In `storage`",
    "storage.snapshot": "In `storage.snapshot`",
    "limits": "In `limits`",
    "model_shape": "In `model_shape`",
}

INTRODUCTION = f"""\
# Configuration

<!-- Generated from ratel_cli/config/keys/schema.py. Do not edit; run: {COMMAND} -->

A run is described by one YAML file. Every key has a default except `base_model` and `datasets`, so this is a whole
config:

```yaml
base_model: Qwen/Qwen3-8B
datasets: train.jsonl
```

* **On the command line**, `key=value` arguments override the file: `learning_rate=1e-5`, `storage.engine=threads`,
  `datasets.0.path=other.jsonl`, `storage.paths=[/mnt/a,/mnt/b]`. Values are YAML; the first `=` divides.
* **Names** are axolotl's where axolotl has one. Names of other trainers are accepted with a notice; they are listed
  below each key as "also".
* **Unknown keys are errors**, each with file, line, column and the nearest known key. All errors of a config are
  reported at once. Keys of other trainers are [listed below](#keys-of-other-trainers): those that have no effect here
  are ignored, with one notice for all, and those that mean something Ratel does not do are errors with the reason.
* **Sizes** are numbers of bytes or texts such as `24GiB`, `500MB`. `1e-5` is a number, as in YAML 1.2.

The config with every default filled in is written to `run/config.yaml` of the output directory.
"""

REJECTED = """\
## Keys of other trainers

What becomes of keys that Ratel has no key for. An empty value is always ignored, and so is `false` for whatever one
would have to turn on. `…` stands for any ending. `bf16`, `fp16`, `save_strategy`, `eval_strategy`, `dataset_name`,
`dataset`, `max_samples`, `use_peft`, `finetuning_type: lora`, `lora_rank`, `lora_target`, `additional_target`,
`use_rslora`, `use_dora`, `double_quantization` and `use_bnb_nested_quant` are not here, nor are `adapter: qlora` and
`quantization_bit: 4` and `8`: they are read as keys of ours, with a notice. `ratel explain KEY` says as which.

| key | it is | why | what to do |
|---|---|---|---|
"""


def main() -> None:
    """Write the files."""
    for path, text in ((DESTINATION, config_page()), (SCHEMA_FILE, schema_text())):
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def config_page() -> str:
    """The whole content of docs/config.md."""
    assert GROUPS.keys() <= SECTIONS[TOP].model_fields.keys(), "a group begins with a key that does not exist"
    parts = [INTRODUCTION]
    for section in sorted(SECTIONS, key=list(SECTION_TITLES).index):
        if section != TOP:
            parts.append(f"## {SECTION_TITLES[section]}\n")
        for name in SECTIONS[section].model_fields:
            if section == TOP and name in GROUPS:
                parts.append(f"## {GROUPS[name]}\n")
            parts.append(_entry(section, name))
    parts.append(REJECTED + "\n".join(_rejected_rows()) + "\n")
    return "\n".join(parts)


def _entry(section: str, name: str) -> str:
    """One key: its heading, a line of facts, its meaning, and what it has to do with other keys."""
    key = f"{section}.{name}" if section else name
    relations = " ".join(relations_in_words(section, name))
    parts = (f"### `{key}`", " · ".join(facts_of(section, name)), meaning_of(section, name), relations)
    return "\n\n".join(filter(None, parts)) + "\n"


def _rejected_rows() -> Iterator[str]:
    """One row for each fate and reason."""
    keys: dict[ForeignKey, list[str]] = {}
    for key, foreign in LISTED.items():
        if not key.startswith("datasets."):
            keys.setdefault(replace(foreign, theirs="", harmless=()), []).append(f"`{key.replace('*', '…')}`")
    for foreign, names in sorted(keys.items(), key=lambda row: list(_FATES).index(row[0].fate)):
        yield f"| {', '.join(names)} | {_FATES[foreign.fate]} | {foreign.reason} | {foreign.hint} |"


_FATES: Mapping[str, str] = {
    "impossible": "error",
    "undecided": "error; `import` leaves it out",
    "noted": "ignored, with a notice",
    "ignored": "ignored",
}


if __name__ == "__main__":
    main()
