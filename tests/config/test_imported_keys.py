"""What `ratel import` makes of keys that mean more than it seems: defaults that no key says, `null`, lists, and keys
that change what is trained though they look like settings of speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from transformers import TrainingArguments

from ratel_cli.config.importing import Imported
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.errors import BadInput
from tests.config.config_loading import MINIMAL, Load, imported

AXOLOTL = "base_model: m\ndatasets: [{path: d.jsonl, type: chat_template}]\nsequence_len: 64\nmicro_batch_size: 1\n"
FACTORY = "model_name_or_path: m\nstage: sft\ndataset: d.jsonl\ntemplate: llama3\ncutoff_len: 64\n"
FULL = FACTORY + "finetuning_type: full\n"
TRL = "model_name_or_path: m\ndataset_name: d.jsonl\nmax_length: 64\n"
NEWER = "model: m\nmodel_class: llm\ntrain_dataset: d.jsonl\ncutoff_len: 64\n"
Take = Callable[[str], tuple[Imported, RunConfig]]


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Take:
    """Import a text; the outcome, and the config that was written."""
    monkeypatch.chdir(tmp_path)
    return partial(imported, tmp_path)


def fate(found: Imported, key: str) -> str:
    [outcome] = [each for each in found.outcomes if each.written == key]
    return outcome.fate


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (FULL + "mix_strategy: interleave_under\n", "mix_strategy"),
        (FULL + "interleave_probs: '0.5,0.5'\n", "interleave_probs"),
        (FULL + "upcast_layernorm: true\n", "upcast_layernorm"),
        (FULL + "ignore_pad_token_for_loss: false\n", "ignore_pad_token_for_loss"),
        (FULL + "tool_format: qwen\n", "tool_format"),
        (TRL + "dataloader_drop_last: true\n", "dataloader_drop_last"),
        (TRL + "packing: true\npacking_strategy: wrapped\n", "packing_strategy"),
        (TRL + "train_sampling_strategy: group_by_length\n", "train_sampling_strategy"),
        (TRL + "dataset_kwargs: {skip_prepare_dataset: true}\n", "dataset_kwargs"),
        (TRL.replace("64", "null"), "max_length"),
        (AXOLOTL + "group_by_length: true\n", "group_by_length"),
        (AXOLOTL + "sample_packing_sequentially: true\n", "sample_packing_sequentially"),
        (AXOLOTL + "pretrain_multipack_attn: false\n", "pretrain_multipack_attn"),
        (AXOLOTL + "dataset_shard_num: 4\n", "dataset_shard_num"),
        (AXOLOTL.replace("chat_template", "alpaca_chat"), "datasets.type"),
        (AXOLOTL.replace("{path", "{split_thinking: true, path"), "datasets.split_thinking"),
        (AXOLOTL.replace("d.jsonl", "org/set, data_files: [a.jsonl, b.jsonl]"), "datasets.data_files"),
    ],
)
def test_what_changes_the_training_is_left_to_the_user(take: Take, text: str, key: str) -> None:
    found, _ = take(text)
    assert {each.fate for each in found.outcomes if each.written == key} == {"undecided"}


@pytest.mark.parametrize(
    "line",
    [
        "mix_strategy: concat",
        "ignore_pad_token_for_loss: true",
        "packing_strategy: bfd",
        "pretrain_multipack_attn: true",
        "train_sampling_strategy:",
        "lora_task_type: CAUSAL_LM",
        "group_by_length: 0",
    ],
)
def test_the_default_of_such_a_key_changes_nothing(load: Load, line: str) -> None:
    [notice] = load(MINIMAL + line + "\n").notices
    assert notice == f"run.yaml:3:1: `{line.partition(':')[0]}` has no effect here"


@pytest.mark.parametrize("line", ["", "finetuning_type:\n", "lora_rank: 8\n"])
def test_llama_factory_trains_an_adapter_by_default(take: Take, line: str) -> None:
    found, config = take(FACTORY + line)
    assert (config.adapter, config.lora_r, config.lora_alpha, config.lora_dropout) == ("lora", 8, 16, 0.0)
    assert config.lora_target_modules == ()
    assert "adapter: lora  # the default of LLaMA-Factory; " in found.text
    assert all(each.written for each in found.outcomes)


def test_a_run_of_its_config_says_so(load: Load) -> None:
    said = [each for each in load(FACTORY).notices if "trains a LoRA adapter" in each]
    assert said == [
        (
            "run.yaml:1:1: without `finetuning_type`, LLaMA-Factory trains a LoRA adapter, but Ratel trains every "
            "weight; for an adapter write `finetuning_type: lora`"
        )
    ]
    for other in (FULL, FACTORY + "adapter:\n", MINIMAL + "plot_loss: true\n"):
        assert not any("trains a LoRA adapter" in each for each in load(other).notices)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("peft_config: {name: lora}\n", (8, 16, 0.05, ())),
        ("peft_config: {name: lora, r: 4, lora_alpha: 2, lora_dropout: 0, target_modules: all}\n", (4, 2, 0.0, ())),
        ("peft_config: {name: lora, target_modules: [q_proj], use_rslora: true}\n", (8, 16, 0.05, ("q_proj",))),
    ],
)
def test_the_adapter_of_a_newer_config_of_llama_factory(
    take: Take, text: str, expected: tuple[int, int, float, tuple[str, ...]]
) -> None:
    found, config = take(NEWER + text)
    assert found.tool == "LLaMA-Factory v1"
    assert (config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_target_modules) == expected
    assert config.peft_use_rslora == ("rslora" in text)
    assert (config.lr_scheduler, config.num_warmup_steps(100), config.weight_decay) == ("constant", 0, 0.01)
    assert (config.num_epochs, config.learning_rate, config.micro_batch_size) == (3, 1e-4, 1)


def test_a_newer_config_of_llama_factory_trains_every_weight_by_default(take: Take) -> None:
    _, config = take(NEWER + "dist_config: {name: fsdp2}\nkernel_config: {name: auto}\nbatching_strategy: normal\n")
    assert config.adapter is None
    assert [each.path for each in config.datasets] == ["d.jsonl"]


def test_its_quantised_model(take: Take) -> None:
    lora = "peft_config: {name: lora}\nbf16: true\n"
    _, config = take(NEWER + lora + "quant_config: {name: bnb, quantization_bit: 4, compute_dtype: bfloat16}\n")
    assert (config.load_in_4bit, config.bnb_4bit_use_double_quant) == (True, True)


@pytest.mark.parametrize("nested", ["{name: freeze}", "{name: lorax, r: 4}", "lora"])
def test_another_part_of_the_weights_is_refused(take: Take, nested: str) -> None:
    with pytest.raises(BadInput, match="`peft_config` is not a key of Ratel: it trains a part of the weights"):
        take(NEWER + f"peft_config: {nested}\n")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (TRL + "loss_type: dft\n", {"use_dft_loss": True}),
        (AXOLOTL + "liger_use_token_scaling: true\n", {"use_dft_loss": True}),
        (TRL + "use_cpu: 1\n", {"device": "cpu"}),
        (TRL + "use_cpu: 0\n", {"device": "auto"}),
        (TRL + "bf16: 0\n", {"dtype": "float32"}),
        (TRL + "train_sampling_strategy: sequential\n", {"shuffle": False}),
        (TRL + "use_peft: 1\nlora_target_modules: [q_proj]\nlora_task_type: CAUSAL_LM\n", {"adapter": "lora"}),
        (
            AXOLOTL + "adapter: lora\nlora_target_modules: [q_proj]\npeft_layers_to_transform: [0, 1]\n",
            {"lora_layers_to_transform": (0, 1)},
        ),
        (AXOLOTL + "use_wandb: 1\n", {"report_to": ("wandb",)}),
    ],
)
def test_names_and_values_that_are_read(take: Take, text: str, values: dict[str, object]) -> None:
    _, config = take(text)
    assert {key: getattr(config, key) for key in values} == values


def test_the_system_prompt_of_llama_factory(take: Take) -> None:
    _, config = take(FULL + "default_system: Be brief.\n")
    assert [each.system_prompt for each in config.datasets] == ["Be brief."]


def test_a_set_of_several_files(take: Take) -> None:
    text = AXOLOTL.replace("path: d.jsonl", "path: json, ds_type: json, data_files: [a.jsonl, b.jsonl]")
    _, config = take(text)
    assert [(each.path, each.type) for each in config.datasets] == [
        ("a.jsonl", "chat_template"),
        ("b.jsonl", "chat_template"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRL + "rl: dpo\nbeta: 0.1\nloss_type: [sigmoid, sft]\nloss_weights: [1, 0.2]\n", "`loss_type: a list` is ano"),
        (TRL + "beta: 0.1\nloss_type: [sigmoid, sft]\n", "`beta` belongs to preference training, but no key"),
        (TRL + "num_generations: 8\n", "`num_generations` is not a key of Ratel: it belongs to reinforcement learning"),
        (TRL + "beta: 0.1\nreward_weights: [1.0]\n", "`reward_weights` is not a key of Ratel"),
        (AXOLOTL + "rl: grpo\n", "`rl` must be `dpo`"),
        (AXOLOTL + "trl: {num_generations: 4}\n", "`trl` is not a key of Ratel"),
        (FULL.replace("sft", "ppo"), "`stage` is not a key of Ratel: it belongs to reinforcement learning"),
        (
            TRL + "loss_weights: [1, 0.2]\n",
            "`loss_weights` is not a key of Ratel: Ratel does not have this preference loss",
        ),
        (TRL + "sync_ref_model: true\n", "`sync_ref_model` is not a key of Ratel: Ratel's reference model is"),
        (
            AXOLOTL + "adapter: lora\npeft_init_lora_weights: pissa\n",
            "`peft_init_lora_weights` must be true, false or `gaussian`, not 'pissa'",
        ),
    ],
)
def test_what_is_refused_by_name(take: Take, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        take(text)
    errors = [str(caught.value), *map(str, getattr(caught.value, "others", ()))]
    assert any(message in error for error in errors), errors


@pytest.mark.parametrize("value", ["0.0", "0", "0.3"])
def test_zero_is_a_number(take: Take, value: str) -> None:
    """Of a loss that is off where its key is missing."""
    with pytest.raises(BadInput, match="does not have this preference loss"):
        take(f"model_name_or_path: m\ndataset_name: d\nbeta: 0.1\nloss_type: sigmoid\nld_alpha: {value}\n")


def test_a_most_of_the_warm_up_is_for_its_ratio_alone(load: Load) -> None:
    keys = "base_model: m\ndatasets: d\nmax_warmup_steps: 100\n"
    for given, steps in (("warmup_ratio: 0.2", 100), ("warmup_steps: 0.2", 200), ("warmup_steps: 150", 150)):
        assert load(f"{keys}{given}\n").config.num_warmup_steps(1000) == steps


def test_training_on_rewards_has_its_way_named(take: Take) -> None:
    for text in (TRL + "num_generations: 8\n", AXOLOTL + "rl: grpo\n", FULL.replace("sft", "rm")):
        with pytest.raises(BadInput) as caught:
            take(text)
        hint = caught.value.hint
        assert hint is not None and hint.endswith("methods that generate answers during training.")


def warmup_of_axolotl(ratio: float | None, steps: int | None, total: int) -> int:
    """The number of steps that its `core/builders/base.py` gives to transformers."""
    if steps is not None:
        number = steps
    elif ratio is not None:
        number = max(int(ratio * total), 0)
    else:
        number = min(int(0.03 * total), 100)
    return 2 if number == 1 else number


@pytest.mark.parametrize(
    ("line", "ratio", "steps"),
    [
        ("", None, None),
        ("warmup_ratio: 0.1\n", 0.1, None),
        ("warmup_ratio: 0.03\n", 0.03, None),
        ("warmup_ratio: 0\n", 0.0, None),
        ("warmup_steps: 1\n", None, 1),
        ("warmup_steps: 0\n", None, 0),
        ("warmup_steps: 150\n", None, 150),
    ],
)
def test_the_warm_up_of_axolotl(take: Take, line: str, ratio: float | None, steps: int | None) -> None:
    _, config = take(AXOLOTL + line)
    for total in (1, 9, 10, 19, 25, 33, 34, 50, 67, 99, 100, 1000, 3333, 3400, 12345):
        assert config.num_warmup_steps(total) == warmup_of_axolotl(ratio, steps, total), total


@pytest.mark.parametrize("line", ["warmup_steps: 3", "warmup_steps: 0.1", "warmup_steps: 0.03", ""])
@pytest.mark.parametrize("text", [FULL, TRL])
def test_the_warm_up_of_trainer(take: Take, text: str, line: str) -> None:
    _, config = take(text + line + "\n")
    value = float(line.partition(": ")[2] or 0)
    theirs = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", warmup_steps=value)
    for total in (1, 9, 25, 33, 50, 100, 1000, 12345):
        assert config.num_warmup_steps(total) == theirs.get_warmup_steps(total), total


def test_half_precision_of_axolotl_may_be_empty(take: Take) -> None:
    """There the default is `auto`, and an empty value is off."""
    for line, dtype in (("bf16:\n", "float32"), ("bf16:\nfp16: true\n", "float16"), ("", "bfloat16")):
        assert take(AXOLOTL + line)[1].dtype == dtype


def test_a_length_of_generated_text_is_none_of_samples(take: Take) -> None:
    found, config = take(FULL + "max_length: 7\ndisable_shuffling: true\n")
    assert (config.sequence_len, config.shuffle) == (64, False)
    assert fate(found, "max_length") == "noted"


TUNE = """\
model: {_component_: torchtune.models.NAME.NAME_7b}
tokenizer: {_component_: torchtune.models.NAME.NAME_tokenizer, path: t, max_seq_len: 64TEMPLATE}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m}
dataset: {_component_: torchtune.datasets.alpaca_dataset}
"""
LORA = "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
PRETRAINING = "base_model: m\npretraining_dataset: {path: c4}\nsequence_len: 64\nmicro_batch_size: 1\n"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (FULL, "cutoff_len", "truncates prompt and answer in proportion"),
        (FULL.replace("cutoff_len: 64\n", ""), "sequence_len", "truncates prompt and answer in proportion"),
        (
            TUNE.replace("NAME", "gemma").replace("TEMPLATE", "").replace("alpaca_dataset", "wikitext_dataset"),
            "tokenizer.max_seq_len",
            "",
        ),
        (FACTORY + "finetuning_type: lora\n", "finetuning_type", "stacked experts"),
        (FACTORY, "adapter", "stacked experts"),
        (FACTORY + "finetuning_type: lora\nlora_target: q_proj\n", "finetuning_type", ""),
        (AXOLOTL + LORA, "adapter", "stacked experts"),
        (AXOLOTL + LORA.replace("linear: true", "modules: [q_proj]"), "adapter", ""),
        (PRETRAINING, "pretraining_dataset", "overlapping windows"),
        (
            TUNE.replace("NAME", "gemma").replace("TEMPLATE", ""),
            "tokenizer.max_seq_len",
            "truncated samples with an EOS token",
        ),
    ],
)
def test_what_a_key_does_otherwise_is_said(take: Take, text: str, key: str, words: str) -> None:
    found, _ = take(text)
    [outcome] = [each for each in found.outcomes if each.written == key]
    assert words in outcome.reason if words else not outcome.reason
    assert words in found.text


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("llama2", "", "undecided"),
        ("mistral", ", prompt_template: torchtune.models.mistral.MistralChatTemplate", "undecided"),
        ("mistral", ", prompt_template: null", "ignored"),
        ("llama3", ", prompt_template: null", "undecided"),
        ("llama4", "", "undecided"),
        ("gemma", "", "ignored"),
    ],
)
def test_a_tokenizer_of_torchtune_that_writes_turns(take: Take, name: str, template: str, expected: str) -> None:
    found, _ = take(TUNE.replace("NAME", name).replace("TEMPLATE", template))
    assert fate(found, "tokenizer._component_") == expected
