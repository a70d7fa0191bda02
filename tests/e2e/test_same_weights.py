"""The central promise: the command line exports the weights that plain PyTorch trains on the same batches."""

from __future__ import annotations

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
from tests.e2e.runs import DTYPES, Config
from tests.e2e.trained import assert_trained, in_plain_torch
from tests.reference import Trained


def reference(config: Config, base: Path, *, loss_scale: float = 1.0) -> Trained:
    """The same training in memory, with plain PyTorch."""
    device = compute_device(load_config(config).config.device).type
    return in_plain_torch(config, base, loss_scale=loss_scale, device=device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_is_what_pytorch_trains(make_config: MakeConfig, base: Path, dtype: str) -> None:
    config = make_config(dtype=dtype)
    config.succeed()
    trained = reference(config, base)
    assert_trained(config, trained)
    loaded = AutoModelForCausalLM.from_pretrained(config.output)
    in_memory = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(base), dtype=DTYPES[dtype])
    in_memory.load_state_dict({name: weight.to(DTYPES[dtype]) for name, weight in trained.weights.items()})
    tokens = config.load_data().step(0)[0].input_ids
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, in_memory.eval()(tokens).logits)


@pytest.mark.full
def test_unpacked_rows(make_config: MakeConfig, base: Path) -> None:
    config = make_config(sample_packing=False)
    config.succeed()
    assert_trained(config, reference(config, base))


@pytest.mark.full
def test_a_tied_model_stays_tied(make_config: MakeConfig, tied_base: Path) -> None:
    config = make_config(base=tied_base, gradient_accumulation_steps=1)
    config.succeed()
    assert_trained(config, reference(config, tied_base))
    assert "lm_head.weight" not in config.exported
    model = AutoModelForCausalLM.from_pretrained(config.output)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.nightly
def test_half_precision_scales_its_loss(make_config: MakeConfig, base: Path) -> None:
    config = make_config(dtype="float16", max_steps=1)
    config.succeed()
    assert_trained(config, reference(config, base, loss_scale=2.0**16))


@pytest.mark.nightly
def test_a_step_that_overflows_is_not_applied(make_config: MakeConfig, base: Path) -> None:
    """At this rate the second step's gradients are too large for fp16 times 65536."""
    config = make_config(dtype="float16")
    stderr = config.succeed()
    lines = config.metrics
    assert [line["applied"] for line in lines] == [True, False, True, True]
    assert stderr.count("skipped: gradients overflowed") == 1
    assert lines[3]["loss"] < lines[0]["loss"]
    assert all(torch.isfinite(weight).all() for weight in config.exported.values())
    with (
        open_queue("threads", notice=print) as queue,
        Store.open([config.store.parent], queue=queue, identity=None) as store,
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
        config.succeed()
    assert first.export_hash == second.export_hash != other.export_hash
    assert first.exported.keys() == load_file(base / "model.safetensors").keys()


@pytest.mark.parametrize("changes", [
    pytest.param({"engine": "io_uring"}, marks=pytest.mark.io_uring),
    pytest.param({"engine": "liburing"}, marks=[pytest.mark.io_uring, pytest.mark.full]),
    {"engine": "threads", "durability": "none"},
    pytest.param({"engine": "threads", "keep_generations": 2}, marks=pytest.mark.nightly),
    {"engine": "threads", "paths": ["a", "b"]},
], ids=["io_uring", "liburing", "in place", "more slots", "two directories"])  # fmt: skip
def test_where_the_state_lies_does_not_matter(
    make_config: MakeConfig, tmp_path: Path, plain_run: Config, changes: dict[str, object]
) -> None:
    try:
        open_queue(changes["engine"], notice=lambda text: None).close()  # type: ignore[arg-type]
    except EnvironmentFailure as refusal:
        pytest.skip(refusal.message)
    paths = [tmp_path / name for name in changes.get("paths", [])]  # type: ignore[attr-defined]
    config = make_config(storage={**changes, "paths": [str(path) for path in paths]})
    config.succeed()
    assert config.export_hash == plain_run.export_hash
    assert all(next(path.glob("out-*.store/ratel.store")).stat().st_size > 0 for path in paths)


@pytest.mark.full
def test_the_test_can_fail(make_config: MakeConfig, plain_run: Config) -> None:
    config = make_config(learning_rate=0.010001)
    config.succeed()
    assert config.export_hash != plain_run.export_hash
