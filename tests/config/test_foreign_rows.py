"""The tables of other trainers' keys: what is reported of a key is about what the user wrote."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from ratel_cli.config.load import examine_text
from ratel_cli.config.others.foreign import LISTED, fate_of, foreign_key
from ratel_cli.config.yaml.yaml_marks import Plain, Where, marked
from ratel_cli.errors import BadInput
from scripts.foreign_keys import table_of
from scripts.write_fates import CONFIGS
from tests.config.config_loading import imported

AXOLOTL = {"base_model": "m", "datasets": [{"path": "d.jsonl", "type": "chat_template"}]}
TRL = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "max_length": 512}
LLAMA_FACTORY = {"model_name_or_path": "m", "dataset": "d.jsonl", "stage": "sft", "finetuning_type": "full"}


def ours(tmp_path: Path, config: dict[str, object]) -> dict[str, object]:
    content = yaml.safe_load(imported(tmp_path, config)[0].text)
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    "config",
    [
        {**AXOLOTL, "use_muon": True, "optimizer": "adamw"},
        {**AXOLOTL, "wandb_project": "p"},
        {**AXOLOTL, "use_cpu": 1},
        {**AXOLOTL, "batch_size": 8, "micro_batch_size": 2},
        {**AXOLOTL, "optimizer": "lion_pytorch"},
        {**AXOLOTL, "lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1},
        {**AXOLOTL, "logging_steps": 5, "eval_strategy": "steps", "val_set_size": 0.1},
        {**AXOLOTL, "datasets": [{"path": "d.jsonl", "message_field_role": "from"}]},
        {**AXOLOTL, "datasets": [{"path": "json", "data_files": "d.jsonl", "type": "completion"}]},
        {**TRL, "eos_token": "x"},
        {**TRL, "use_peft": True, "adapter": None, "lora_target_modules": ["q_proj"]},
        {**LLAMA_FACTORY, "stage": "dpo", "pref_loss": "simpo"},
        {**LLAMA_FACTORY, "finetuning_type": "lora", "quantization_bit": 4, "bf16": True},
    ],
)
def test_each_key_that_the_user_wrote_is_reported_and_no_other(tmp_path: Path, config: dict[str, object]) -> None:
    sets = config.get("datasets")
    written = {*config, *(f"datasets.{key}" for each in (sets if isinstance(sets, list) else []) for key in each)}
    named = {each.written for each in imported(tmp_path, config)[0].outcomes if each.value or each.written in written}
    assert named - {"datasets.path"} == written - {"datasets.path"}  # a name of a set is its path


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**AXOLOTL, "datasets": [{"path": "d.jsonl", "message_field_role": 5}]}, "datasets.0.message_field_role"),
        ({**TRL, "use_peft": True, "lora_target_modules": ["q"], "lora_rank": "x"}, "lora_rank"),
        ({**AXOLOTL, "lr_scheduler": "cosine", "cosine_min_lr_ratio": -1}, "cosine_min_lr_ratio"),
        (
            {**AXOLOTL, "adapter": "lora", "load_in_4bit": True, "bnb_config_kwargs": {"load_in_8bit": 3}},
            "load_in_8bit",
        ),
    ],
)
def test_an_error_names_the_key_as_the_user_wrote_it(config: dict[str, object], key: str) -> None:
    findings = examine_text(yaml.safe_dump(config, sort_keys=False), Path("c.yaml")).findings
    assert any(f"`{key}` " in each.message for each in findings), findings


def test_import_names_all_that_is_impossible_at_once(tmp_path: Path) -> None:
    wrong = {"rl": "grpo", "trl": {"vllm": True}, "kd_alpha": 1, "optimizer": "adafactor", "lr_scheduler": "x"}
    with pytest.raises(BadInput) as raised:
        imported(tmp_path, {**AXOLOTL, **wrong})
    messages = [str(each) for each in (raised.value, *raised.value.others)]
    assert all(any(f"`{key}`" in message for message in messages) for key in wrong), messages


IN_FOUR_BITS = {"finetuning_type": "lora", "quantization_bit": 4}
OWN_SET = {"path": "d.jsonl", "type": "chat_template", "message_field_role": "from"}


@pytest.mark.parametrize(
    ("theirs", "keys", "expected"),
    [
        (TRL, {"adapter": None, "use_peft": True, "lora_target_modules": ["q"]}, {"adapter": "lora"}),
        (TRL, {"rl": None, "beta": 0.1, "loss_type": "sigmoid"}, {"rl": "dpo"}),
        (LLAMA_FACTORY, {**IN_FOUR_BITS, "quantization_method": None}, {"load_in_4bit": True}),
        (LLAMA_FACTORY, {"stage": "dpo", "pref_loss": None}, {"rl": "dpo"}),
        (
            AXOLOTL,
            {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1, "lr_scheduler_kwargs": {"num_cycles": 0.4}},
            {"lr_scheduler_kwargs": {"num_cycles": 0.4, "min_lr_rate": 0.1}},
        ),
    ],
)
def test_what_is_empty_hides_nothing_and_what_is_written_stays_beside_what_is_added(
    tmp_path: Path, theirs: dict[str, object], keys: dict[str, object], expected: dict[str, object]
) -> None:
    assert ours(tmp_path, {**theirs, **keys}).items() >= expected.items()


def test_mappings_of_messages_stay_beside_what_is_added(tmp_path: Path) -> None:
    sets = ours(tmp_path, {**AXOLOTL, "datasets": [{**OWN_SET, "message_property_mappings": {"content": "text"}}]})
    assert sets["datasets"][0]["message_property_mappings"] == {"content": "text", "role": "from"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        # It does not become a text with the names of our classes.
        ({**AXOLOTL, "datasets": [{**OWN_SET, "field_thinking": ["a"], "template_thinking_key": "think"}]},
         r"`datasets[.]0[.]template_thinking_key` must be text"),
        ({**TRL, "beta": 0.1, "loss_type": ["sigmoid", "ipo"]}, "no key names the method"),
    ],
)  # fmt: skip
def test_a_list_where_a_name_belongs_is_an_error(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        imported(tmp_path, config)


def test_a_key_of_a_mapping_is_explained_by_its_meaning(tmp_path: Path) -> None:
    config = {**LLAMA_FACTORY, "quant_config": {"name": "auto", "compute_dtype": "bf16"}}
    outcomes = {each.written: each for each in imported(tmp_path, config)[0].outcomes}
    assert outcomes["compute_dtype"].reason == "Ratel dequantises weights to `dtype` for computing"


def test_the_mixture_of_sets_names_the_share_that_is_held_out(tmp_path: Path) -> None:
    mixture = {"datasets": [{"id": "a"}], "test_split_size": 0.1}
    found, _ = imported(tmp_path, {"model_name_or_path": "m", "dataset_mixture": mixture, "max_length": 512})
    assert "test_split_size" in {each.written for each in found.outcomes} and "val_set_size: 0.1" in found.text


def test_a_negative_batch_is_left_to_the_user(tmp_path: Path) -> None:
    outcomes = imported(tmp_path, {**AXOLOTL, "micro_batch_size": 1, "batch_size": -1})[0].outcomes
    assert [each.fate for each in outcomes if each.written == "batch_size"] == ["undecided"]


def tables() -> dict[str, list[dict[str, str]]]:
    """By key that a row has a fate for, and that no other row reads: what the tools' tables say of it."""
    found: dict[str, list[dict[str, str]]] = {}
    for tool in CONFIGS:
        for row in table_of(tool) if tool != "torchtune" else ():
            found.setdefault(row["key"], []).append(row)
    return {key: rows for key, rows in found.items() if foreign_key(*split(key)) is not None}


