"""Runs beside a quantised model, against PEFT in plain PyTorch beside the matrices that bitsandbytes makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.run.ask.evaluate import evaluate_merged
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, as_json, assert_rejected, file_hash, in_dtype, works, write_config
from tests.e2e.test_adapters import (
    CHANGES,
    IN_PEFT,
    LINEAR,
    NUM_STEPS,
    assert_same_without_its_store,
    tensors_of,
)
from tests.e2e.trained import assert_trained, in_plain_torch
from tests.engine.architectures import tiny_config
from tests.engine.machine import attention_of
from tests.quantised import Form, dequantised_weights
from tests.reference import Trained

KEYS: dict[Form, dict[str, object]] = {
    "nf4 double": {"load_in_4bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": False},
    "int8": {"load_in_8bit": True},
}
IN_TRANSFORMERS: dict[Form, dict[str, object]] = {
    "nf4 double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True},
}


def plain(config: Config, base: Path, form: Form, dtype: str = "bfloat16") -> Trained:
    """What PEFT trains in plain PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
    weights = dequantised_weights(model, load_file(base / "model.safetensors"), form, DTYPES[dtype])
    return in_plain_torch(config, base, weights=weights, lora=tuple(IN_PEFT.items()))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("nf4 double", "bfloat16"),
        pytest.param("nf4", "float32", marks=pytest.mark.nightly),
        pytest.param("int8", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_the_adapter_is_what_peft_trains(make_config: MakeConfig, base: Path, form: Form, dtype: str) -> None:
    """Killed in between, too. The files of the base stay as they are."""
    config, before = make_config(**CHANGES, **KEYS[form], dtype=dtype), file_hash(base / "model.safetensors")
    config.run_until_killed(kill_at="commit.written:3")
    config.succeed()
    assert file_hash(base / "model.safetensors") == before
    assert_trained(config, plain(config, base, form, dtype))
    assert "bit for bit" in works("verify", config).stdout


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merging_is_into_the_model_before(make_config: MakeConfig, base: Path, dtype: str, tmp_path: Path) -> None:
    config, merged = make_config(**CHANGES, **KEYS["nf4 double"], dtype=dtype), tmp_path / "merged"
    config.succeed()
    works("merge", config, "-o", merged, "--base", "original")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    assert_merged(merged, base, PeftModel.from_pretrained(model, config.output))


def assert_merged(merged: Path, base: Path, model: PeftModel) -> None:
    """Linear layers are what PEFT merges, with an adapter or without; all else is the base model's."""
    wanted = model.merge_and_unload().state_dict()
    found, before = tensors_of(merged), tensors_of(base)
    assert found.keys() == before.keys()
    for name, values in found.items():
        is_linear = name.removesuffix(".weight").endswith(tuple(LINEAR))
        assert torch.equal(values, wanted[name] if is_linear else before[name]), name
        assert values.dtype == before[name].dtype, name
    works("verify", merged)


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "dtype", "of_files", "keys"),
    [
        ("nf4 double", "bfloat16", "bfloat16", {"lora_target_modules": ["q_proj"]}),
        ("nf4", "float32", "bfloat16", {}),
        ("int8", "bfloat16", "float32", {}),
    ],
)
def test_merging_is_into_what_was_trained_beside(
    make_config: MakeConfig,
    base: Path,
    rows: Path,
    tmp_path: Path,
    form: Form,
    dtype: str,
    of_files: str,
    keys: dict[str, object],
) -> None:
    """The merged model is the one that is evaluated. What has no adapter is dequantised, too."""
    own, merged = in_dtype(base, of_files), tmp_path / "merged"
    config = make_config(**CHANGES, **KEYS[form], **keys, dtype=dtype, base=own)
    config.succeed()
    shown = shown_losses(works("merge", config, "-o", merged).stderr)
    model = AutoModelForCausalLM.from_pretrained(
        own,
        dtype=DTYPES[dtype],
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(**IN_TRANSFORMERS[form], bnb_4bit_compute_dtype=DTYPES[dtype]),
    )
    model = model.dequantize().to(DTYPES[of_files])
    assert_merged(merged, own, PeftModel.from_pretrained(model, config.output))
    assert shown["the adapter beside the quantised base"] == loss_of(config.output, rows, dtype)
    assert shown["merged, --base dequantised"] == loss_of(merged, rows, dtype)
    assert loss_of(config.output, rows, dtype) == pytest.approx(loss_of(merged, rows, dtype), rel=1e-3)


def shown_losses(text: str) -> dict[str, float]:
    """What a merge reports of the models, by their names."""
    lines = text.partition("loss on 8 samples of ")[2].splitlines()[1:]
    return {name.strip(): float(loss) for name, loss in (line.rsplit("  ", 1) for line in lines)}


def loss_of(model: Path, rows: Path, dtype: str) -> float:
    """What `ratel eval` finds on the first eight rows."""
    ended = works(
        "eval", model, rows, f"dtype={dtype}", "datasets.0.type=completion", "datasets.0.max_samples=8", "--json"
    )
    return round(json.loads(ended.stdout)["loss"], 4)


