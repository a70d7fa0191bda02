"""Loading configs of other trainers: their names, keys that we do not have, their data, and the notices about them."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest

from ratel_cli.config.keys.relation import doubtful_keys
from tests.config.config_loading import MINIMAL, Complain, Load


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
    config = loaded.config
    assert (config.dtype, config.optimizer, config.lr_scheduler) == ("bfloat16", "adamw", "constant")
    (notice,) = loaded.notices
    assert notice == (
        "run.yaml:3:1: `torch_dtype: bf16` is read as `dtype: bfloat16`, `optim: adamw_torch` as `optimizer: adamw`, "
        "`lr_scheduler: constant_with_warmup` as `constant`"
    )


REJECTED = """
    quantization_bit pissa_init lora_init qlora_rank
    lora_model_dir batch_size stage rope_scaling
    galore_rank use_badam use_eaft_loss reward_model <<
"""
IGNORED = """
    deepspeed fsdp fsdp_config wandb_project gptq gradient_checkpointing flash_attention trust_remote_code
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
        assert notice.startswith((f"run.yaml:3:1: `{key}` has no effect here", f"run.yaml:3:1: `{key}` is ignored: "))


@pytest.mark.parametrize("key", [*REJECTED.split(), *IGNORED.split()])
@pytest.mark.parametrize("value", ["", "null", "false", "[]", "{}", '""'])
def test_what_is_empty_or_off_is_ignored(load: Load, key: str, value: str) -> None:
    loaded = load(MINIMAL + f"{key}: {value}\n") if key != "<<" else load(MINIMAL)
    assert all(notice == f"run.yaml:3:1: `{key}` has no effect here" for notice in loaded.notices)


def test_files_in_another_form_are_read_as_numbers(load: Load, complain: Complain) -> None:
    keys = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: {dequantize: %s}\n"
    [notice] = load(MINIMAL + keys % "true").notices
    assert "have no effect here" in notice
    assert len(complain(MINIMAL + keys % "false")) == 2


def test_parts_that_text_does_not_use_may_be_frozen(load: Load) -> None:
    text = "freeze_mm_modules: true\nfreeze_vision_tower: true\nfreeze_multi_modal_projector: true\n"
    [notice] = load(MINIMAL + text).notices
    assert "have no effect here" in notice


def test_the_revision_of_a_hub_model(load: Load) -> None:
    assert load(MINIMAL + "model_revision: v1\n").config.revision_of_model == "v1"
    for key in ("model_revision", "revision_of_model"):  # which a directory has, too
        loaded = load(MINIMAL + f"{key}: main\n")
        assert loaded.config.revision_of_model is None and "has no effect here" in loaded.notices[0]


def test_a_default_may_be_true(load: Load, complain: Complain) -> None:
    """LLaMA-Factory closes an empty thought in the prompt where this is off."""
    [notice] = load(MINIMAL + "enable_thinking: true\n").notices
    assert notice == "run.yaml:3:1: `enable_thinking` has no effect here"
    [error] = complain(MINIMAL + "enable_thinking: false\n")
    assert "the tokenizer's chat template decides how answers without reasoning are rendered" in error


def test_there_is_one_notice_for_all_that_changes_nothing(load: Load) -> None:
    text = "adapter:\nbf16: auto\ntf32: true\nstage: sft\nsave_total_limit:\nmax_steps: -1\ndeepspeed: x\nfsdp: [a]\n"
    ignored, empty = load(MINIMAL + text).notices
    assert ignored == (
        "run.yaml:4:1: `bf16`, `max_steps`, `stage` have no effect here. "
        "`tf32` is ignored: products in fp32 stay in fp32, which is more exact. "
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
        "run.yaml:3:1: `stage`, `finetuning_type`, `plot_loss` have no effect here. `template` is"
    )
    defaults = "`seed: 42`, `learning_rate: 2e-5`"
    assert empty == f"run.yaml:15:1: `seed`, `learning_rate` are empty, so their defaults are used: {defaults}"


