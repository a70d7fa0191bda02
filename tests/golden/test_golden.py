"""Runs that an earlier version left, killed after a step: they are verified, exported and resumed.

The files in `data` are those of `tests/golden/make.py`. A format may change, but what is there must be read, or be
refused with the way; so these archives are never made again.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import ratel_cli
from tests.e2e.latents import denoised_by_pytorch, latents_of
from tests.e2e.preferences import pairs, recipe
from tests.e2e.runs import DTYPES, Config, ratel
from tests.e2e.trained import LORA_IN_PEFT, named_as_exported
from tests.golden.loop import LEARNING_RATE, WEIGHT_DECAY, batches, built, loss_of, train
from tests.golden.make import EXPECTED, LOOP, LOOP_STORE, NUM_APPLIED, RUNS, SAVED, STATE, hashes_of
from tests.golden.make import state_of as stored_state
from tests.quantised import dequantised_weights
from tests.ranks.oracle import cuts_of
from tests.reference import Begun, Recipe, train_in_memory, train_module
from tests.trl_oracle import tune

DATA = Path(__file__).with_name("data")
NUM_STEPS = 6
Tensors = Mapping[str, torch.Tensor]
GoOn = Callable[[Config, Tensors, Begun], tuple[Tensors, list[float]]]
"""From a config, fp32 weights and moments to what plain PyTorch has after the last step, and the losses till then."""
_SHORT = ("full fp32", "nf4 adapter")


def unpacked(name: str, place: Path) -> Config:
    """The config of the run, beside all that it has left."""
    with tarfile.open(DATA / f"{name.replace(' ', '-')}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    return Config(place / "run.yaml")


def kept_in(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The fp32 weights by parameter, and its moments."""
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for key, values in load_file(path).items():
        name, kind = key.split(" ")
        if kind == "weight":
            weights[name] = values
        else:
            moments.setdefault(name, {})[kind] = values.abs() if kind == "v32" else values  # its sign is a tie's bit
    return weights, moments


def state_of(place: Path) -> tuple[dict[str, torch.Tensor], Begun]:
    """The fp32 weights by parameter, and what training goes on from."""
    expected = json.loads((place / EXPECTED).read_text())
    weights, moments = kept_in(place / STATE)
    return weights, Begun(step=expected["step"], num_updates=expected["num_updates"], moments=moments)


def of_text(config: Config, weights: Tensors, begun: Begun, **changes: object) -> tuple[Tensors, list[float]]:
    base = Path("base")
    data, given = config.load_data(), {**load_file(base / "model.safetensors"), **weights}
    steps = [data.step(step) for step in range(NUM_STEPS)]
    trained = train_in_memory(
        LlamaConfig.from_pretrained(base), given, steps, replace(config.recipe, begun=begun, **changes)
    )
    return trained.weights, list(trained.losses)


def of_float16(config: Config, weights: Tensors, begun: Begun) -> tuple[Tensors, list[float]]:
    return of_text(config, weights, begun, loss_scale=json.loads(Path(EXPECTED).read_text())["loss_scale"])


def of_adapter(config: Config, weights: Tensors, begun: Begun) -> tuple[Tensors, list[float]]:
    lora = (*((key, value) for key, value in LORA_IN_PEFT if key != "lora_dropout"), ("lora_dropout", 0.1))
    if RUNS["nf4 adapter"].keys.items() <= _keys(config).items():
        model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16)
        files = load_file("base/model.safetensors")
        weights = {**dequantised_weights(model, files, "nf4 double", torch.bfloat16), **weights}
    trained, losses = of_text(config, weights, begun, lora=lora)
    return named_as_exported(dict(trained)), losses


def of_ranks(config: Config, weights: Tensors, begun: Begun) -> tuple[Tensors, list[float]]:
    whole = config.with_name("whole.yaml")
    whole.write_text(config.read_text().replace("gradient_accumulation_steps: 2", "gradient_accumulation_steps: 4"))
    cuts = cuts_of(LlamaConfig.from_pretrained("base"), RUNS["two ranks"].num_ranks)
    return of_text(whole, weights, begun, of_rank=2, cuts=cuts)


def of_pairs(config: Config, weights: Tensors, begun: Begun) -> tuple[Tensors, list[float]]:
    """By TRL, whose sums have another order: see `LOSSES`."""
    keys = _keys(config)
    of_trl = recipe(
        "dpo",
        num_steps=NUM_STEPS,
        learning_rate=keys["learning_rate"],
        max_length=keys["sequence_len"],
        begun=begun,
        begun_weights=dict(weights),
    )
    tuned = tune(Path("base"), pairs(24), of_trl)
    return tuned.weights, tuned.losses


def of_latents(config: Config, weights: Tensors, begun: Begun) -> tuple[Tensors, list[float]]:
    data = latents_of(config)
    steps = [data.step(step) for step in range(NUM_STEPS)]
    trained = denoised_by_pytorch(Path("base"), dict(weights), steps, replace(config.recipe, begun=begun))
    return trained.weights, list(trained.losses)


