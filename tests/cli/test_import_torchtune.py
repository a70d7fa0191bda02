"""`ratel import` of torchtune's configs: what becomes of their sets, their steps and their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import load_config
from ratel_cli.errors import BadInput
from tests.cli.test_import import read, write

TORCHTUNE = """\
output_dir: out
model: {_component_: torchtune.models.llama3.llama3_8b}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: base
  output_dir: "${output_dir}"
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, lr: 1e-5, betas: [0.8, 0.95]}
lr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup, num_warmup_steps: 7}
batch_size: 4
epochs: 2
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_torchtune() -> None:
    config = read(import_config(write(TORCHTUNE)))
    assert (config.base_model, config.output_dir, config.micro_batch_size, config.num_epochs) == (
        "base",
        Path("out"),
        4,
        2,
    )
    assert (config.learning_rate, config.adam_beta1, config.adam_beta2, config.weight_decay) == (1e-5, 0.8, 0.95, 0.01)
    assert (config.lr_scheduler, config.warmup_steps, config.max_grad_norm) == ("cosine", 7, None)
    assert (config.datasets[0].path, config.datasets[0].type) == ("tatsu-lab/alpaca", "alpaca")
    assert (config.sample_packing, config.train_on_inputs) == (True, True)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("llama3.llama3_8b", "llama3.lora_llama3_8b", "`torchtune.models.llama3.lora_llama3_8b` trains an adapter"),
        (
            "alpaca_dataset",
            "stack_exchange_paired_dataset",
            "`stack_exchange_paired_dataset` is no data for supervised fine-tuning",
        ),
        ("torch.optim.AdamW", "torch.optim.Adagrad", "`optimizer._component_` must be `adamw`, `adamw_8bit`"),
        ("batch_size: 4", "loss: {_component_: a.DPOLoss}", "`a.DPOLoss` belongs to preference training"),
        ("batch_size: 4", "quantizer: {_component_: a.Int8Quantizer}", "`a.Int8Quantizer` quantises the model"),
    ],
)
def test_what_is_impossible_in_torchtune(old: str, new: str, error: str) -> None:
    with pytest.raises(BadInput, match=r"theirs\.yaml") as caught:
        import_config(write(TORCHTUNE.replace(old, new)))
    assert error in caught.value.message


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("torch.optim.SGD", ("sgd", 0.0, 0.999, None)),
        ("torch.optim.SGD, momentum: 0.9", ("sgd", 0.0, 0.999, (0.9, False))),
        ("torch.optim.SGD, momentum: 0.9, nesterov: true, weight_decay: 0.5", ("sgd", 0.5, 0.999, (0.9, True))),
        ("torch.optim.AdamW", ("adamw", 0.01, 0.999, None)),
        ("bitsandbytes.optim.PagedAdamW", ("adamw", 0.01, 0.999, None)),
        ("bitsandbytes.optim.PagedAdamW, optim_bits: 8, min_8bit_size: 4096", ("adamw_8bit", 0.01, 0.999, None)),
        ("bitsandbytes.optim.PagedAdamW8bit, block_wise: true", ("adamw_8bit", 0.01, 0.999, None)),
        ("torchao.optim.AdamW4bit", ("adamw", 0.01, 0.999, None)),
        ("bitsandbytes.optim.PagedLion8bit", ("lion", 0.0, 0.99, None)),
    ],
)
def test_optimizers_of_torchtune(optimizer: str, expected: tuple[object, ...]) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW, lr: 1e-5, betas: [0.8, 0.95]", f"{optimizer}, lr: 1e-5")
    imported = import_config(write(text))
    assert not [each for each in imported.outcomes if each.fate == "undecided"]
    config = read(imported)
    options = None if config.optim_args is None else (config.optim_args.momentum, bool(config.optim_args.nesterov))
    assert (config.optimizer, config.weight_decay, config.adam_beta2, options) == expected
    row = next(each for each in imported.outcomes if each.written == "optimizer._component_")
    assert ("moments in fp32" in row.ours) is (optimizer.endswith("4bit") or "Lion8bit" in optimizer)


@pytest.mark.parametrize(("value", "expected"), [("true", "stochastic"), ("false", "fp32")])
def test_stochastic_rounding(value: str, expected: str) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW", f"torchao.optim.AdamW8bit, bf16_stochastic_round: {value}")
    imported = import_config(write(text))
    assert not [each for each in imported.outcomes if each.fate == "undecided"]
    config = read(imported)
    assert (config.optimizer, config.bf16_master) == ("adamw_8bit", expected)