def split(key: str) -> tuple[str, str]:
    section, _, name = key.rpartition(".")
    return section, name


def fate(key: str, value: Plain) -> str:
    return fate_of(*split(key), marked(value, Where(layer=0, line=1, column=1, origin="c.yaml")))


def test_what_a_key_is_by_default_changes_nothing() -> None:
    """In every tool that has it: written or not, there is no difference."""
    checked = 0
    for key, rows in tables().items():
        defaults = {row["default"] for row in rows}
        try:
            value = ast.literal_eval(*defaults)
        except (SyntaxError, TypeError, ValueError):  # computed, or the tools differ
            continue
        if foreign_key(*split(key)).fate in ("undecided", "impossible"):  # type: ignore[union-attr]
            assert fate(key, list(value) if isinstance(value, tuple) else value) == "ignored", (key, value)
            checked += 1
    assert checked > 200


def test_zero_of_a_number_is_off_only_where_a_table_says_so() -> None:
    """`0` and `0.0` mean the same: nothing where it is the default or turns the key off, and a number elsewhere."""
    checked = 0
    for key, rows in tables().items():
        row = foreign_key(*split(key))
        is_number = all(re.fullmatch(r"-?[\d.]+", each["example"]) for each in rows)
        if row is None or row.fate not in ("undecided", "impossible") or not is_number or 0 in row.harmless:
            continue
        is_off = all(each["zero"].startswith("off") or each["default"] in ("0", "0.0") for each in rows)
        assert fate(key, 0) == fate(key, 0.0) == ("ignored" if is_off else row.fate), key
        checked += 1
    assert checked > 50


def test_zero_of_a_switch_is_false() -> None:
    assert fate("use_galore", 0) == fate("use_galore", False) == "ignored" and fate("use_galore", 1) == "impossible"
    assert fate("enable_thinking", 0) == fate("enable_thinking", False) == "undecided"
    assert fate("enable_thinking", 1) == "ignored" and fate("vllm_tensor_parallel_size", True) == "impossible"
    assert fate("revision", 0.0) == "undecided"  # a number where a text belongs


def test_no_key_has_two_fates() -> None:
    rows = {id(row): row for row in LISTED.values()}.values()
    names = [name for row in rows for name in row.theirs.split()]
    assert len(names) == len(set(names)) == len(LISTED)
