"""Configs of preference tuning that LLaMA-Factory, TRL's recipes and axolotl ship train what their tools would: three
steps of each, with a tiny model and tiny data in place of its own, against TRL with the meaning that stands here.

Facts only: keys and values of public examples, in our own layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratel_cli.config.importing import import_config
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import dump, load_config, to_yaml
from ratel_cli.config.yaml.yaml_marks import Plain
from tests.e2e.preferences import assert_same_training, chats, pairs, verdicts, write
from tests.e2e.runs import Config, works
from tests.trl_oracle import Recipe, tune

FACTORY: dict[str, Plain] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "trust_remote_code": True, "do_train": True,
    "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "pref_beta": 0.1, "template": "llama3",
    "cutoff_len": 2048, "max_samples": 1000, "overwrite_cache": True, "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4, "logging_steps": 10, "save_steps": 500, "plot_loss": True,
    "overwrite_output_dir": True, "save_only_model": False, "report_to": "none", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 5.0e-6, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 180000000, "resume_from_checkpoint": None,
}  # fmt: skip
HANDBOOK: dict[str, Plain] = {
    "torch_dtype": None, "dataset_splits": ["train_prefs", "test_prefs"], "preprocessing_num_workers": 12,
    "bf16": True, "do_eval": True, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "log_level": "info", "logging_steps": 10,
    "optim": "adamw_torch", "push_to_hub": True, "seed": 42, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine",
}  # fmt: skip
INTEL: dict[str, Plain] = {
    "base_model": "mistralai/Mistral-7B-v0.1", "load_in_8bit": False, "load_in_4bit": False, "rl": "dpo",
    "datasets": [{"path": "Intel/orca_dpo_pairs", "split": "train", "type": "chatml.intel"}],
    "dataset_prepared_path": "last_run_prepared", "val_set_size": 0.0, "sequence_len": 2048, "sample_packing": False,
    "pad_to_sequence_len": False, "gradient_accumulation_steps": 4, "micro_batch_size": 2, "num_epochs": 1,
    "optimizer": "adamw_torch", "lr_scheduler": "cosine", "learning_rate": 5e-6, "bf16": True, "tf32": False,
    "gradient_checkpointing": True, "flash_attention": True, "warmup_steps": 10, "weight_decay": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the tool trains with such a config."""

    method: str
    beta: float
    lora: tuple[tuple[str, object], ...] | None = None
    options: tuple[tuple[str, object], ...] = ()