@pytest.mark.parametrize("value", ["1", "'true'", "'${nothing}'"])
def test_stochastic_rounding_that_is_neither_on_nor_off_is_left_to_the_user(value: str) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW", f"torchao.optim.AdamW8bit, bf16_stochastic_round: {value}")
    [row] = [each for each in import_config(write(text)).outcomes if each.fate == "undecided"]
    assert row.written == "optimizer.bf16_stochastic_round"


@pytest.mark.parametrize("option", ["min_8bit_size: 1", "block_wise: false", "dampening: 0.5"])
def test_an_option_that_changes_an_optimizer_is_left_to_the_user(option: str) -> None:
    text = TORCHTUNE.replace("torch.optim.AdamW", f"bitsandbytes.optim.AdamW8bit, {option}")
    [row] = [each for each in import_config(write(text)).outcomes if each.fate == "undecided"]
    assert row.written == f"optimizer.{option.partition(':')[0]}"


SETS = {
    "instruct_dataset": (
        "source: json, data_files: q.json, column_map: {input: q, output: a}, new_system_prompt: Be kind.",
        {
            "path": "q.json",
            "type": "chat_template",
            "field_instruction": "q",
            "field_input": "q",
            "field_output": "a",
            "system_prompt": "Be kind.",
        },
    ),
    "instruct_dataset without a map": (
        "source: org/set, split: 'train[:5%]'",
        {
            "path": "org/set",
            "type": "chat_template",
            "field_instruction": "input",
            "field_input": "input",
            "field_output": "output",
            "split": "train[:5%]",
        },
    ),
    "chat_dataset": (
        "source: org/set, conversation_column: turns, conversation_style: openai, name: en",
        {"path": "org/set", "type": "chat_template", "field_messages": "turns", "name": "en"},
    ),
    "alpaca_dataset": (
        "column_map: {instruction: i, input: n, output: o}",
        {
            "path": "tatsu-lab/alpaca",
            "type": "alpaca",
            "field_instruction": "i",
            "field_input": "n",
            "field_output": "o",
        },
    ),
    "slimorca_dataset": (
        "packed: true",
        {"path": "Open-Orca/SlimOrca-Dedup", "type": "chat_template", "field_messages": "conversations"},
    ),
    "text_completion_dataset": (
        "source: text, data_files: a.txt, column: body, add_eos: true",
        {"path": "a.txt", "type": "completion", "field": "body"},
    ),
    "wikitext_dataset": (
        "subset: en",
        {
            "path": "EleutherAI/wikitext_document_level",
            "type": "completion",
            "field": "page",
            "name": "en",
        },
    ),
}


def with_set(text: str) -> Path:
    return write(TORCHTUNE.replace("{_component_: torchtune.datasets.alpaca_dataset, packed: true}", text))


def undecided(path: Path) -> dict[str, str]:
    return {each.written: each.reason for each in import_config(path).outcomes if each.fate == "undecided"}


@pytest.mark.parametrize("name", SETS)
def test_sets_of_torchtune(name: str) -> None:
    """Nothing of them is dropped: each argument becomes a key of ours."""
    arguments, expected = SETS[name]
    path = with_set(f"{{_component_: torchtune.datasets.{name.split(maxsplit=1)[0]}, {arguments}}}")
    imported = import_config(path)
    assert not [each for each in imported.outcomes if each.written.startswith("dataset.") and each.fate == "undecided"]
    config = read(imported)
    assert config.datasets[0].model_dump(exclude_unset=True) == expected
    assert config.train_on_inputs == (name == "alpaca_dataset")
    assert config.sample_packing == ("packed: true" in arguments)


def test_a_list_of_sets_of_torchtune() -> None:
    """Each is a dataset, of each of its files, with values that stand elsewhere."""
    one = "{_component_: a.chat_dataset, source: json, data_files: ['${output_dir}/a.json', b.json], packed: true}"
    path = with_set(f"[{one}, {{_component_: torchtune.datasets.instruct_dataset, source: org/set, packed: true}}]")
    assert undecided(path) == {}, "nothing of them is left out"
    rows = [each.written for each in import_config(path).outcomes]
    assert {f"dataset.{number}.packed" for number in (0, 1)} <= set(rows)
    found = read(import_config(path)).datasets
    assert [each.path for each in found] == ["out/a.json", "b.json", "org/set"]