MASK = "Ratel's loss on a turn ends with its end token, axolotl's with the EOS token; for that mask write "
MASK += "`roles_to_train: [assistant], train_on_eos: turn` into the dataset"
WHOLE = "in conversations Ratel trains on the answers, TRL on all tokens; for all tokens write "
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
    found = [each for each in load(f"base_model: m\n{text}").notices if MASK in each or WHOLE in each]
    assert found == ([] if notice is None else [f"run.yaml:{notice}"])


RATE = {"lr_scheduler_kwargs.min_lr_rate": 0.1}
SGD, NESTEROV = "optim: sgd\noptim_args: ", {"optim_args.momentum": 0.9, "optim_args.nesterov": True}
ROUNDED = {"optimizer": "adamw_8bit", "optim_args": None}
LORA_OF_TRL = "use_peft: true\nlora_target_modules: all-linear\n"
AO = "optim: adamw_torch_8bit\noptim_args: "


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("use_cpu: true", {"device": "cpu"}),
        ("use_cpu: false\nno_cuda: false", {"device": "auto"}),
        ("micro_batch_size: 4\nbatch_size: 32", {"gradient_accumulation_steps": 8}),  # axolotl's, of a step
        ("micro_batch_size: 4\nbatch_size: 35\ngradient_accumulation_steps:", {"gradient_accumulation_steps": 8}),
        ("micro_batch_size: 4\nbatch_size: 32\ngradient_accumulation_steps: 2", {"gradient_accumulation_steps": 2}),
        ("adapter: lora\nlora_target_modules: .*q_proj", {"lora_target_modules": ".*q_proj"}),
        ("adapter: lora\nuse_rslora: true", {"peft_use_rslora": True}),
        (f"{LORA_OF_TRL}use_dora: true", {"peft_use_dora": True}),
        ("finetuning_type: lora\nadditional_target: a, lm_head", {"lora_modules_to_save": ("a", "lm_head")}),
        ("lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1", {"lr_scheduler": "cosine_with_min_lr", **RATE}),
        (f"{SGD}{{momentum: 0.9, nesterov: true}}", NESTEROV),
        (f"{SGD}momentum=0.9,nesterov=true", NESTEROV),
        (f"{SGD}'momentum=0.9, nesterov=True'", NESTEROV),
        (f"{SGD}momentum=0.9,nesterov=1", NESTEROV),
        (f"{SGD}momentum=0.9,nesterov=0", {"optim_args.momentum": 0.9, "optim_args.nesterov": False}),
        (f"{SGD}momentum=0.9,nesterov=no", {"optim_args.momentum": 0.9, "optim_args.nesterov": False}),
        (f"{SGD}''", {"optim_args": None}),
        (f"{AO}bf16_stochastic_round=True", {**ROUNDED, "bf16_master": "stochastic"}),
        (f"{AO}'bf16_stochastic_round=yes'", {**ROUNDED, "bf16_master": "stochastic"}),
        (f"{AO}{{bf16_stochastic_round: true}}", {**ROUNDED, "bf16_master": "stochastic"}),
        (f"{AO}bf16_stochastic_round=False", {**ROUNDED, "bf16_master": "fp32"}),
        (f"{AO}bf16_stochastic_round=True\nbf16_master: fp32", {**ROUNDED, "bf16_master": "fp32"}),
        ("bf16: true", {"dtype": "bfloat16"}),
        ("bf16: auto", {"dtype": "bfloat16"}),
        ("bf16: auto\nfp16:", {"dtype": "bfloat16"}),
        ("bf16: false", {"dtype": "float32"}),
        ("bf16: false\nfp16: false", {"dtype": "float32"}),
        ("fp16: false", {"dtype": "bfloat16"}),
        ("fp16: true", {"dtype": "float16"}),
        ("bf16: false\nfp16: true", {"dtype": "float16"}),
        ("bf16: false\npure_bf16: true", {"dtype": "bfloat16"}),
        ("torch_dtype: float32\nbf16: true", {"dtype": "bfloat16"}),
        ("torch_dtype: auto", {"dtype": "bfloat16"}),
        ("torch_dtype: auto\nfp16: true", {"dtype": "float16"}),
        ("torch_dtype: bfloat16\nbf16: true", {"dtype": "bfloat16"}),
        ("torch_dtype: float16\nbf16: false", {"dtype": "float16"}),
        ("dtype: float32\nbf16: auto", {"dtype": "float32"}),
    ],
)
def test_what_keys_of_other_trainers_become(load: Load, lines: str, expected: dict[str, object]) -> None:
    config = load(f"{MINIMAL}{lines}\n").config
    assert {key: attrgetter(key)(config) for key in expected} == expected


