"""`ratel import`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.importing import Imported, import_config
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.load import load_config
from ratel_cli.errors import BadInput

AXOLOTL = """\
base_model: org/name
datasets: [{path: a.jsonl, type: alpaca}]
micro_batch_size: 2
optimizer: adamw_bnb_8bit
learning_rate: 1e-4
strict: false
deepspeed: zero3.json
neftune_noise_alpha: 5
something_new: 3
"""
KEPT = "base_model, datasets, datasets.path, datasets.type, micro_batch_size, learning_rate, neftune_noise_alpha"
TRL = """\
model_name_or_path: org/name
dataset_name: org/set
max_length: 64
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str) -> Path:
    path = Path("theirs.yaml")
    path.write_text(text)
    return path


def read(imported: Imported) -> RunConfig:
    """The config that was made, as a run reads it."""
    Path("run.yaml").write_text(imported.text)
    return load_config(Path("run.yaml")).config


def test_the_table_and_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL)
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "from        a config of axolotl",
        f"kept        {KEPT}",
        "translated  optimizer: adamw_bnb_8bit  ->  optimizer: adamw_8bit",
        "dropped     strict: it has no effect here",
        "dropped     deepspeed: zero3.json: Ratel has an engine of its own; see `storage` and `limits`",
        "decide      something_new: 3: Ratel has no such key",
        "wrote run.yaml; decide what it asks, then try `ratel check run.yaml`",
    ]
    text = Path("run.yaml").read_text()
    assert "optimizer: adamw_8bit  # was `optimizer: adamw_bnb_8bit`" in text
    assert "sequence_len: 512  # the default of axolotl" in text
    assert "# Needs a decision:\n#   something_new: 3   (Ratel has no such key)\n" in text
    assert load_config(Path("run.yaml")).notices == ()


def test_without_a_name_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL)
    assert main(["import", "theirs.yaml"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    assert load_config(Path("run.yaml")).config.micro_batch_size == 2


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL)
    assert main(["import", "theirs.yaml", "-o", "run.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tool"], found["output"], found["config"]) == ("axolotl", "run.yaml", Path("run.yaml").read_text())
    fates = {each["key"]: each["fate"] for each in found["keys"]}
    assert fates["learning_rate"] == "kept" and fates["strict"] == "ignored" and fates["deepspeed"] == "noted"
    assert fates["something_new"] == "undecided" and fates["optimizer"] == "translated"


def test_a_file_that_exists_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL)
    Path("run.yaml").write_text("mine")
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: run.yaml: the file exists",
        "hint: choose another name, or replace it with --overwrite",
    ]
    assert Path("run.yaml").read_text() == "mine"
    assert main(["import", "theirs.yaml", "-o", "run.yaml", "--overwrite"]) == 0
    assert Path("run.yaml").read_text() != "mine"


REWARDS = "it belongs to reinforcement learning, or to a reward model"
OTHER_ADAPTER = "Ratel does not train this kind of adapter"


def test_what_is_impossible_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL + "adapter: lora\npissa_init: true\nreward_model: true\n")
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: theirs.yaml:11:1: `pissa_init` is not a key of Ratel: {OTHER_ADAPTER}",
        "hint: remove it; `adapter: lora` trains LoRA, and with `load_in_4bit: true` QLoRA",
        f"error: theirs.yaml:12:1: `reward_model` is not a key of Ratel: {REWARDS}",
        f"hint: {instead_of('grpo')}",
    ]
    assert not Path("run.yaml").exists()


def test_a_directory_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    write(AXOLOTL)
    assert main(["import", "theirs.yaml", "-o", "no/run.yaml"]) == 3
    assert capsys.readouterr().err == "error: no/run.yaml: cannot be written: No such file or directory\n"