def test_a_merge_shows_the_losses_of_both_bases(
    make_config: MakeConfig, base: Path, rows: Path, tmp_path: Path
) -> None:
    """On the rows for evaluation, if there are some. Without rows there is a merge, and the reason."""
    own, other = in_dtype(base, "bfloat16"), tmp_path / "other.jsonl"
    other.write_text("".join(rows.read_text().splitlines(keepends=True)[::-1]))
    config = make_config(
        **{**CHANGES, "max_steps": 2, "learning_rate": 0.1},
        **KEYS["nf4"],
        dtype="bfloat16",
        base=own,
        test_datasets=[{"path": str(other), "type": "completion"}],
    )
    config.succeed()
    ended = works("merge", config, "-o", tmp_path / "merged", "--base", "original")
    assert f"8 samples of {other}, in bfloat16" in ended.stderr
    shown = shown_losses(ended.stderr)
    assert list(shown) == [
        "the adapter beside the quantised base",
        "merged, --base dequantised",
        "merged, --base original",
    ]
    assert shown["the adapter beside the quantised base"] == loss_of(config.output, other, "bfloat16")
    assert shown["merged, --base original"] == loss_of(tmp_path / "merged", other, "bfloat16")
    assert len(set(shown.values())) > 1
    other.unlink()
    ended = works("merge", config, "-o", tmp_path / "without")
    assert f"were not compared: {other}: no such file" in ended.stderr.replace("\n", " ")
    assert (tmp_path / "without" / "config.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(("family", "form"), [("mixtral", "nf4 double"), ("gpt_oss", "int8"), ("qwen3_moe", "nf4")])
def test_experts_are_quantised_too(base: Path, rows: Path, tmp_path: Path, family: str, form: Form) -> None:
    """Killed, verified, evaluated with the store and without it, and merged into the experts of the files; one of them
    into those that it computed with, too."""
    own, settings = tmp_path / "own", tiny_config(family, vocab_size=400)
    AutoModelForCausalLM.from_config(settings).save_pretrained(own)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / name, own)
    changes = {**CHANGES, **KEYS[form], "quantize_moe_experts": True, "sequence_len": 16, "dtype": "bfloat16"}
    changes |= {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    config = write_config(tmp_path, base=own, rows=rows, **changes)
    config.run_until_killed(kill_at="commit.written:3")
    config.succeed()
    model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.bfloat16)
    before = {name: each.detach().float() for name, each in model.named_parameters()}
    lora = {**IN_PEFT, "target_modules": changes["lora_target_modules"]}
    quantised = dequantised_weights(model, before, form, torch.bfloat16, with_experts=True)
    changed = {"lora": tuple(lora.items()), "attn_implementation": attention_of(settings)}
    assert_trained(config, in_plain_torch(config, own, weights=quantised, **changed))
    works("verify", config)
    works("merge", config, "-o", tmp_path / "merged", "--base", "original")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(merged[name], values) for name, values in model.state_dict().items() if "expert" in name)
    if family == "mixtral":
        works("merge", config, "-o", tmp_path / "dequantised")
        model.load_state_dict({name: values.bfloat16() for name, values in quantised.items()})
        theirs = PeftModel.from_pretrained(model, config.output).merge_and_unload().state_dict()
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised", dtype=torch.bfloat16).state_dict()
        assert found.keys() == theirs.keys()
        assert all(torch.equal(found[name], values) for name, values in theirs.items())
    assert_same_without_its_store(config, rows)


@pytest.mark.full
def test_a_run_goes_on_with_the_same_quantisation(make_config: MakeConfig) -> None:
    config = make_config(**{**CHANGES, **KEYS["nf4 double"], "max_steps": 2})
    config.succeed()
    message = "bnb_4bit_use_double_quant was True, is now False"
    assert_rejected(config.finetune("bnb_4bit_use_double_quant=false", f"max_steps={NUM_STEPS}"), 2, message)
    for form, message in (("nf4", "bnb_4bit_use_double_quant was"), ("int8", "load_in_4bit was")):
        other = make_config(form, **{**CHANGES, **KEYS[form]})
        assert_rejected(other.finetune("--from", str(config.output)), 2, message)
    started = make_config("started", **{**CHANGES, **KEYS["nf4 double"], "max_steps": 4})
    started.succeed("--from", str(config.output))
    assert started.metrics[0]["step"] == 3
    afresh = make_config("afresh", **{**CHANGES, **KEYS["nf4 double"], "max_steps": 4})
    afresh.succeed("--from", str(config.output), "--fresh-optimizer")


@pytest.mark.full
def test_the_plan_counts_bytes_of_quantised_weights(make_config: MakeConfig) -> None:
    sizes, plans = {}, {}
    for form, keys in {**KEYS, "none": {}}.items():
        config = make_config(form, **CHANGES, **keys)
        plans[form] = as_json("plan", config)
        config.succeed()
        sizes[form] = config.store.stat().st_size
    numbers = {plan["model"]["num_parameters"] for plan in plans.values()}
    assert len(numbers) == 1, "what is counted as a parameter is the same"
    # What double quantisation saves is less than a page here, and its parts begin at multiples of 256 bytes.
    assert max(sizes["nf4 double"], sizes["nf4"]) <= sizes["int8"] < sizes["none"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"load_in_4bit": True, "quantize_moe_experts": True}, "has no stacks of experts that could be quantised"),
        ({"load_in_4bit": True, "lora_modules_to_save": ["o_proj"]}, "o_proj is quantised, and cannot be trained"),
    ],
)
def test_quantisations_that_cannot_be(make_config: MakeConfig, keys: dict[str, object], message: str) -> None:
    assert_rejected(make_config(**{**CHANGES, **keys}).finetune(), 2, message)


def test_a_merge_of_preference_data_has_no_losses_to_compare(make_config: MakeConfig) -> None:
    config = load_config(make_config(adapter="lora", load_in_4bit=True, rl="dpo")).config
    with pytest.raises(BadInput, match="its rows are preference data"):
        evaluate_merged(config, 1, RunLog())