def test_sets_for_evaluation_in_torchtune() -> None:
    text = "dataset_val: {_component_: a.alpaca_dataset, split: 'train[95%:]'}\nrun_val_every_n_steps: 7\n"
    config = read(import_config(write(TORCHTUNE + text)))
    assert [(each.path, each.split) for each in config.test_datasets] == [("tatsu-lab/alpaca", "train[95%:]")]
    assert config.eval_steps == 7


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("{_component_: mine.my_set, source: a, odd: 1}", "dataset._component_", "Ratel does not know this set"),
        ("{_component_: mine.my_set, source: a, odd: 1}", "dataset.odd", "Ratel has no such key of a dataset"),
        ("{_component_: a.chat_dataset, source: a, filter_fn: f}", "dataset.filter_fn", "Ratel has no such key of a"),
        ("{_component_: a.chat_dataset, source: a, masking_strategy: train_on_last}", "dataset.masking_strategy", "Ra"),
        ("{_component_: a.chat_dataset, source: org/a, data_files: b.json}", "dataset.data_files", "Ratel reads all"),
        (
            "[{_component_: a.alpaca_dataset}, {_component_: a.chat_dataset, source: a}]",
            "dataset.1._component_",
            "the sets differ in this",
        ),
        (
            "[{_component_: a.alpaca_dataset, packed: true}, {_component_: a.alpaca_dataset, packed: false}]",
            "dataset.1.packed",
            "the sets differ in this",
        ),
        ("{_component_: a.alpaca_dataset}\nmax_steps_per_epoch: 5", "max_steps_per_epoch", "torchtune ends each epoch"),
        ("{_component_: a.alpaca_dataset}\nodd: {key: 1}", "odd.key", "Ratel has no such key"),
        (
            "{_component_: a.alpaca_dataset}\ntokenizer: {_component_: a.llama3_tokenizer, max_seq_len: null}",
            "tokenizer.max_seq_len",
            "torchtune then truncates nothing",
        ),
        (
            "{_component_: a.alpaca_dataset}\ntokenizer: {_component_: a.llama3_tokenizer, prompt_template: x}",
            "tokenizer.prompt_template",
            "Ratel takes the tokenizer, and its chat template",
        ),
        (
            "{_component_: a.alpaca_dataset}\ntokenizer: {_component_: a.llama3_tokenizer}",
            "tokenizer._component_",
            "torchtune writes the Alpaca prompt as a turn",
        ),
    ],
)
def test_what_decides_the_training_is_not_dropped(text: str, key: str, reason: str) -> None:
    path = with_set(text)
    assert undecided(path)[key].startswith(reason)
    assert not [each for each in import_config(path).outcomes if each.written == key and each.fate == "ignored"]


def test_arguments_of_the_optimizer_and_the_model() -> None:
    """Those that change a number are left to the user."""
    text = TORCHTUNE.replace("lr: 1e-5,", "lr: 1e-5, fused: true, amsgrad: true, maximize: false,")
    text = text.replace("llama3.llama3_8b}", "llama3.llama3_8b, attn_dropout: 0.1}")
    outcomes = {each.written: each for each in import_config(write(text)).outcomes}
    fates = {key: outcomes[f"optimizer.{key}"].fate for key in ("fused", "amsgrad", "maximize", "betas")}
    assert fates == {"fused": "ignored", "amsgrad": "undecided", "maximize": "ignored", "betas": "translated"}
    assert outcomes["model.attn_dropout"].fate == "undecided"


def test_the_steps_of_an_epoch_in_torchtune() -> None:
    path = write(TORCHTUNE.replace("epochs: 2", "epochs: 1\nmax_steps_per_epoch: 10"))
    assert read(import_config(path)).max_steps == 10
    path = write(TORCHTUNE.replace("epochs: 2", "epochs: 3\nmax_steps_per_epoch: 10"))
    assert undecided(path)["max_steps_per_epoch"].endswith("set `max_steps: 30`")
    assert read(import_config(path)).max_steps is None


def test_the_turns_that_a_tokenizer_of_torchtune_writes() -> None:
    tokenizer = "tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: x, max_seq_len: 64}\n"
    for name, template in (("slimorca_dataset", "llama3"), ("wikitext_dataset", None)):
        text = TORCHTUNE.replace("alpaca_dataset", name) + tokenizer
        assert read(import_config(write(text))).chat_template == template


def test_finetune_says_what_to_do_with_a_config_of_torchtune() -> None:
    with pytest.raises(BadInput) as caught:
        load_config(write(TORCHTUNE))
    assert caught.value.message == "theirs.yaml:1:1: this is a config of torchtune"
    assert caught.value.hint == "translate it: `ratel import theirs.yaml -o run.yaml`"