def test_a_flag_that_goes_before_a_dtype_says_so(load: Load) -> None:
    notices = load(MINIMAL + "dtype: float32\nbf16: true\n").notices
    words = "`dtype` is ignored: `bf16` says what the model computes in, and master weights are fp32 all the same"
    assert any(words in notice for notice in notices)


@pytest.mark.parametrize(
    ("lines", "save", "evaluate"),
    [
        ("save_strategy: no\nsave_steps: 5", None, None),
        ("save_strategy: epoch\nsave_steps: 500\neval_strategy: epoch\nnum_epochs: 4", 25, 25),
        ("save_strategy: steps\nsave_steps: 5\nevaluation_strategy: steps\neval_steps: 7", 5, 7),
        ("eval_strategy: 'no'\neval_steps: 7", None, None),
        ("eval_strategy: steps\nlogging_steps: 7", None, 7),
        ("evaluation_strategy: steps\nlogging_steps: 7\neval_steps:", None, 7),
        ("eval_strategy: steps\nlogging_steps: 7\neval_steps: 3", None, 3),
        ("eval_strategy: steps", None, None),
        ("save_strategy: best\nsave_steps: 5", 5, None),
    ],
)
def test_strategies(load: Load, lines: str, save: int | None, evaluate: int | None) -> None:
    config = load(MINIMAL + lines + "\n").config
    assert (config.save_interval(100), config.eval_interval(100)) == (save, evaluate)


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("adamw", "adamw_torch adamw_torch_fused adamw_torch_xla paged_adamw_32bit adamw_apex_fused AdamW"),
        ("adamw", "ao_adamw_4bit adamw_torch_4bit ao_adamw_fp8 adamw_anyprecision"),
        ("adamw_8bit", "adamw_8bit adamw_bnb_8bit paged_adamw_8bit ao_adamw_8bit adamw_torch_8bit"),
        ("lion", "lion lion_32bit paged_lion_32bit lion_pytorch lion_8bit paged_lion_8bit"),
        ("sgd", "sgd SGD"),
        ("muon", "muon"),
    ],
)
def test_optimizers_under_other_names(load: Load, optimizer: str, names: str) -> None:
    """Moments with fewer bits than Ratel keeps are noted."""
    for name in names.split():
        loaded = load(MINIMAL + f"optim: {name}\n")
        assert loaded.config.optimizer == optimizer
        fewer_bits = name.endswith(("4bit", "fp8", "anyprecision")) or "lion_8bit" in name
        assert any("moments in fp32" in notice for notice in loaded.notices) == fewer_bits, name


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("optim: adamw_torch", "only torchao's optimizers read it"),
        ("optim: adamw_torch_8bit\ntorch_dtype: float32\nbf16: true", "torchao rounds weights in bf16 alone"),
        ("optim: adamw_torch_8bit\nfp16: true", "torchao rounds weights in bf16 alone"),
        ("optim: ao_adamw_8bit\nadapter: lora", "and adapters are in fp32"),
    ],
)
def test_what_torchao_does_not_round_has_a_master(load: Load, keys: str, reason: str) -> None:
    loaded = load(MINIMAL + f"{keys}\noptim_args: bf16_stochastic_round=True\n")
    assert loaded.config.bf16_master == "fp32"
    assert any(reason in notice for notice in loaded.notices), loaded.notices


