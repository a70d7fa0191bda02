"""Loading a config: what a text becomes, and the messages for files that cannot be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ratel_cli.config.aliases import SECTIONS
from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.config.yaml_marks import MAX_TEXT_BYTES
from ratel_cli.errors import BadInput
from tests.config.config_loading import MINIMAL, Complain, Load

OF_THE_INTERFACE = """
    base_model model_shape cost_model random_init datasets test_datasets streaming chat_template chat_template_jinja
    special_tokens train_on_inputs sequence_len sample_packing shuffle
    micro_batch_size gradient_accumulation_steps tokens_per_step num_epochs max_steps learning_rate lr_scheduler
    lr_scheduler_kwargs warmup_steps warmup_ratio optimizer adam_beta1 adam_beta2 adam_epsilon weight_decay
    max_grad_norm dtype gradient_dtype device attn_implementation activations head_chunk optimizer_overlap
    deterministic trace storage limits
    output_dir save_steps saves_per_epoch save_total_limit eval_steps evals_per_epoch val_set_size logging_steps
    report_to run_name project hub_model_id hub_private_repo seed
"""
"""The keys that users were promised, in this order. `tests/test_docs.py` checks that docs/config.md has them all."""


def test_the_keys_are_those_of_the_interface() -> None:
    assert list(SECTIONS[""].model_fields) == OF_THE_INTERFACE.split()


def test_every_key_has_a_meaning() -> None:
    for model in SECTIONS.values():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no docstring"


def test_the_minimal_config_gets_every_default(load: Load) -> None:
    loaded = load(MINIMAL)
    assert loaded.notices == ()
    assert loaded.config.base_model == "org/name"
    assert [dataset.path for dataset in loaded.config.datasets] == ["train.jsonl"]
    assert loaded.config.output_dir == Path("outputs/run")
    assert loaded.config.storage.paths == (Path("outputs/run.store"),)
    assert loaded.config.max_grad_norm == 1.0


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("learning_rate: 1e-5", "learning_rate", 1e-5),
        ("learning_rate: 1E5", "learning_rate", 1e5),
        ("learning_rate: 3", "learning_rate", 3.0),
        ("learning_rate: .5", "learning_rate", 0.5),
        ("sequence_len: 1_024", "sequence_len", 1024),
        ("sequence_len: 0x10", "sequence_len", 16),
        ("sequence_len: 010", "sequence_len", 10),
        ("sequence_len: +8", "sequence_len", 8),
        ("sequence_len: !!int 8", "sequence_len", 8),
        ("shuffle: False", "shuffle", False),
        ("max_grad_norm: 0", "max_grad_norm", None),
        ("max_grad_norm: 0.0", "max_grad_norm", None),
        ("max_grad_norm: null", "max_grad_norm", None),
        ("max_grad_norm:", "max_grad_norm", None),
        ("max_grad_norm: ~", "max_grad_norm", None),
        ("activations: static", "activations", "static"),
        ("activations: 0", "activations", 0.0),
        ("activations: 0.25", "activations", 0.25),
        ("val_set_size: 0.05", "val_set_size", 0.05),
        ("val_set_size: 100", "val_set_size", 100),
        ("report_to: null", "report_to", ()),
        ("report_to:", "report_to", ()),
        ("report_to: none", "report_to", ()),
        ("report_to: []", "report_to", ()),
        ("report_to: all", "report_to", ()),
        ("report_to: wandb", "report_to", ("wandb",)),
        ("report_to: [mlflow, tensorboard, mlflow]", "report_to", ("mlflow", "tensorboard")),
        ("report_to: [none, trackio, comet_ml]", "report_to", ("trackio",)),
        ("hub_model_id: org/name-1.5_b", "hub_model_id", "org/name-1.5_b"),
        ("gradient_dtype: float32", "gradient_dtype", "float32"),
        ("output_dir: 2024-01-01", "output_dir", Path("2024-01-01")),
        ("seed: 9223372036854775807", "seed", 2**63 - 1),
    ],
)
def test_values_are_read_as_people_mean_them(load: Load, line: str, key: str, value: object) -> None:
    got = getattr(load(MINIMAL + line + "\n").config, key)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 << 30), ("500MB", 500_000_000), ("1048576", 1 << 20), ("1.5 gib", 3 << 29)]
)
def test_sizes(load: Load, text: str, num_bytes: int) -> None:
    assert load(MINIMAL + f"limits: {{gpu_memory: {text}}}\n").config.limits.gpu_memory == num_bytes


def test_datasets_may_be_a_path_a_mapping_or_a_list(load: Load) -> None:
    model = "base_model: m\n"
    assert [each.path for each in load(model + "datasets: a\n").config.datasets] == ["a"]
    assert [each.path for each in load(model + "datasets: [a, b]\n").config.datasets] == ["a", "b"]
    assert [each.path for each in load(model + "datasets: {path: a}\n").config.datasets] == ["a"]
    mixed = load(model + "datasets:\n- a\n- path: b\n  formatting: alpaca\n  max_samples: 3\n")
    assert [(each.path, each.type, each.max_samples) for each in mixed.config.datasets] == [
        ("a", "auto", None),
        ("b", "alpaca", 3),
    ]
    assert mixed.notices == ("run.yaml:5:3: `formatting` is read as `type`",)


def test_home_is_expanded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load("base_model: ~/m\ndatasets: ~/d\noutput_dir: ~/o\nstorage: {paths: ~/s}\n").config
    assert (config.base_model, config.datasets[0].path) == ("/home/me/m", "/home/me/d")
    assert (config.output_dir, config.storage.paths) == (Path("/home/me/o"), (Path("/home/me/s"),))


@pytest.mark.parametrize(
    ("output_dir", "store"),
    [
        (".", "ratel.store"),
        ("..", "../ratel.store"),
        ("/", "/ratel.store"),
        ("a/b", "a/b.store"),
        ("a.d/", "a.d.store"),
    ],
)
def test_the_store_is_next_to_the_output(load: Load, output_dir: str, store: str) -> None:
    assert load(MINIMAL + f"output_dir: {output_dir}\n").config.storage.paths == (Path(store),)


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("lr: 1e-3", "learning_rate", 1e-3),
        ("cutoff_len: 64", "sequence_len", 64),
        ("max_length: 64", "sequence_len", 64),
        ("max_seq_length: 64", "sequence_len", 64),
        ("packing: false", "sample_packing", False),
        ("per_device_train_batch_size: 2", "micro_batch_size", 2),
        ("num_train_epochs: 3.0", "num_epochs", 3.0),
        ("epochs: 2", "num_epochs", 2.0),
        ("lr_scheduler_type: linear", "lr_scheduler", "linear"),
        ("clip_grad_norm: 0.5", "max_grad_norm", 0.5),
        ("train_on_prompt: true", "train_on_inputs", True),
    ],
)
def test_an_alias_is_accepted_with_one_notice(load: Load, line: str, key: str, value: object) -> None:
    loaded = load(MINIMAL + line + "\n")
    assert getattr(loaded.config, key) == value
    assert loaded.notices == (f"run.yaml:3:1: `{line.split(':', maxsplit=1)[0]}` is read as `{key}`",)


def test_model_aliases(load: Load) -> None:
    for alias in ("model_name_or_path", "model"):
        assert load(f"{alias}: m\ndatasets: d\n").config.base_model == "m"


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("completion_only_loss: true", "false"),
        ("completion_only_loss: false", "true"),
        ("assistant_only_loss: true", "false"),
        ("assistant_only_loss: false", "conversations"),
    ],
)
def test_an_inverse_alias_is_inverted(load: Load, line: str, read: str) -> None:
    loaded = load(f"{MINIMAL}{line}\n")
    assert str(loaded.config.train_on_inputs).lower() == read
    assert loaded.notices == (f"run.yaml:3:1: `{line}` is read as `train_on_inputs: {read}`",)


@pytest.mark.parametrize(
    ("completion", "assistant", "expected"),
    [("true", "true", False), ("true", "false", "conversations"), ("false", "false", True)],
)
def test_both_keys_of_trl_about_the_loss(load: Load, completion: str, assistant: str, expected: object) -> None:
    config = load(f"{MINIMAL}completion_only_loss: {completion}\nassistant_only_loss: {assistant}\n").config
    assert config.train_on_inputs == expected


def test_alias_values(load: Load) -> None:
    loaded = load(MINIMAL + "torch_dtype: bf16\noptim: adamw_torch\nlr_scheduler: constant_with_warmup\n")
    assert (loaded.config.dtype, loaded.config.optimizer, loaded.config.lr_scheduler) == (
        "bfloat16",
        "adamw",
        "constant",
    )
    (notice,) = loaded.notices
    assert notice == (
        "run.yaml:3:1: `torch_dtype: bf16` is read as `dtype: bfloat16`, `optim: adamw_torch` as `optimizer: adamw`, "
        "`lr_scheduler: constant_with_warmup` as `constant`"
    )


REJECTED = """
    load_in_4bit load_in_8bit adapter lora_r lora_alpha qlora_rank batch_size stage neftune_noise_alpha rope_scaling
    galore_rank unfrozen_parameters label_smoothing_factor reward_model <<