GO_ON: Mapping[str, GoOn] = {
    "fp16": of_float16,
    "adapter": of_adapter,
    "nf4 adapter": of_adapter,
    "dpo": of_pairs,
    "two ranks": of_ranks,
    "latents": of_latents,
}
LOSSES, WEIGHTS = {"dpo": 1e-6, "latents": 1e-6}, {"dpo": 1e-6}
"""The largest difference, where bits do not have to be equal: sums in TRL, and over pixels, have another order."""


def _keys(config: Config) -> dict[str, object]:
    keys = yaml.safe_load(config.read_text())
    assert isinstance(keys, dict)
    return keys


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _SHORT else pytest.mark.full) for name in RUNS]
)
def test_a_run_of_before_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had committed and saved is what it was; further steps are those of plain PyTorch from there."""
    config, go_on = unpacked(name, tmp_path), GO_ON.get(name, of_text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended = ratel("verify", "run.yaml")
    assert ended.code == 0, ended.stderr
    weights, begun = state_of(tmp_path)
    expected = json.loads((tmp_path / EXPECTED).read_text())["exports"]
    for step in (begun.step, SAVED):
        chosen = ["--step", str(step)] if step == SAVED else []
        ended = ratel("export", "run.yaml", "-o", f"export-{step}", *chosen)
        assert ended.code == 0, ended.stderr
        assert hashes_of(tmp_path / f"export-{step}") == expected[str(step)]
    wanted, losses = go_on(Config("run.yaml"), weights, begun)
    number = RUNS[name].num_ranks
    stderr = Config("run.yaml").succeed_ranks(number) if number > 1 else Config("run.yaml").succeed()
    assert f"resuming from step {begun.step}" in stderr
    found = {key: each for file in config.output.glob("*.safetensors") for key, each in load_file(file).items()}
    resumed = [line["loss"] for line in config.metrics][begun.step :]
    assert resumed == pytest.approx(losses, rel=LOSSES.get(name, 0.0), abs=0.0)
    assert found.keys() == wanted.keys()
    dtype = DTYPES[str(_keys(config)["dtype"])]
    for key, values in wanted.items():
        difference = (found[key].double() - values.to(torch.float32 if "lora_" in key else dtype).double()).abs().max()
        assert float(difference) <= WEIGHTS.get(name, 0.0), key


def test_a_snapshot_of_before_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = unpacked("full fp32", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.rmtree("out.store")
    before = [line["loss"] for line in config.metrics]
    ended = ratel("restore", "run.yaml")
    assert ended.code == 0, ended.stderr
    # From the snapshot's step, not the last one: the steps between have other bits on another kind of processor.
    state, progress = stored_state(Path("run.yaml"))
    save_file(state, STATE)
    weights, moments = kept_in(Path(STATE))
    begun = Begun(step=progress.step, num_updates=progress.updates, moments=moments)
    wanted, losses = of_text(Config("run.yaml"), weights, begun)
    Config("run.yaml").succeed()
    after = [line["loss"] for line in config.metrics]
    assert after[begun.step :] == losses
    assert 0 < begun.step < len(before) and after[: len(before)] == pytest.approx(before, rel=1e-5)
    found = load_file("out/model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in found)


def test_tokens_of_before_serve_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of tokens is read, or made anew: a run trains on the same tokens as before."""
    config = unpacked("full bf16", tmp_path)
    before = config.metrics[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Config("run.yaml").succeed("output_dir=again", "max_steps=1")
    (line,) = (tmp_path / "again" / "run" / "metrics.jsonl").read_text().splitlines()
    after = json.loads(line)
    assert after["tokens"] == before["tokens"] and after["loss"] == pytest.approx(before["loss"], rel=1e-3)


@pytest.mark.filterwarnings("ignore:ratel. the software was:UserWarning")
def test_a_hooked_module_of_before_goes_on(tmp_path: Path) -> None:
    """What its loop had committed is what it was; further steps are those of plain PyTorch from there."""
    unpacked(LOOP, tmp_path)
    weights, moments = kept_in(tmp_path / STATE)
    plain, module = built(), built()
    begun = Begun(step=NUM_APPLIED, num_updates=NUM_APPLIED, moments=moments)
    recipe = Recipe(dtype=torch.bfloat16, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, begun=begun)
    wanted = train_module(plain, lambda batch: loss_of(plain, batch), weights, batches(), recipe, decayed=list(weights))
    with ratel_cli.hook(module, storage=[tmp_path / LOOP_STORE]) as state:
        state.verify()
        assert state.num_steps == NUM_APPLIED
        names = {"weight": "weight", "exp_avg": "m32", "exp_avg_sq": "v32"}
        found = {
            f"{name} {names[key]}": each for name, of in state.state() for key, each in of.items() if key != "step"
        }
        kept = load_file(tmp_path / STATE)
        assert found.keys() == kept.keys() and all(torch.equal(found[key], kept[key]) for key in kept)
        assert tuple(train(module, state)) == wanted.losses
        state.save(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    trained = plain.state_dict()
    assert exported.keys() == trained.keys() and all(torch.equal(exported[key], trained[key]) for key in trained)