@pytest.mark.parametrize("optimizer", ["", "optim: adamw_torch\n"])
def test_muon_of_llama_factory(load: Load, optimizer: str) -> None:
    loaded = load(MINIMAL + f"{optimizer}use_muon: true\n")
    assert loaded.config.optimizer == "muon"
    assert any("`use_muon: true` is read as `optimizer: muon`" in notice for notice in loaded.notices)
    assert load(MINIMAL + f"{optimizer}use_muon: false\n").config.optimizer == "adamw"


@pytest.mark.parametrize(
    ("betas", "expected"),
    [
        ("", (0.9, 0.99)),
        ("adam_beta1: 0.5\n", (0.9, 0.99)),
        ("adam_beta2: 0.5\n", (0.9, 0.99)),
        ("adam_beta1: 0.5\nadam_beta2: 0.75\n", (0.5, 0.75)),
    ],
)
def test_the_old_lion_of_axolotl_has_betas_of_its_own(load: Load, betas: str, expected: tuple[float, float]) -> None:
    loaded = load(MINIMAL + f"optimizer: lion_pytorch\n{betas}")
    config = loaded.config
    assert (config.optimizer, config.adam_beta1, config.adam_beta2) == ("lion", *expected)
    is_alone = betas.count("adam") == 1
    assert any("lion_pytorch uses both betas or none" in notice for notice in loaded.notices) is is_alone
    assert load(MINIMAL + "optimizer: lion_32bit\n").config.adam_beta2 == 0.999


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
        ("datasets: [{path: a, train_on_split: dev}]", [("a", "dev", None, None)]),
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
        ("field_thinking: a, template_thinking_key: b, message_field_role: from", {"b": "a", "role": "from"}),
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
    "judged": {"file_name": "judged.json", "columns": {"kto_tag": "good"}},
    "half": {"file_name": "half.json", "columns": {"prompt": "ask", "response": "say", "chosen": "good"}},
    "seen": {"file_name": "seen.json", "formatting": "sharegpt", "columns": {"images": "pictures"}},
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
    assert chats.roles == {"user": ("me",), "assistant": ("you",)}
    assert (other.path, other.type) == ("other.jsonl", "auto")
    (shared,) = config.test_datasets
    assert shared.field_messages == "conversations"
    assert shared.message_property_mappings == {"role": "from", "content": "value"}
    (half,) = load("base_model: m\ndataset_dir: sets\ndataset: half\n").config.datasets
    assert (half.field_output, half.field_chosen) == ("say", "chosen"), "a column that is not read there is not here"
    (text_set,) = load("base_model: m\ndataset_dir: sets\nstage: pt\ndataset: mine\n").config.datasets
    assert (text_set.type, text_set.field) == ("completion", "ask")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ranked", "it is preference data (chosen and rejected answers), which"),
        ("nowhere", "it names no file and no hub id"),
        ("judged", "its answers are marked good or bad (kto_tag)"),
        ("seen", "it has images, video or sound; a set in `data"),
    ],
)
def test_a_set_of_llama_factory_that_cannot_be_used(complain: Complain, name: str, error: str) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(INFO))
    (found,) = complain(f"base_model: m\ndataset: {name}\n")
    assert found.startswith(f"run.yaml:2:10: `dataset`: '{name}' cannot be used: {error}")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_dataset_info_that_cannot_be_read(complain: Complain, text: str) -> None:
    Path("sets").mkdir()
    Path("sets/dataset_info.json").write_text(text)
    (found,) = complain("base_model: m\ndataset: a\ndataset_dir: sets\n")
    assert found.startswith("run.yaml:2:10: sets/dataset_info.json: cannot be read: ")