"""
IGNORED = """
    deepspeed fsdp fsdp_config wandb_project gradient_checkpointing flash_attention trust_remote_code
    resume_from_checkpoint template push_to_hub dataloader_num_workers strict tf32 ddp_timeout plot_loss
"""


@pytest.mark.parametrize("key", REJECTED.split())
def test_a_key_of_another_trainer_that_changes_the_training_is_rejected(complain: Complain, key: str) -> None:
    for value in ("true", "{a: b}"):
        [error] = complain(MINIMAL + f"{key}: {value}\n")
        assert error.startswith(f"run.yaml:3:1: `{key}` is not a key of Ratel: ")
        assert " | " in error


@pytest.mark.parametrize("key", IGNORED.split())
def test_a_key_that_changes_nothing_is_ignored(load: Load, key: str) -> None:
    for value in ("true", "{a: b}"):
        (notice,) = load(MINIMAL + f"{key}: {value}\n").notices
        assert notice.startswith((f"run.yaml:3:1: `{key}` changes nothing here", f"run.yaml:3:1: `{key}` is ignored: "))


@pytest.mark.parametrize("key", [*REJECTED.split(), *IGNORED.split()])
@pytest.mark.parametrize("value", ["", "null", "false", "[]", "{}", '""'])
def test_what_is_empty_or_off_is_ignored(load: Load, key: str, value: str) -> None:
    loaded = load(MINIMAL + f"{key}: {value}\n") if key != "<<" else load(MINIMAL)
    assert all(notice == f"run.yaml:3:1: `{key}` changes nothing here" for notice in loaded.notices)


def test_there_is_one_notice_for_all_that_changes_nothing(load: Load) -> None:
    text = "adapter:\nbf16: auto\ntf32: true\nstage: sft\nsave_total_limit:\nmax_steps: -1\ndeepspeed: x\nfsdp: [a]\n"
    ignored, empty = load(MINIMAL + text).notices
    assert ignored == (
        "run.yaml:3:1: `bf16`, `max_steps`, `adapter`, `tf32`, `stage` change nothing here. "
        "`deepspeed` is ignored: Ratel has an engine of its own; see `storage` and `limits`. "
        "`fsdp` is ignored: Ratel streams the model through one device and needs no sharding"
    )
    assert empty == "run.yaml:7:1: `save_total_limit` is empty, so its default is used: `save_total_limit: 1`"


def test_a_config_of_another_trainer_has_few_notices(load: Load) -> None:
    """Whatever it has of other names, of keys that change nothing, and of empty keys."""
    text = "model_name_or_path: m\ndataset: a,b\ntemplate: qwen\ncutoff_len: 64\nmax_samples: 9\nstage: sft\n"
    text += "finetuning_type: full\ndeepspeed: x\noverwrite_output_dir: true\nplot_loss: true\nbf16: true\n"
    text += "per_device_train_batch_size: 1\nnum_train_epochs: 3\nlr_scheduler_type: cosine\nseed:\nlearning_rate:\n"
    read, ignored, empty = load(text).notices
    assert read.startswith("run.yaml:1:1: `model_name_or_path` is read as `base_model`, `dataset: a,b` as `datasets`, ")
    assert read.count(" as `") == 8
    assert ignored.startswith(
        "run.yaml:3:1: `stage`, `finetuning_type`, `plot_loss` change nothing here. `template` is"
    )
    defaults = "`seed: 42`, `learning_rate: 2e-5`"
    assert empty == f"run.yaml:15:1: `seed`, `learning_rate` are empty, so their defaults are used: {defaults}"


MASK = "Ratel trains a turn to the end of its last mark, axolotl to the EOS token; for that mask write "
MASK += "`roles_to_train: [assistant], train_on_eos: turn` into the dataset"
WHOLE = "Ratel trains the answers in conversations, TRL all of their tokens; for that write "
WHOLE += "`train_on_inputs: conversations`"


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        ("datasets: [{path: a, type: chat_template}, {path: b, type: sharegpt}]\nstrict: false\n", f"2:22: {MASK}"),
        ("datasets: [{path: a, type: chat_template, train_on_eos: turn}]\nstrict: false\n", None),
        ("datasets: [{path: a, type: alpaca}]\nstrict: false\n", None),
        ("datasets: [{path: a, type: chat_template}]\n", None),
        ("dataset_name: a\n", f"2:1: {WHOLE}"),
        ("dataset_name: a\nassistant_only_loss: true\n", None),
        ("dataset_name: a\ncompletion_only_loss: false\n", None),
        ("datasets: a\npacking: true\n", None),
        ("dataset: a\nstage: sft\n", None),
    ],
)
def test_another_mask_by_default_is_said_once(load: Load, text: str, notice: str | None) -> None:
    found = [each for each in load(f"base_model: m\n{text}").notices if "Ratel trains" in each]
    assert found == ([] if notice is None else [f"run.yaml:{notice}"])


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("bf16: true", "bfloat16"),
        ("bf16: auto", "bfloat16"),
        ("bf16: auto\nfp16:", "bfloat16"),
        ("bf16: false", "float32"),
        ("bf16: false\nfp16: false", "float32"),
        ("fp16: false", "bfloat16"),
        ("fp16: true", "float16"),
        ("bf16: false\nfp16: true", "float16"),
        ("bf16: false\npure_bf16: true", "bfloat16"),
        ("torch_dtype: float32\nbf16: true", "bfloat16"),
        ("torch_dtype: auto", "bfloat16"),
        ("torch_dtype: auto\nfp16: true", "float16"),
        ("torch_dtype: bfloat16\nbf16: true", "bfloat16"),
        ("torch_dtype: float16\nbf16: false", "float16"),
        ("dtype: float32\nbf16: auto", "float32"),
    ],
)
def test_the_precision_of_other_trainers(load: Load, lines: str, dtype: str) -> None:
    assert load(MINIMAL + lines + "\n").config.dtype == dtype


@pytest.mark.parametrize(
    ("lines", "save", "evaluate"),
    [
        ("save_strategy: no\nsave_steps: 5", None, None),
        ("save_strategy: epoch\nsave_steps: 500\neval_strategy: epoch\nnum_epochs: 4", 25, 25),
        ("save_strategy: steps\nsave_steps: 5\nevaluation_strategy: steps\neval_steps: 7", 5, 7),
        ("eval_strategy: 'no'\neval_steps: 7", None, None),
        ("save_strategy: best\nsave_steps: 5", 5, None),
    ],
)
def test_strategies(load: Load, lines: str, save: int | None, evaluate: int | None) -> None:
    config = load(MINIMAL + lines + "\n").config
    assert (config.save_interval(100), config.eval_interval(100)) == (save, evaluate)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "adamw_bnb_8bit", "AdamW"])
def test_adamw_under_another_name(load: Load, name: str) -> None:
    loaded = load(MINIMAL + f"optim: {name}\n")
    assert loaded.config.optimizer == "adamw"
    assert ("moments in fp32" in loaded.notices[-1]) == ("8bit" in name)


def test_the_device_of_the_trainer(load: Load) -> None:
    assert load(MINIMAL + "use_cpu: true\n").config.device == "cpu"
    assert load(MINIMAL + "use_cpu: false\nno_cuda: false\n").config.device == "auto"


def test_the_least_rate_of_axolotl(load: Load) -> None:
    config = load(MINIMAL + "lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n").config
    assert config.lr_scheduler == "cosine_with_min_lr"
    assert config.lr_scheduler_kwargs is not None and config.lr_scheduler_kwargs.min_lr_rate == 0.1


_B = ("b", "train", None, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dataset: a,b\nmax_samples: 7", [("a", "train", None, 7), ("b", "train", None, 7)]),
        ("dataset_name: org/set\ndataset_config: all\ndataset_train_split: sft", [("org/set", "sft", "all", None)]),
        (
            "datasets: [{path: a, max_samples: 3}, b]\nmax_samples: 7",
            [("a", "train", None, 3), ("b", "train", None, 7)],
        ),
        ("pretraining_dataset: {path: c4, name: en}", [("c4", "train", "en", None)]),
        ("datasets: [{path: a, type:, split: , name: }]", [("a", "train", None, None)]),
        ("datasets:\ndataset: a", [("a", "train", None, None)]),
        ("datasets: a\ndataset: ", [("a", "train", None, None)]),
        ("dataset_mixer: {org/set: 1.0}\ndataset_splits: [train]", [("org/set", "train", None, None)]),
        ("datasets: {path: json, data_files: [x.jsonl], ds_type: json}", [("x.jsonl", "train", None, None)]),
        (
            "dataset_mixture: {datasets: [{id: org/set, config: d, split: sft, columns: [messages]}]}",
            [("org/set", "sft", "d", None)],
        ),
    ],
)
def test_datasets_of_other_trainers(load: Load, text: str, expected: list[tuple[object, ...]]) -> None:
    datasets = load("base_model: m\n" + text + "\n").config.datasets
    assert [(each.path, each.split, each.name, each.max_samples) for each in datasets] == expected


def test_the_sets_of_a_mixer(load: Load) -> None:
    """Their shares are weights, and the lists next to them have one value for each."""
    text = "base_model: m\ndataset_mixer: {a: 1.0, b: 0.5}\ndataset_splits: [train, sft]\ndataset_configs: [x, null]\n"
    found = load(text).config.datasets
    assert [(each.path, each.weight, each.split, each.name) for each in found] == [
        ("a", 1.0, "train", "x"),
        ("b", 0.5, "sft", None),
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("field_thinking: thinking, template_thinking_key: thinking", None),
        ("field_thinking: thought", {"reasoning_content": "thought"}),
        (
            "field_thinking: a, template_thinking_key: b, message_field_role: from",
            {"b": "a", "role": "from"},
        ),
    ],
)
def test_the_reasoning_of_axolotl(load: Load, keys: str, expected: dict[str, str] | None) -> None:
    text = f"base_model: m\ndatasets: [{{path: a, type: chat_template, {keys}}}]\n"
    assert load(text).config.datasets[0].message_property_mappings == expected


@pytest.mark.parametrize(
    ("line", "streaming"),
    [
        ("max_steps: 9", True),
        ("max_steps: 9\nstreaming:", True),
        ("max_steps: 9\nstreaming: false", False),
        ("", False),
    ],
)
def test_what_is_for_pretraining_is_streamed(load: Load, line: str, streaming: bool) -> None:
    """As axolotl does it, where `max_steps` is required for it."""
    text = "base_model: m\npretraining_dataset: [{path: c4, text_column: body}, b]\n"
    config = load(f"{text}{line}\n").config
    assert config.streaming == streaming
    assert [(each.path, each.type, each.field) for each in config.datasets] == [
        ("c4", "completion", "body"),
        ("b", "completion", "text"),
    ]


INFO = {
    "demo": {"file_name": "demo.json"},
    "mine": {
        "file_name": "mine.json",
        "columns": {"prompt": "ask", "query": "more", "response": "say", "system": "sys", "history": "before"},
        "num_samples": 9,
    },
    "chats": {
        "hf_hub_url": "org/chats",
        "subset": "en",
        "split": "sft",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "you"},
    },
    "shared": {"file_name": "shared.json", "formatting": "sharegpt"},
    "ranked": {"file_name": "ranked.json", "ranking": True},
    "nowhere": {"columns": {}},
}


def test_the_sets_of_llama_factory(load: Load) -> None:
    Path("sets").mkdir()
    Path("sets/dataset_info.json").write_text(json.dumps(INFO))
    text = "base_model: m\ndataset_dir: sets\neval_dataset: shared\nmax_samples: 5\n"
    text += "dataset: demo, mine,chats,other.jsonl\n"
    config = load(text).config
    demo, mine, chats, other = config.datasets
    assert (demo.path, demo.type, demo.max_samples) == ("sets/demo.json", "chat_template", 5)
    assert (mine.field_instruction, mine.field_input, mine.field_output) == ("ask", "more", "say")
    assert (mine.field_system, mine.field_history, mine.max_samples) == ("sys", "before", 9)
    assert (chats.path, chats.name, chats.split, chats.field_messages) == ("org/chats", "en", "sft", "turns")
    assert chats.message_property_mappings == {"role": "who", "content": "what"}
    assert chats.roles == {"user": ("me",), "assistant": ("you",), "function_call": ("function_call",)}
    assert (other.path, other.type) == ("other.jsonl", "auto")
    (shared,) = config.test_datasets
    assert (shared.field_messages, shared.message_property_mappings) == (
        "conversations",
        {"role": "from", "content": "value"},
    )
    (text_set,) = load("base_model: m\ndataset_dir: sets\nstage: pt\ndataset: mine\n").config.datasets
    assert (text_set.type, text_set.field) == ("completion", "ask")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ranked", "`dataset`: 'ranked' cannot be used: it has preferences (chosen and rejected answers), not answers"),
        ("nowhere", "`dataset`: 'nowhere' cannot be used: it names no file and no hub id"),
    ],
)
def test_a_set_of_llama_factory_that_cannot_be_used(complain: Complain, name: str, error: str) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    (found,) = complain(f"base_model: m\ndataset: {name}\n")
    assert found.startswith(f"run.yaml:2:10: {error}")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_dataset_info_that_cannot_be_read(complain: Complain, text: str) -> None:
    Path("sets").mkdir()
    Path("sets/dataset_info.json").write_text(text)
    (found,) = complain("base_model: m\ndataset: a\ndataset_dir: sets\n")
    assert found.startswith("run.yaml:2:10: sets/dataset_info.json: cannot be read: ")


def test_the_columns_of_a_prompt_of_axolotl(load: Load) -> None:
    text = "base_model: m\ndatasets: [{path: a, type: {field_instruction: ask, field_output: say}}]\n"
    (found,) = load(text).config.datasets
    assert (found.type, found.field_instruction, found.field_output) == ("alpaca", "ask", "say")


@pytest.mark.parametrize("switch", ["adapter:", "use_peft: false", "finetuning_type: full"])
def test_an_adapter_that_is_off_has_settings_that_change_nothing(load: Load, switch: str) -> None:
    notices = load(MINIMAL + f"{switch}\nlora_r: 64\nlora_target_modules: [q_proj]\npeft_use_dora: true\n").notices
    assert len(notices) == 1 and "`lora_r`, `lora_target_modules`, `peft_use_dora`" in notices[0]


def test_an_adapter_that_is_on(complain: Complain) -> None:
    assert len(complain(MINIMAL + "adapter: lora\nlora_r: 64\n")) == 2
    assert len(complain(MINIMAL + "lora_r: 64\n")) == 1


def test_templates_and_tokens_of_other_trainers(load: Load) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = load(MINIMAL + f"chat_template: {json.dumps(template)}\neos_token: <|im_end|>\n").config
    assert (config.chat_template, config.chat_template_jinja) == (None, template)
    assert config.special_tokens == {"eos_token": "<|im_end|>"}
    assert load(MINIMAL + "chat_template_path: a.jinja\n").config.chat_template_jinja == "a.jinja"


def test_the_template_of_another_tokenizer(complain: Complain) -> None:
    (found,) = complain(MINIMAL + "chat_template_path: org/name\n")
    assert found.endswith("| write it into a file: `chat_template_jinja: FILE`")


def test_warmup_steps_set_the_ratio_to_zero(load: Load) -> None:
    def warmup(line: str) -> tuple[int, float]:
        config = load(MINIMAL + line).config
        return config.warmup_steps, config.warmup_ratio

    assert warmup("") == (0, 0.03)
    assert warmup("warmup_steps: 10\n") == (10, 0.0)
    assert warmup("warmup_steps: 0\n") == (0, 0.0)
    assert warmup("warmup_ratio: 0.1\n") == (0, 0.1)
    assert warmup("warmup_steps: 0\nwarmup_ratio: 0.1\n") == (0, 0.1)


@pytest.mark.parametrize(
    ("lines", "split"),
    [
        ("", (1, 1)),
        ("micro_batch_size: 4", (4, 1)),
        ("micro_batch_size: 4\ngradient_accumulation_steps: 3", (4, 3)),
        ("tokens_per_step: null", (1, 1)),
        ("tokens_per_step: 24576", None),
        ("tokens_per_step: 24576\nmicro_batch_size: auto", None),
        ("tokens_per_step: 24576\nmicro_batch_size: auto\ngradient_accumulation_steps: auto", None),
        ("tokens_per_step: 24576\nmicro_batch_size: 1", (1, 24)),
        ("tokens_per_step: 24576\nper_device_train_batch_size: 8", (8, 3)),
        ("tokens_per_step: 24576\nmicro_batch_size: 24\ngradient_accumulation_steps: auto", (24, 1)),
        ("tokens_per_step: 24576\ngradient_accumulation_steps: 2", (12, 2)),
        ("tokens_per_step: 24576\nmicro_batch_size: auto\ngradient_accumulation_steps: 2", (12, 2)),
        ("tokens_per_step: 24576\nmicro_batch_size: 8\ngradient_accumulation_steps: 3", (8, 3)),
        ("tokens_per_step: 96\nsequence_len: 32\nmicro_batch_size: 3", (3, 1)),
    ],
)
def test_tokens_per_step_and_a_split(load: Load, lines: str, split: tuple[int, int] | None) -> None:
    """What is `auto` follows from the others; where both are, the plan decides. What is written loads as it was."""
    config = load(MINIMAL + lines + "\n").config
    assert config.is_split_planned == (split is None)
    if split is None:
        assert (config.sequences_per_step, config.split_by(6).split) == (24, (6, 4))
    else:
        assert (config.split, config.sequences_per_step) == (split, split[0] * split[1])
    for each in (config, config if split else config.split_by(6)):
        assert load(to_yaml(each)).config == each


def test_a_plan_needs_only_a_shape(load: Load) -> None:
    shape = load(
        "model_shape: {num_layers: 40, num_heads: 40, hidden_size: 5120}\ncost_model: paper\n"
    ).config.model_shape
    assert shape is not None
    assert (shape.num_layers, shape.vocab_size, shape.num_parameters) == (40, 50257, None)


@pytest.mark.parametrize(
    ("lines", "notice"),
    [
        ("num_epochs: 3\nmax_steps: 5", "3:1: `num_epochs` is ignored: `max_steps` (5) decides when the run ends"),
        ("eval_steps: 3", "3:1: `eval_steps` is ignored: `val_set_size` is 0"),
        ("save_total_limit: 3", "3:1: `save_total_limit` is ignored: `save_steps` is not set"),
        (
            "warmup_steps: 9\nmax_steps: 5",
            "3:1: `warmup_steps` is 9, but `max_steps` is 5: the run ends during warm-up",
        ),
    ],
)
def test_ignored_keys_are_reported(load: Load, lines: str, notice: str) -> None:
    assert load(MINIMAL + lines + "\n").notices == (f"run.yaml:{notice}",)


def test_how_many_saved_steps_the_store_has_space_for(load: Load) -> None:
    assert load(MINIMAL).config.num_saved_generations == 0
    assert load(MINIMAL + "save_steps: 5\n").config.num_saved_generations == 1
    assert load(MINIMAL + "save_steps: 5\nsave_total_limit: 3\n").config.num_saved_generations == 3
    assert load(MINIMAL + "storage: {keep_generations: 2}\n").config.num_saved_generations == 2


def test_an_alias_bomb_is_bounded(complain: Complain) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    [error] = complain("\n".join(lines))
    assert error.endswith(
        "more than 10000 values | this happens when an alias (`*name`) of a large value is used many times"
    )


def test_small_anchors_are_accepted(load: Load) -> None:
    config = load("base_model: m\ndatasets: [{path: a, split: &s dev}, {path: b, split: *s}]\n").config
    assert [each.split for each in config.datasets] == ["dev", "dev"]


def test_a_number_with_too_many_digits(complain: Complain) -> None:
    [error] = complain(MINIMAL + f"seed: {'9' * 5000}\n")
    assert error.endswith("cannot be read as int")
    assert len(error) < 120


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"a: 1\nbb: \xff\n", "run.yaml:2:5: not UTF-8 text (byte 0xff) | save the file as UTF-8"),
        ("base_model: m\n".encode("utf-16"), "run.yaml:1:1: not UTF-8 text (byte 0xff) | save the file as UTF-8"),
        (b"#" * (MAX_TEXT_BYTES + 1), "run.yaml: larger than 256 KiB; this is not a config"),
    ],
)
def test_bytes_that_are_not_text(complain: Complain, content: bytes, error: str) -> None:
    assert complain(content) == [error]


def test_text_with_a_byte_order_mark_and_windows_line_ends(load: Load, complain: Complain) -> None:
    assert load(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()).config.base_model == "org/name"
    [error] = complain(b"\xef\xbb\xbf" + (MINIMAL + "sed: 1\n").replace("\n", "\r\n").encode())
    assert error == "run.yaml:3:1: unknown key `sed` | did you mean `seed`?"


def test_a_file_of_exactly_the_largest_size_loads(load: Load) -> None:
    padding = "#" * (MAX_TEXT_BYTES - len(MINIMAL))
    assert load(MINIMAL + padding).config.base_model == "org/name"


def error_of(path: Path) -> tuple[str, str | None]:
    with pytest.raises(BadInput) as caught:
        load_config(path)
    return caught.value.message, caught.value.hint


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("finetune.yaml").write_text(MINIMAL)
    assert error_of(Path("finetun.yaml")) == ("finetun.yaml: no such file", "did you mean finetune.yaml?")
    assert error_of(Path("x/y.yaml")) == ("x/y.yaml: no such file", None)
    assert error_of(Path()) == (".: is a directory", "write the path of the YAML file")
    assert error_of(Path("finetune.yaml/x")) == ("finetune.yaml/x: cannot be read: Not a directory", None)
    assert error_of(Path("a\0b"))[0] == "a\0b: not a valid file name"
    Path("loop.yaml").symlink_to("loop.yaml")
    assert error_of(Path("loop.yaml"))[0].startswith("loop.yaml: cannot be read: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    path.chmod(0)
    assert error_of(path) == (f"{path}: cannot be read: Permission denied", None)


def test_a_config_that_is_written_and_loaded_is_equal(load: Load) -> None:
    text = MINIMAL + "warmup_steps: 3\nmax_steps: 5\nlimits: {gpu_memory: 24GiB}\nsave_steps: 2\nmax_grad_norm: 0\n"
    config = load(text, "storage.paths=[/a, /b]", "activations=0.5", "adam_epsilon=1e-10").config
    again = load(to_yaml(config))
    assert again.config == config
    assert again.notices == ()
    assert to_yaml(again.config) == to_yaml(config)


@pytest.mark.parametrize(
    "text", ["1e-4", "yes", "null", "~x", "2024-01-01", "a: b", "0x1f", "- a", "#", "é\t\x85", "true", "="]
)
def test_texts_that_look_like_other_values_stay_texts(load: Load, text: str) -> None:
    config = RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "p", "split": text, "name": text}]})
    assert load(to_yaml(config)).config == config.resolved("run")


@pytest.mark.parametrize(
    ("lines", "num_steps", "expected"),
    [
        ("", 100, (3, None, None)),
        ("warmup_steps: 7", 100, (7, None, None)),
        ("warmup_steps: 7.0", 100, (7, None, None)),
        ("warmup_steps: 0.05", 101, (6, None, None)),
        ("warmup_steps: 0", 100, (0, None, None)),
        ("warmup_ratio: 0.1", 39, (3, None, None)),
        ("save_steps: 10\neval_steps: 0.25", 101, (3, 10, 26)),
        ("save_steps: 0.001", 10, (0, 1, None)),
        ("saves_per_epoch: 2\nevals_per_epoch: 4\nnum_epochs: 3", 300, (9, 50, 25)),
        ("saves_per_epoch: 0\nevals_per_epoch: 0", 10, (0, None, None)),
        ("saves_per_epoch: 0.5\nnum_epochs: 4", 100, (3, 50, None)),
        ("saves_per_epoch: 0.25\nnum_epochs: 1", 100, (3, 100, None)),
        ("saves_per_epoch: 1000", 10, (0, 1, None)),
    ],
)
def test_warmup_saving_and_evaluation_in_steps(
    load: Load, lines: str, num_steps: int, expected: tuple[int, int | None, int | None]
) -> None:
    """As transformers and axolotl count them: a share of all steps is rounded up, `warmup_ratio` is rounded down."""
    config = load(MINIMAL + lines + "\n").config
    counted = config.num_warmup_steps(num_steps), config.save_interval(num_steps), config.eval_interval(num_steps)
    assert counted == expected
    assert config.saves == (expected[1] is not None)
    assert config.num_saved_generations == int(config.saves)


def test_a_schedule_with_its_options(load: Load) -> None:
    text = MINIMAL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n"
    config = load(text).config
    assert config.lr_scheduler == "cosine_with_min_lr"
    assert config.lr_scheduler_kwargs is not None and config.lr_scheduler_kwargs.min_lr_rate == 0.1
    assert load(to_yaml(config)).config == config
    changed = load(text, "lr_scheduler_kwargs.min_lr_rate=0.2").config.lr_scheduler_kwargs
    assert changed is not None and changed.min_lr_rate == 0.2


def test_a_learning_rate_that_can_hardly_be_meant(load: Load) -> None:
    assert load(MINIMAL + "learning_rate: 0.1\n").notices == ()
    (notice,) = load(MINIMAL + "learning_rate: 1e9\n").notices
    assert notice.startswith("run.yaml:3:1: `learning_rate` is 1e+09: AdamW moves every weight by about that much")


@pytest.mark.parametrize(
    ("line", "default"),
    [
        ("output_dir:", "outputs/ and the name of the config file"),
        ("learning_rate:", "`learning_rate: 2e-5`"),
        ("lr:", "`learning_rate: 2e-5`"),
        ("micro_batch_size:", "1, or what `tokens_per_step` leaves to the plan"),
    ],
)
def test_an_empty_key_has_its_default(load: Load, line: str, default: str) -> None:
    (notice,) = load(f"{MINIMAL}{line}\n").notices
    assert notice == f"run.yaml:3:1: `{line[:-1]}` is empty, so its default is used: {default}"