LORA = (("r", 8), ("lora_alpha", 16), ("target_modules", "all-linear"), ("task_type", "CAUSAL_LM"))
PORTED: dict[str, tuple[dict[str, Plain], Meaning]] = {
    "LLaMA-Factory: llama3_lora_dpo": (
        {**FACTORY, "stage": "dpo", "pref_loss": "sigmoid", "dataset": "dpo_en_demo"},
        Meaning(method="dpo", beta=0.1, lora=LORA),
    ),
    "LLaMA-Factory: llama3_lora_kto": (
        {**FACTORY, "stage": "kto", "dataset": "kto_en_demo"},
        Meaning(method="kto", beta=0.1, lora=LORA),
    ),
    "LLaMA-Factory: simpo": (
        {**FACTORY, "stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.5, "dataset": "dpo_en_demo"},
        Meaning(method="simpo", beta=0.1, lora=LORA, options=(("simpo_gamma", 0.5), ("cpo_alpha", 0.0))),
    ),
    "TRL: handbook/zephyr-7b-beta-dpo": (
        {
            **HANDBOOK, "model_name_or_path": "alignment-handbook/zephyr-7b-sft-full", "rl": "dpo", "beta": 0.01,
            "dataset_mixer": {"HuggingFaceH4/ultrafeedback_binarized": 1.0}, "learning_rate": 5.0e-7,
            "max_length": 1024, "max_prompt_length": 512, "num_train_epochs": 1, "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
        },
        Meaning(method="dpo", beta=0.01),
    ),
    "TRL: handbook/zephyr-141b-orpo": (
        {
            **HANDBOOK, "model_name_or_path": "mistral-community/Mixtral-8x22B-v0.1", "rl": "orpo", "beta": 0.05,
            "dataset_mixer": {"argilla/distilabel-capybara-dpo-7k-binarized": 1.0}, "learning_rate": 5.0e-6,
            "max_length": 2048, "max_prompt_length": 1792, "num_train_epochs": 3, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 100,
        },
        Meaning(method="orpo", beta=0.05),
    ),
    "TRL: dpo script": (
        {
            "model_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "dataset_name": "trl-lib/ultrafeedback_binarized",
            "loss_type": "sigmoid", "beta": 0.1, "learning_rate": 5.0e-6, "num_train_epochs": 1, "use_peft": True,
            "lora_r": 32, "lora_alpha": 16, "lora_target_modules": "all-linear", "gradient_checkpointing": True,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "eval_strategy": "steps",
            "eval_steps": 50, "output_dir": "Qwen2-0.5B-DPO",
        },
        Meaning(
            method="dpo",
            beta=0.1,
            lora=(("r", 32), ("lora_alpha", 16), ("target_modules", "all-linear"), ("task_type", "CAUSAL_LM")),
        ),
    ),
    "axolotl: rlhf/ipo": ({**INTEL, "rl": "ipo", "rl_beta": 0.2}, Meaning(method="ipo", beta=0.2)),
    "axolotl: rlhf/orca_dpo_pairs": (INTEL, Meaning(method="dpo", beta=0.1)),
}  # fmt: skip
OVERRIDES = (
    "sequence_len=64", "micro_batch_size=2", "gradient_accumulation_steps=2", "max_steps=3", "shuffle=false",
    "dtype=float32", "device=cpu", "storage.engine=threads", "limits.host_memory=20GiB", "report_to=none",
    "lr_scheduler=constant", "warmup_steps=0", "warmup_ratio=0", "weight_decay=0.1", "max_grad_norm=1.0",
    "learning_rate=5e-5", "output_dir=out", "chat_template=null", "lr_scheduler_kwargs=null", "save_steps=null",
    "eval_steps=null", "hub_model_id=null",
)  # fmt: skip
"""How it is trained, which other tests judge; a method's own settings stay."""


@pytest.mark.full
@pytest.mark.parametrize("name", PORTED)
def test_three_steps_of_a_config_are_those_of_its_tool(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    content, meaning = PORTED[name]
    rows = verdicts() if meaning.method == "kto" else chats() if "zephyr" in name else pairs()
    named = [{"question": row["prompt"], **row} for row in rows] if "axolotl" in name else rows
    path = write(tmp_path / "rows.jsonl", named)
    Path("theirs.yaml").write_text(dump(json.loads(json.dumps(content))))
    imported = import_config(Path("theirs.yaml"))
    assert imported.tool == name.partition(":")[0]
    Path("ours.yaml").write_text(imported.text)
    config = tiny(load_config(Path("ours.yaml"), [f"base_model={base}", *OVERRIDES]).config, path)
    Path("run.yaml").write_text(to_yaml(config))
    works("finetune", Path("run.yaml"))
    beta = (("beta", meaning.beta),)
    recipe = Recipe(
        method=meaning.method, num_steps=3, micro_batch_size=2, accumulation=2, learning_rate=5e-5, max_length=64,
        options=(*beta, *meaning.options), lora=meaning.lora,
    )  # fmt: skip
    assert_same_training(Config("run.yaml"), tune(base, _as_trl_reads(config, rows), recipe))


def tiny(config: RunConfig, path: Path) -> RunConfig:
    """The config with this file in place of its data, without dropout."""
    [dataset] = config.datasets
    kept = dataset.model_copy(update={"path": str(path), "split": "train", "name": None})
    return config.model_copy(update={"datasets": (kept,), "test_datasets": (), "lora_dropout": 0.0, "val_set_size": 0})


def _as_trl_reads(config: RunConfig, rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Texts that the config makes turns of."""
    if config.datasets[0].type != "chat_template" or not isinstance(rows[0]["prompt"], str):
        return rows
    return [
        {
            key: [{"role": "user" if key == "prompt" else "assistant", "content": value}]
            if isinstance(value, str)
            else value
            for key, value in row.items()
        }
        for row in rows
    ]