@pytest.mark.parametrize("text", ["[1, 2]", "{}", "3"])
def test_a_file_that_is_no_config(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(text)
    assert main(["import", "theirs.yaml"]) == 2
    assert capsys.readouterr().err == "error: theirs.yaml:1:1: a config consists of `key: value` lines\n"


def test_the_defaults_of_the_tool_are_written_out() -> None:
    imported = import_config(write(TRL))
    config = read(imported)
    assert imported.tool == "TRL"
    assert (config.num_epochs, config.micro_batch_size, config.lr_scheduler) == (3.0, 8, "linear")
    assert (config.warmup_ratio, config.sample_packing, config.sequence_len) == (0.0, False, 64)
    assert config.train_on_inputs == "conversations"
    assert "train_on_inputs: conversations  # the default of TRL\n" in imported.text
    assert not [each for each in imported.outcomes if each.fate == "undecided"]


def test_the_mask_of_axolotl_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    sets = "{path: b.jsonl, type: sharegpt, roles_to_train: [user]}, {path: c.jsonl, type: sharegpt}"
    path = write(AXOLOTL.replace("{path: a.jsonl, type: alpaca}", "{path: a.jsonl, type: chat_template}, " + sets))
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 0
    rows = [line for line in capsys.readouterr().err.splitlines() if "datasets.type" in line]
    ours = "type: chat_template, roles_to_train: [assistant], train_on_eos: turn, the default of axolotl"
    assert f"translated  datasets.type: chat_template  ->  {ours}" in rows
    config = load_config(Path("run.yaml")).config
    expected = [(("assistant",), "turn"), (("user",), None), (("assistant",), "turn")]
    assert [(each.roles_to_train, each.train_on_eos) for each in config.datasets] == expected
    assert load_config(Path("run.yaml")).notices == (), "and it says nothing more about masks"
    assert path.read_text()


def test_a_key_that_the_rows_of_a_set_do_not_have_read_is_left_to_the_user() -> None:
    """axolotl's conversations have the column `system`, and its texts and instructions no system prompt."""
    sets = "{path: b.jsonl, type: completion, field_system: sys, roles: {user: [human]}}, "
    sets += "{path: c.jsonl, type: chat_template, field_system: sys}, {path: d.jsonl, type: alpaca, field_system: sys}"
    tests = "test_datasets: [{path: e.jsonl, type: completion, message_field: chats}]\n"
    imported = import_config(write(AXOLOTL.replace("{path: a.jsonl, type: alpaca}", sets) + tests))
    found = [(each.written, each.reason) for each in imported.outcomes if each.written.startswith("datasets.field_")]
    not_read = "it is not read for `type: completion`"
    assert found == [
        ("datasets.field_system", not_read),
        ("datasets.field_system", "axolotl has the column `system`, whatever this says"),
        ("datasets.field_system", "axolotl gives these rows no system prompt"),
        ("datasets.field_messages", not_read),
    ]
    undecided = [each.written for each in imported.outcomes if each.fate == "undecided"]
    assert undecided.count("datasets.field_system") == 3
    assert {"datasets.roles", "datasets.field_messages"} < set(undecided)
    config = read(imported)
    assert [each.field_system for each in config.datasets] == [None, "system", None]


def test_a_set_of_preferences_keeps_its_system_prompt_and_no_key_that_is_not_read() -> None:
    sets = "{path: b.jsonl, type: chatml.intel, field_output: say}"
    imported = import_config(write(AXOLOTL.replace("{path: a.jsonl, type: alpaca}", sets) + "rl: dpo\n"))
    reasons = {each.written: each.reason for each in imported.outcomes if each.fate == "undecided"}
    assert reasons["datasets.field_output"] == "it is not read for `rl: dpo`"
    [found] = read(imported).datasets
    assert (found.field_system, found.field_prompt) == ("system", "question")


def test_axolotl_trains_the_words_of_all_turns() -> None:
    path = write(AXOLOTL.replace("type: alpaca", "type: chat_template") + "train_on_inputs: true\n")
    reasons = {each.written: each.reason for each in import_config(path).outcomes if each.fate == "undecided"}
    assert reasons["train_on_inputs"].startswith("axolotl then trains the words of all turns")
    config = read(import_config(path))
    assert (config.train_on_inputs, config.datasets[0].roles_to_train) == (True, None)


@pytest.mark.parametrize("given", ["", "load_best_model_at_end: false\n"])
def test_axolotl_loads_the_best_model_of_a_run_that_may_stop_early(given: str) -> None:
    steps = "val_set_size: 0.1\neval_steps: 5\nsave_steps: 5\n"
    text = import_config(write(f"{AXOLOTL}{steps}early_stopping_patience: 3\n{given}")).text
    config = load_config(write(text)).config
    assert (config.early_stopping_patience, config.saves_best) == (3, True)
    assert import_config(write(f"{TRL}{steps}")).text.count("load_best_model_at_end") == 0
    text = import_config(write(f"{AXOLOTL}{steps}early_stopping_patience:\n{given}")).text
    assert load_config(write(text)).config.saves_best is False


def test_lora_plus_of_axolotl_decays_nothing_and_has_one_rate() -> None:
    keys = "adapter: lora\nloraplus_lr_ratio: 16\nweight_decay: 0.1\nembedding_lr: 1.0e-5\n"
    imported = import_config(write(AXOLOTL + keys))
    rows = {each.written: each for each in imported.outcomes}
    assert rows["weight_decay"].ours == "weight_decay: 0, since axolotl decays nothing with LoRA+"
    assert (rows["embedding_lr"].fate, "axolotl does not use it" in rows["embedding_lr"].reason) == ("noted", True)
    config = read(imported)
    assert (config.loraplus_lr_ratio, config.weight_decay, config.embedding_lr) == (16.0, 0.0, None)
    without = read(import_config(write(AXOLOTL + keys.replace("16", "null"))))
    assert (without.weight_decay, without.embedding_lr) == (0.1, 1e-5)
    theirs = "finetuning_type: lora\nstage: sft\nloraplus_lr_ratio: 16\nweight_decay: 0.1\n"
    llama_factory = "model_name_or_path: org/name\ndatasets: a.jsonl\n" + theirs
    assert read(import_config(write(llama_factory))).weight_decay == 0.1


@pytest.mark.parametrize(
    ("lines", "expected"), [("", 10), ("logging_steps: 3\n", 3), ("eval_steps: 5\n", 5), ("evals_per_epoch: 2\n", None)]
)
def test_evaluations_of_trainer_are_as_frequent_as_its_logs(lines: str, expected: int | None) -> None:
    assert read(import_config(write(f"{TRL}val_size: 0.1\neval_strategy: steps\n{lines}"))).eval_steps == expected


def test_moments_of_more_bits_are_named_in_the_new_file(capsys: pytest.CaptureFixture[str]) -> None:
    write(f"{TRL}optim: adamw_torch_4bit\n")
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 0
    note = "Ratel keeps its moments in fp32, on NVMe"
    assert f"optimizer: adamw  # was `optim: adamw_torch_4bit`; {note}\n" in Path("run.yaml").read_text()
    assert f"optim: adamw_torch_4bit  ->  optimizer: adamw ({note})" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["early_stopping_patience", "early_stopping_steps"])