def test_a_prompt_of_axolotl_has_words_that_ratel_does_not_write(complain: Complain) -> None:
    text = "base_model: m\ndatasets: [{path: a, type: {field_instruction: ask, field_output: say}}]\n"
    (found,) = complain(text)
    hint = "write the words of a prompt into the data: `type: completion` reads `prompt` and `completion`"
    assert found.endswith(f", not a mapping | {hint}")


@pytest.mark.parametrize("switch", ["adapter:", "use_peft: false", "finetuning_type: full"])
def test_an_adapter_that_is_off_has_settings_that_change_nothing(load: Load, switch: str) -> None:
    notices = load(MINIMAL + f"{switch}\nlora_r: 64\nlora_target_modules: [q_proj]\npeft_use_dora: true\n").notices
    assert "`lora_r`, `lora_target_modules`, `peft_use_dora`" in notices[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter: lora\nlora_r: 8\nlora_target_linear: true\n", (8, 8, 0.0, ())),
        ("finetuning_type: lora\n", (8, 16, 0.0, ())),
        ("finetuning_type: lora\nlora_alpha: null\nlora_rank:\n", (8, 16, 0.0, ())),
        ("adapter: lora\nlora_r: 8\nlora_target_modules:\nlora_dropout:\nlora_alpha: 4\n", (8, 4, 0.0, ())),
        ("finetuning_type: lora\nlora_rank: 4\nlora_target: q_proj,v_proj\n", (4, 8, 0.0, ("q_proj", "v_proj"))),
        ("finetuning_type: lora\nlora_alpha: 3\nlora_target: all\n", (8, 3, 0.0, ())),
        ("use_peft: true\nlora_target_modules: all-linear\n", (16, 32, 0.05, ())),
        ("use_peft: true\nlora_r: 2\nlora_target_modules: [o_proj]\nlora_dropout: 0\n", (2, 32, 0.0, ("o_proj",))),
    ],
)
def test_an_adapter_has_the_defaults_of_its_trainer(
    load: Load, text: str, expected: tuple[int, int, float, tuple[str, ...]]
) -> None:
    found = load(MINIMAL + text).config
    assert found.adapter == "lora"
    assert (found.lora_r, found.lora_alpha, found.lora_dropout, found.lora_target_modules) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter: qlora\nload_in_4bit: true\n", (True, False, True)),
        ("adapter: lora\nload_in_8bit: true\nload_in_4bit:\n", (False, True, True)),
        ("adapter: lora\nload_in_8bit: false\nload_in_4bit: false\n", (False, False, True)),
        ("finetuning_type: lora\nquantization_bit: 4\nquantization_method: bnb\n", (True, False, True)),
        (
            "finetuning_type: lora\nquantization_bit: 4\ndouble_quantization: false\nquantization_type: nf4\n",
            (True, False, False),
        ),
        ("finetuning_type: lora\nquantization_bit: 8\ndouble_quantization: false\n", (False, True, True)),
        (f"{LORA_OF_TRL}load_in_4bit: true\n", (True, False, False)),
        (f"{LORA_OF_TRL}load_in_4bit: true\nuse_bnb_nested_quant: true\n", (True, False, True)),
        (
            "adapter: lora\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\ndtype: bf16\nbnb_4bit_compute_dtype: bf16\n",
            (True, False, True),
        ),
        (
            (
                "adapter: qlora\nload_in_4bit: true\nbnb_4bit_use_double_quant: true\n"
                "bnb_config_kwargs: {bnb_4bit_use_double_quant: false, bnb_4bit_quant_type: nf4}\n"
            ),
            (True, False, False),
        ),
        ("adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {}\n", (True, False, True)),
        ("adapter: lora\nload_in_8bit: true\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}\n", (False, True, True)),
    ],
)
def test_quantised_models_of_other_trainers(load: Load, text: str, expected: tuple[bool, bool, bool]) -> None:
    found = load(MINIMAL + text).config
    assert found.adapter == "lora"
    assert (found.load_in_4bit, found.load_in_8bit, found.bnb_4bit_use_double_quant) == expected
    assert doubtful_keys(found.model_copy(update={"learning_rate": 2e-4})) == []


