"""Loading a config: what a text becomes, and the messages for files that cannot be read."""

from __future__ import annotations

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
    base_model model_shape cost_model random_init datasets train_on_inputs sequence_len sample_packing shuffle
    micro_batch_size gradient_accumulation_steps num_epochs max_steps learning_rate lr_scheduler warmup_steps
    warmup_ratio optimizer adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm dtype gradient_dtype
    device attn_implementation activations optimizer_overlap deterministic trace storage limits output_dir
    save_steps save_total_limit eval_steps val_set_size logging_steps report_to seed
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
        ("report_to: null", "report_to", "none"),
        ("report_to: none", "report_to", "none"),
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


@pytest.mark.parametrize(("written", "read"), [("true", "false"), ("false", "true")])
@pytest.mark.parametrize("alias", ["completion_only_loss", "assistant_only_loss"])
def test_an_inverse_alias_is_inverted(load: Load, alias: str, written: str, read: str) -> None:
    loaded = load(MINIMAL + f"{alias}: {written}\n")
    assert loaded.config.train_on_inputs is (read == "true")
    assert loaded.notices == (f"run.yaml:3:1: `{alias}: {written}` is read as `train_on_inputs: {read}`",)


def test_alias_values(load: Load) -> None:
    loaded = load(MINIMAL + "torch_dtype: bf16\noptim: adamw_torch\nlr_scheduler: constant_with_warmup\n")
    assert (loaded.config.dtype, loaded.config.optimizer, loaded.config.lr_scheduler) == (
        "bfloat16",
        "adamw",
        "constant",
    )
    assert loaded.notices == (
        "run.yaml:3:1: `torch_dtype` is read as `dtype`",
        "run.yaml:3:1: `torch_dtype: bf16` is read as `bfloat16`",
        "run.yaml:4:1: `optim` is read as `optimizer`",
        "run.yaml:4:1: `optim: adamw_torch` is read as `adamw`",
        "run.yaml:5:1: `lr_scheduler: constant_with_warmup` is read as `constant`",
    )


FOREIGN = """
    deepspeed fsdp fsdp_config load_in_4bit load_in_8bit adapter lora_r lora_alpha qlora_rank batch_size wandb_project
    gradient_checkpointing bf16 fp16 flash_attention trust_remote_code resume_from_checkpoint stage template
    hub_model_id eval_strategy dataloader_num_workers <<
"""


@pytest.mark.parametrize("key", FOREIGN.split())
def test_a_key_of_another_trainer_is_rejected_with_a_reason(complain: Complain, key: str) -> None:
    for value in ("false", "{a: b}"):
        [error] = complain(MINIMAL + f"{key}: {value}\n")
        assert error.startswith(f"run.yaml:3:1: `{key}` is not a key of Ratel: ")
        assert " | " in error


def test_warmup_steps_set_the_ratio_to_zero(load: Load) -> None:
    def warmup(line: str) -> tuple[int, float]:
        config = load(MINIMAL + line).config
        return config.warmup_steps, config.warmup_ratio

    assert warmup("") == (0, 0.03)
    assert warmup("warmup_steps: 10\n") == (10, 0.0)
    assert warmup("warmup_steps: 0\n") == (0, 0.0)
    assert warmup("warmup_ratio: 0.1\n") == (0, 0.1)
    assert warmup("warmup_steps: 0\nwarmup_ratio: 0.1\n") == (0, 0.1)


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
