"""Loading a config: what a text becomes, and the messages for files that cannot be read."""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.config.others.aliases import SECTIONS
from ratel_cli.config.yaml.yaml_marks import MAX_TEXT_BYTES
from ratel_cli.errors import BadInput
from tests.config.config_loading import MINIMAL, Complain, Load
from tests.test_input_files import compressed

OF_THE_INTERFACE = """
    base_model revision_of_model model_shape cost_model random_init base_storage unfrozen_parameters frozen_parameters
    adapter lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear lora_target_parameters
    lora_layers_to_transform
    peft_use_rslora peft_use_dora lora_modules_to_save peft_ensure_weight_tying peft_init_lora_weights
    load_in_4bit load_in_8bit bnb_4bit_use_double_quant quantize_moe_experts
    datasets test_datasets streaming chat_template chat_template_jinja
    special_tokens eot_tokens tokens new_special_tokens added_tokens_overrides new_tokens_init pad_vocab_to_multiple_of
    tokenizer_use_mistral_common train_on_inputs sequence_len excess_length_strategy
    sample_packing
    mlm_probability
    shuffle
    micro_batch_size gradient_accumulation_steps tokens_per_step num_epochs max_steps learning_rate loraplus_lr_ratio
    embedding_lr embedding_lr_scale lr_scheduler lr_scheduler_kwargs warmup_steps warmup_ratio
    warmup_rounding max_warmup_steps optimizer optim_args
    bf16_master adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm
    label_smoothing_factor neftune_noise_alpha use_dft_loss
    rl rl_beta simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight disable_dropout
    dtype gradient_dtype device attn_implementation activations head_chunk optimizer_overlap
    deterministic trace storage limits
    output_dir save_steps saves_per_epoch save_total_limit eval_steps evals_per_epoch
    load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience early_stopping_threshold
    val_set_size logging_steps
    report_to run_name project hub_model_id hub_private_repo seed
"""
"""The keys that users were promised, in this order. `tests/test_docs.py` checks that docs/config.md has them all."""


def test_the_keys_are_those_of_the_interface() -> None:
    assert list(SECTIONS[""].model_fields) == OF_THE_INTERFACE.split()


def test_every_key_has_a_meaning() -> None:
    for model in SECTIONS.values():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no docstring"


def test_the_default_for_wear_is_that_of_what_is_trained(load: Load) -> None:
    """Beside an adapter activations wear the drives many times as much as its state."""
    assert load(MINIMAL).config.resolved_wear == "balanced"
    assert load(MINIMAL + "adapter: lora\n").config.resolved_wear == "save"
    for rule in ("save", "balanced", "ignore"):
        for adapter in ("", "adapter: lora\n"):
            assert load(f"{MINIMAL}{adapter}storage: {{wear: {rule}}}\n").config.resolved_wear == rule


def test_the_scale_of_an_adapter_is_filled_in(load: Load) -> None:
    assert load(MINIMAL).config.lora_alpha is None
    assert load(MINIMAL + "adapter: lora\nlora_r: 4\n").config.lora_alpha == 4
    assert load(MINIMAL + "adapter: lora\nlora_r: 4\nlora_alpha: 9\n").config.lora_alpha == 9


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
        ("limits: {gpu_memory: 1.5 gib}", "limits.gpu_memory", 3 << 29),
        ("limits: {gpu_memory: 500MB}", "limits.gpu_memory", 500_000_000),
        ("limits: {gpu_memory: 1048576}", "limits.gpu_memory", 1 << 20),
    ],
)
def test_values_are_read_as_people_mean_them(load: Load, line: str, key: str, value: object) -> None:
    got = attrgetter(key)(load(MINIMAL + line + "\n").config)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


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
    assert config.split == split
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


def test_how_many_saved_steps_the_store_has_space_for(load: Load) -> None:
    assert load(MINIMAL).config.num_saved_generations == 0
    assert load(MINIMAL + "save_steps: 5\n").config.num_saved_generations == 1
    assert load(MINIMAL + "save_steps: 5\nsave_total_limit: 3\n").config.num_saved_generations == 3
    assert load(MINIMAL + "storage: {keep_generations: 2}\n").config.num_saved_generations == 2
    best = MINIMAL + "val_set_size: 4\neval_steps: 5\nload_best_model_at_end: true\n"
    assert load(best).config.num_saved_generations == 1
    assert load(best + "save_steps: 5\n").config.num_saved_generations == 2, "the best and the last one"
    assert load(best + "save_steps: 5\nsave_total_limit: 3\n").config.num_saved_generations == 3
    assert load(best.replace("eval_steps: 5", "")).config.num_saved_generations == 0


def test_which_evaluation_is_the_better_one(load: Load) -> None:
    text = MINIMAL.replace("datasets:", "# ").strip() + "\ndatasets: [{path: d, type: classification}]\n"
    for lines, wanted in (
        ("", ("loss", False)),
        ("metric_for_best_model: eval_loss\n", ("loss", False)),
        ("metric_for_best_model: accuracy\n", ("accuracy", True)),
        ("metric_for_best_model: eval_accuracy\ngreater_is_better: false\n", ("accuracy", False)),
        ("greater_is_better: true\n", ("loss", True)),
    ):
        config = load(text + lines).config
        assert (config.metric_for_best_model, config.is_greater_better) == wanted


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
        ("warmup_ratio: 0.1", 39, (4, None, None)),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", 39, (4, None, None)),
        ("save_steps: 10\neval_steps: 0.25", 101, (4, 10, 26)),
        ("save_steps: 0.001", 10, (1, 1, None)),
        ("saves_per_epoch: 2\nevals_per_epoch: 4\nnum_epochs: 3", 300, (9, 50, 25)),
        ("saves_per_epoch: 0\nevals_per_epoch: 0", 10, (1, None, None)),
        ("saves_per_epoch: 0.5\nnum_epochs: 4", 100, (3, 50, None)),
        ("saves_per_epoch: 0.25\nnum_epochs: 1", 100, (3, 100, None)),
        ("saves_per_epoch: 1000", 10, (1, 1, None)),
    ],
)
def test_warmup_saving_and_evaluation_in_steps(
    load: Load, lines: str, num_steps: int, expected: tuple[int, int | None, int | None]
) -> None:
    """As transformers counts them: a share of all steps is rounded up."""
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
    assert notice.startswith("run.yaml:3:1: `learning_rate` is 1e+09: every weight moves by about that much")


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


def test_a_compressed_config_is_read(tmp_path: Path) -> None:
    plain = tmp_path / "run.yaml"
    plain.write_text(MINIMAL)
    expected = load_config(plain).config
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"run.yaml{suffix}"
        path.write_bytes(compressed(MINIMAL.encode(), suffix))
        assert load_config(path).config == expected
        path.write_bytes(compressed(b"seed: [1\nbase_model: x\n", suffix))
        with pytest.raises(BadInput, match=rf"^{path}:2:11: "):
            load_config(path)
        path.write_bytes(compressed(b" " * (MAX_TEXT_BYTES + 1), suffix))
        with pytest.raises(BadInput, match="this is not a config"):
            load_config(path)
        path.write_bytes(compressed(MINIMAL.encode(), suffix)[:-4])
        with pytest.raises(BadInput, match="the compressed file is damaged or cut off"):
            load_config(path)