def test_patience_by_other_names(key: str) -> None:
    text = f"{TRL}eval_strategy: steps\neval_steps: 5\nval_size: 0.1\n{key}: 3\nmetric_for_best_model: eval_loss\n"
    config = read(import_config(write(text)))
    assert (config.early_stopping_patience, config.metric_for_best_model, config.saves_best) == (3, "loss", False)


def test_an_empty_norm_is_the_default_of_axolotl() -> None:
    """In a config of ours, and as an argument of other trainers, nothing turns clipping off."""
    imported = import_config(write(f"{AXOLOTL}max_grad_norm:\n"))
    row = next(each for each in imported.outcomes if each.written == "max_grad_norm")
    assert (row.fate, row.ours) == ("translated", "max_grad_norm: 1.0, the trainer's default")
    assert read(imported).max_grad_norm == 1.0
    assert read(import_config(write(f"{TRL}max_grad_norm:\n"))).max_grad_norm is None


@pytest.mark.parametrize(("stage", "packing"), [("pt", True), ("sft", False), ("pt\npacking: false", False)])
def test_llama_factory_packs_plain_texts_by_default(stage: str, packing: bool) -> None:
    text = f"model_name_or_path: m\ndataset: a.jsonl\ntemplate: qwen\nstage: {stage}\n"
    assert read(import_config(write(text))).sample_packing == packing


def test_the_steps_of_the_warm_up_win_over_its_ratio() -> None:
    config = read(import_config(write(TRL + "warmup_ratio: 0.1\nwarmup_steps: 5\n")))
    assert (config.warmup_steps, config.warmup_ratio) == (5, 0.0)


def test_a_form_of_data_that_ratel_does_not_have() -> None:
    for kind in ("context_qa.load_404", "{format: '{instruction}', field_instruction: ask}"):
        imported = import_config(write(AXOLOTL.replace("type: alpaca", f"type: {kind}")))
        assert "datasets.type" in [each.written for each in imported.outcomes if each.fate == "undecided"]
        assert read(imported).datasets[0].type == "auto"


