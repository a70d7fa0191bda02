"""The central promise: the command line exports the weights that plain PyTorch trains on the same batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from ratel_cli.config.load import load_config
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import DTYPES, export_hash, exported, load_data, metrics, output_of, recipe_of, store_of, succeed
from tests.reference import Trained, train_in_memory


def reference(config: Path, base: Path, *, loss_scale: float = 1.0) -> Trained:
    """The same training in memory, with plain PyTorch."""
    data, device = load_data(config), compute_device(load_config(config).config.device).type
    recipe = replace(recipe_of(config), loss_scale=loss_scale, device=device)
    steps = [data.step(step) for step in range(len(metrics(config)))]
    return train_in_memory(LlamaConfig.from_pretrained(base), load_file(base / "model.safetensors"), steps, recipe)


def check_same(config: Path, trained: Trained, dtype: str) -> None:
    """Compare weights and losses bit for bit."""
    weights = exported(config)
    assert weights.keys() == trained.weights.keys()
    different = [name for name in weights if not torch.equal(weights[name], trained.weights[name].to(DTYPES[dtype]))]
    assert different == []
    assert [line["loss"] for line in metrics(config)] == list(trained.losses)
    assert [line["grad_norm"] for line in metrics(config)] == list(trained.norms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_is_what_pytorch_trains(make_config: MakeConfig, base: Path, dtype: str) -> None:
    config = make_config(dtype=dtype)
    succeed(config)
    trained = reference(config, base)
    check_same(config, trained, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(output_of(config))
    in_memory = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(base), dtype=DTYPES[dtype])
    in_memory.load_state_dict({name: weight.to(DTYPES[dtype]) for name, weight in trained.weights.items()})
    tokens = load_data(config).step(0)[0].input_ids
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, in_memory.eval()(tokens).logits)


@pytest.mark.full
def test_unpacked_rows(make_config: MakeConfig, base: Path) -> None:
    config = make_config(sample_packing=False)
    succeed(config)
    check_same(config, reference(config, base), "float32")


@pytest.mark.full
def test_a_tied_model_stays_tied(make_config: MakeConfig, tied_base: Path) -> None:
    config = make_config(base=tied_base, gradient_accumulation_steps=1)
    succeed(config)
    check_same(config, reference(config, tied_base), "float32")
    assert "lm_head.weight" not in exported(config)
    model = AutoModelForCausalLM.from_pretrained(output_of(config))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.nightly
def test_half_precision_scales_its_loss(make_config: MakeConfig, base: Path) -> None:
    config = make_config(dtype="float16", max_steps=1)
    succeed(config)
    check_same(config, reference(config, base, loss_scale=2.0**16), "float16")


@pytest.mark.nightly
def test_a_step_that_overflows_is_not_applied(make_config: MakeConfig, base: Path) -> None:
    """At this rate the second step's gradients are too large for fp16 times 65536."""
    config = make_config(dtype="float16")
    stderr = succeed(config)
    lines = metrics(config)
    assert [line["applied"] for line in lines] == [True, False, True, True]
    assert stderr.count("skipped: gradients overflowed") == 1
    assert lines[3]["loss"] < lines[0]["loss"]
    assert all(torch.isfinite(weight).all() for weight in exported(config).values())
    with (
        open_queue("threads", notice=print) as queue,
        Store.open([store_of(config).parent], queue=queue, identity=None) as store,
    ):
        progress = store.progress
    assert (progress.step, progress.updates, progress.loss_scale) == (4, 3, 2.0**15)


@pytest.mark.nightly
def test_random_weights_from_the_initialiser(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    """No weight file is read. The same seed gives the same weights."""
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "shape").mkdir(exist_ok=True)
            (tmp_path / "shape" / path.name).write_bytes(path.read_bytes())
    first, second, other = (
        make_config(name, base=tmp_path / "shape", random_init=True, seed=seed, max_steps=2)
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    for config in (first, second, other):
        succeed(config)
    assert export_hash(first) == export_hash(second) != export_hash(other)
    assert exported(first).keys() == load_file(base / "model.safetensors").keys()


@pytest.mark.parametrize("changes", [
    pytest.param({"engine": "io_uring"}, marks=pytest.mark.io_uring),
    {"engine": "threads", "durability": "none"},
    pytest.param({"engine": "threads", "keep_generations": 2}, marks=pytest.mark.nightly),
    {"engine": "threads", "paths": ["a", "b"]},
], ids=["io_uring", "in place", "more slots", "two directories"])  # fmt: skip
def test_where_the_state_lies_does_not_matter(
    make_config: MakeConfig, tmp_path: Path, plain_run: Path, changes: dict[str, object]
) -> None:
    if changes["engine"] == "io_uring":
        try:
            open_queue("io_uring", notice=lambda text: None).close()
        except EnvironmentFailure as refusal:
            pytest.skip(refusal.message)
    paths = [tmp_path / name for name in changes.get("paths", [])]  # type: ignore[attr-defined]
    config = make_config(storage={**changes, "paths": [str(path) for path in paths]})
    succeed(config)
    assert export_hash(config) == export_hash(plain_run)
    assert all(next(path.glob("out-*.store/ratel.store")).stat().st_size > 0 for path in paths)


@pytest.mark.full
def test_the_test_can_fail(make_config: MakeConfig, plain_run: Path) -> None:
    config = make_config(learning_rate=0.010001)
    succeed(config)
    assert export_hash(config) != export_hash(plain_run)