DIFFERENT = "`batch_size` is not a key of Ratel: it means different things in different tools"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapter: qlora\n", "`adapter: qlora` without `load_in_4bit: true`"),
        ("adapter: qlora\nload_in_4bit: false\n", "`adapter: qlora` without `load_in_4bit: true`"),
        ("finetuning_type: lora\nquantization_bit: 4\nquantization_method: hqq\n", "`quantization_bit` is not a key"),
        ("adapter: lora\nload_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "`bnb_4bit_quant_type` is not a key"),
        ("adapter: lora\nload_in_4bit: true\nbnb_4bit_compute_dtype: float16\n", "dequantises weights to `dtype`"),
        (
            "adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}\n",
            "`bnb_4bit_quant_type` is not a key",
        ),
        ("adapter: qlora\nload_in_4bit: true\nbnb_config_kwargs: fp4\n", "`bnb_config_kwargs` is not a key"),
        ("model_quantization_config_kwargs: {dequantize: true}\n", "`model_quantization_config_kwargs` is not a key"),
        ("batch_size: 32\n", DIFFERENT),
        ("micro_batch_size: 4\nbatch_size: 3\n", DIFFERENT),
        (f"{AO}bf16_stochastic_round=maybe\n", "`bf16_stochastic_round` must be true or false, not 'maybe'"),
        (f"{SGD}momentum=0.9,nesterov=2\n", "`optim_args.nesterov` must be true or false"),
        (f"{SGD}momentum=2\n", "`optim_args.momentum`"),
        ("adapter: llama-adapter\n", "`adapter` must be `lora`"),
        ("use_peft: true\n", "TRL leaves this to PEFT | name them"),
        ("chat_template_path: org/name\n", "| write it into a file: `chat_template_jinja: FILE`"),
    ],
)
def test_what_ratel_has_not(complain: Complain, text: str, message: str) -> None:
    errors = complain(MINIMAL + text)
    assert any(message in error for error in errors), errors
    assert len(errors) == (2 if "hqq" in text else 1)


def test_a_delay_of_evaluations_counts_where_they_are_compared(load: Load, complain: Complain) -> None:
    steps = "val_set_size: 0.1\neval_steps: 5\neval_delay: 10\n"
    assert any("`eval_delay` has no effect here" in notice for notice in load(MINIMAL + steps).notices)
    load(MINIMAL + steps.replace("10", "0") + "early_stopping_patience: 2\n")
    for line in ("load_best_model_at_end: true\n", "early_stopping_patience: 2\n"):
        [error] = complain(MINIMAL + steps + line)
        assert "`eval_delay` is not a key of Ratel: Ratel has no delay" in error


def test_what_quantised_keys_say_where_they_change_nothing(load: Load) -> None:
    """Double quantisation of nothing, and a data type that is the run's own."""
    notices = load(MINIMAL + "use_bnb_nested_quant: true\n").notices
    assert any("`use_bnb_nested_quant` has no effect here" in notice for notice in notices)
    text = "adapter: lora\nload_in_4bit: true\ndtype: bfloat16\nbnb_4bit_compute_dtype: bf16\n"
    notices = load(MINIMAL + text).notices
    assert any("`bnb_4bit_compute_dtype` has no effect here" in notice for notice in notices)


def test_templates_and_tokens_of_other_trainers(load: Load) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = load(MINIMAL + f"chat_template: {json.dumps(template)}\neos_token: <|im_end|>\n").config
    assert (config.chat_template, config.chat_template_jinja) == (None, template)
    assert config.special_tokens == {"eos_token": "<|im_end|>"}
    assert load(MINIMAL + "chat_template_path: a.jinja\n").config.chat_template_jinja == "a.jinja"
