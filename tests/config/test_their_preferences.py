"""Configs of preference tuning of other trainers become ours, or there is an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput
from tests.config.config_loading import imported

AXOLOTL = {
    "base_model": "org/name", "sequence_len": 512, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
    "val_set_size": 0.0, "dataset_prepared_path": None, "optimizer": "adamw_torch", "learning_rate": 1e-5,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "org/name", "stage": "dpo", "finetuning_type": "full", "dataset": "rows.jsonl",
    "cutoff_len": 512, "template": "llama3", "per_device_train_batch_size": 2, "learning_rate": 5e-6,
}  # fmt: skip
TRL = {
    "model_name_or_path": "org/name", "dataset_name": "org/pairs", "max_length": 512, "beta": 0.01,
    "per_device_train_batch_size": 2, "max_prompt_length": 256,
}  # fmt: skip


def rejection(tmp_path: Path, content: dict[str, object]) -> str:
    with pytest.raises(BadInput) as caught:
        imported(tmp_path, content)
    return f"{caught.value.message} | {caught.value.hint}"


def axolotl(kind: object, **more: object) -> dict[str, object]:
    return {**AXOLOTL, "datasets": [{"path": "rows.jsonl", "type": kind}], **more}


CHATS = axolotl("chat_template")
SIMPO = {"rl": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0}


@pytest.mark.parametrize(
    ("kind", "columns", "template"),
    [
        ("chatml.intel", {"field_prompt": "question", "field_system": "system"}, "chatml"),
        ("llama3.icr", {"field_prompt": "input"}, "llama3"),
        ("chatml.argilla", {"field_prompt": "instruction", "field_chosen": "chosen_response"}, "chatml"),
        ("llama3.ultra", {"field_prompt": "prompt", "field_chosen": "chosen"}, "llama3"),
        ("chat_template.default", {"field_messages": "messages", "field_rejected": "rejected"}, None),
        ("chat_template.argilla", {"field_chosen": "chosen"}, None),
    ],
)
def test_axolotls_types_name_a_template_and_columns(
    tmp_path: Path, kind: str, columns: dict[str, str], template: str | None
) -> None:
    _, config = imported(
        tmp_path, axolotl(kind, rl="dpo", rl_beta=0.3, dpo_use_weighting=False, dpo_label_smoothing=0.0)
    )
    [found] = config.datasets
    assert (config.rl, config.rl_beta, config.chat_template, found.type) == ("dpo", 0.3, template, "chat_template")
    assert {key: getattr(found, key) for key in columns} == columns
    assert config.excess_length_strategy == "drop" and found.roles_to_train is None


def test_axolotls_own_columns(tmp_path: Path) -> None:
    kind = {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad", "prompt_format": "{prompt}"}
    [found] = imported(tmp_path, axolotl(kind, rl="ipo"))[1].datasets
    assert (found.type, found.field_prompt) == ("completion", "q")
    assert (found.field_chosen, found.field_rejected) == ("good", "bad")
    [same] = imported(tmp_path, axolotl({**kind, "field_system": "sys"}, rl="ipo"))[1].datasets
    assert same == found, "no text has the system prompt there"
    wrong = rejection(tmp_path, axolotl({**kind, "prompt_format": "Q: {prompt}"}, rl="ipo"))
    assert "`prompt_format` adds words" in wrong


@pytest.mark.parametrize(
    ("theirs", "keys", "wanted"),
    [
        (CHATS, {"rl": "orpo", "orpo_alpha": 0.2}, {"rl": "orpo", "rl_beta": 0.2}),
        (CHATS, SIMPO, SIMPO),
        (CHATS, {"rl": "kto", "kto_desirable_weight": 0.2}, {"rl": "kto", "kto_desirable_weight": 0.2}),
        (CHATS, {"rl": "dpo", "dpo_loss_type": ["ipo"]}, {"rl": "ipo"}),
        (CHATS, {"rl": "dpo", "dpo_loss_type": ["sigmoid"], "dpo_padding_free": True}, {"rl": "dpo"}),
        (CHATS, {"rl": None}, {"rl": None}),
        (FACTORY, {"pref_beta": 0.2, "pref_loss": "sigmoid", "pref_ftx": 0.0}, {"rl": "dpo", "rl_beta": 0.2}),
        (FACTORY, {}, {"rl": "dpo", "rl_beta": 0.1}),
        (FACTORY, {"pref_loss": "simpo", "simpo_gamma": 0.7}, {"rl": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7}),
        (FACTORY, {"pref_loss": "ipo"}, {"rl": "ipo"}),
        (FACTORY, {"stage": "kto", "kto_rejected_weight": 2.0}, {"rl": "kto", "kto_undesirable_weight": 2.0}),
        (FACTORY, {"stage": "sft", "pref_loss": "sigmoid"}, {"rl": None}),
        (TRL, {"rl": "dpo"}, {"rl": "dpo", "rl_beta": 0.01, "learning_rate": 1e-6}),
        (TRL, {"loss_type": "ipo", "precompute_ref_log_probs": True}, {"rl": "ipo", "rl_beta": 0.01}),
        (TRL, {"loss_type": ["sigmoid"], "learning_rate": 5e-7}, {"rl": "dpo", "learning_rate": 5e-7}),
        (TRL, {"rl": "kto", "desirable_weight": 1.5}, {"rl": "kto", "kto_desirable_weight": 1.5, "shuffle": False}),
        (TRL, {"rl": "kto", "train_sampling_strategy": "random"}, {"rl": "kto", "shuffle": True}),
        (TRL, {"rl": "dpo", "train_sampling_strategy": "sequential"}, {"rl": "dpo", "shuffle": False}),
        (TRL, {"rl": "dpo", "train_sampling_strategy": "group_by_length"}, {"rl": "dpo", "shuffle": True}),
        (TRL, {"loss_type": "simpo", "cpo_alpha": 0.5}, {"rl": "simpo", "cpo_alpha": 0.5}),
        (TRL, {"rl": "dpo", "disable_dropout": True}, {"rl": "dpo", "disable_dropout": True}),
        (TRL, {"rl": "dpo", "disable_dropout": False}, {"rl": "dpo", "disable_dropout": False}),
        (
            TRL,
            {"rl": "dpo", "use_peft": True, "lora_target_modules": "all-linear"},
            {"rl": "dpo", "lora_dropout": 0.05, "disable_dropout": True},
        ),
    ],
)
def test_methods_and_their_settings(
    tmp_path: Path, theirs: dict[str, object], keys: dict[str, object], wanted: dict[str, object]
) -> None:
    _, config = imported(tmp_path, {**theirs, **keys})
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.sequence_len == 512


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TRL, "no key names the method | write it into the config: `rl: dpo`"),
        ({**TRL, "rl": "dpo", "loss_type": "hinge"}, "`loss_type: 'hinge'` is another loss than that of `rl: dpo`"),
        ({**TRL, "rl": "dpo", "label_smoothing": 0.1}, "assumes that some preferences are wrong"),
        (
            {**TRL, "loss_type": "sigmoid", "cpo_alpha": 1.0},
            "`cpo_alpha` belongs to TRL's CPO, which with `sigmoid` as",
        ),
        (
            {**TRL, "loss_type": "ipo", "simpo_gamma": 1.0},
            "`simpo_gamma` belongs to TRL's CPO, which with `ipo` as its",
        ),
        ({**TRL, "cpo_alpha": 1.0}, "`cpo_alpha` belongs to TRL's CPO, which with its default as its loss has no ref"),
        (
            {**TRL, "rl": "dpo", "ref_model": "org/other"},
            "Ratel's reference model is the model before step 1 | remove it, if",
        ),
        ({**TRL, "rl": "dpo", "reference_free": True}, "does not have this preference loss | remove it; `rl`"),
        ({**FACTORY, "dpo_label_smoothing": 0.1}, "does not have this preference loss | remove it; `rl`"),
        ({**FACTORY, "pref_loss": "orpo"}, "the cross-entropy of answers only"),
        ({**FACTORY, "pref_loss": "hinge"}, "`pref_loss: hinge` is another loss"),
        ({**FACTORY, "pref_ftx": 0.5}, "`pref_ftx` adds"),
        ({**FACTORY, "stage": "rm"}, "`stage` is not a key"),
        (axolotl("chat_template", rl="dpo", dpo_use_weighting=True), "`dpo_use_weighting` is not a key"),
        (axolotl("chat_template", rl="dpo", dpo_loss_type=["aot"]), "`dpo_loss_type: "),
        (axolotl("chat_template", rl="dpo", rpo_alpha=1.0), "`rpo_alpha` is not a key"),
        (axolotl("chat_template", rl="grpo"), "`rl` must be"),
    ],
)
def test_what_is_another_method_is_an_error(tmp_path: Path, content: dict[str, object], words: str) -> None:
    assert words in rejection(tmp_path, content)


def test_sets_of_dataset_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    info = {
        "pairs": {
            "file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
        },
        "alpaca": {
            "file_name": "alpaca.json", "ranking": True,
            "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
        },
        "verdicts": {
            "file_name": "kto.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        },
        "answers": {"file_name": "answers.json"},
    }  # fmt: skip
    Path("data/dataset_info.json").write_text(json.dumps(info))
    pairs, alpaca = imported(tmp_path, {**FACTORY, "dataset": "pairs,alpaca"})[1].datasets
    assert (pairs.field_messages, pairs.field_chosen, pairs.field_rejected) == ("conversations", "good", "bad")
    assert (alpaca.field_instruction, alpaca.field_input, alpaca.type) == ("instruction", "input", "chat_template")
    [verdicts] = imported(tmp_path, {**FACTORY, "stage": "kto", "dataset": "verdicts"})[1].datasets
    assert (verdicts.field_messages, verdicts.field_label) == ("messages", "label")
    for stage, name, words in (
        ("dpo", "answers", "it is no preference data"),
        ("dpo", "verdicts", "which needs `rl: kto`"),
        ("kto", "answers", "its answers are not marked good or bad"),
        ("kto", "pairs", "which needs `rl: dpo`"),
        ("sft", "pairs", "which needs `rl: dpo`"),
    ):
        assert words in rejection(tmp_path, {**FACTORY, "stage": stage, "dataset": name})