def test_a_key_without_a_value_that_nobody_knows_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """There it has its default; in a config of ours it may be a slip."""
    path = write(f"{AXOLOTL}something_old:\n")
    outcomes = {outcome.written: outcome for outcome in import_config(path).outcomes}
    assert (outcomes["something_old"].fate, outcomes["something_old"].reason) == ("ignored", "it is empty")
    assert outcomes["something_new"].fate == "undecided"
    path.write_text("base_model: base\ndatasets: a.jsonl\nsomething_old:\n")
    with pytest.raises(BadInput, match="unknown key `something_old`"):
        load_config(path)


@pytest.mark.parametrize("key", ["reinit_weights", "train_from_scratch"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_weights_that_are_drawn_anew(key: str, value: str) -> None:
    assert read(import_config(write(f"{AXOLOTL}{key}: {value}\n"))).random_init == (value == "true")


def test_the_old_name_of_special_tokens() -> None:
    """A list of tokens is something else: they are added to the vocabulary."""
    imported = import_config(write(f"{AXOLOTL}tokens: {{eos_token: </s>}}\n"))
    assert read(imported).special_tokens == {"eos_token": "</s>"}
    assert read(import_config(write(f"{AXOLOTL}tokens: [</s>]\n"))).tokens == ("</s>",)
    with pytest.raises(BadInput, match="`tokens` must be a list, not a mapping"):
        import_config(write(f"{AXOLOTL}special_tokens: {{eos_token: </s>}}\ntokens: {{eos_token: <s>}}\n"))


def test_a_long_text_stays_a_text() -> None:
    template = "{% for message in messages %}" + "{{ message['content'] }} # " * 20 + "{% endfor %}"
    assert read(import_config(write(TRL + f"chat_template: {json.dumps(template)}\n"))).chat_template_jinja == template


def test_a_constant_rate_has_no_warm_up_there() -> None:
    text = "base_model: m\ndatasets: a\nstrict: false\nlearning_rate: 1e-5\nwarmup_ratio: 0.1\nlr_scheduler: "
    for name, ratio in (("constant", 0.0), ("constant_with_warmup", 0.1)):
        assert read(import_config(write(text + name))).warmup_ratio == ratio


def test_reasons_are_true_of_the_value() -> None:
    text = import_config(write(f"{AXOLOTL}finetuning_type: full\nstage: sft\nnvfp4: false\n")).text
    for line in ("finetuning_type: full", "stage: sft"):
        assert f"#   {line}   (with this value it changes nothing)\n" in text
    assert "#   nvfp4: false   (it is off or empty)\n" in text


SHARED = "base_model: m\ndatasets: [{path: a.jsonl}]\nmicro_batch_size: 2\nval_set_size: 0.1\n"
OURS = f"{SHARED}sequence_len: 64\nsample_packing: true\ndtype: float32\n"


def test_a_config_of_ratel_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    write(OURS)
    assert main(["import", "theirs.yaml"]) == 0
    captured = capsys.readouterr()
    assert "a config of Ratel already; nothing needs a translation" in captured.err
    assert "the default of" not in captured.out
    assert import_config(write(f"{OURS}gptq: false\n")).tool == "axolotl"
    shared = import_config(write(SHARED))
    assert shared.tool == "axolotl" and "sequence_len: 512" in shared.text, "its defaults are written out"


def test_the_config_of_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ('{"architectures": ["X"], "model_type": "llama", "max_length": 20}', '{"model_type": "llama"}'):
        write(text)
        assert main(["import", "theirs.yaml"]) == 2
        assert capsys.readouterr().err == (
            "error: theirs.yaml:1:1: this is the config of a model, not of a training\n"
            "hint: name the config of the training; this model is its `base_model`\n"
        )


def test_mistral_common_is_a_key_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "base_model: org/name\ntokenizer_use_mistral_common: true\nadapter: qlora\nload_in_4bit: true\n"
        "datasets: [{path: a.jsonl, type: chat_template}]\nmicro_batch_size: 1\nsequence_len: 64\nlearning_rate: 1e-4\n"
    )
    assert main(["import", "theirs.yaml", "-o", "run.yaml"]) == 0
    told = capsys.readouterr().err
    assert "from        a config of axolotl" in told and "tokenizer_use_mistral_common, " in told
    assert load_config(Path("run.yaml")).config.tokenizer_use_mistral_common
    (dataset,) = load_config(Path("run.yaml")).config.datasets
    assert dataset.roles_to_train == ("assistant",)


def test_mistral_common_may_be_empty() -> None:
    write("base_model: org/name\ndatasets: [a.jsonl]\ntokenizer_use_mistral_common:\n")
    assert not load_config(Path("theirs.yaml")).config.tokenizer_use_mistral_common
