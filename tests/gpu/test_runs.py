"""`ratel` on a GPU: a config that ran on the CPU, limits, resuming, profiling and planning."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.engine.reading.weights import WeightReader
from ratel_cli.hardware import gpu
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.io.buffers import BufferPool, Lease, PinMemory
from tests.e2e.runs import (
    measured_by_each_run,
    save_base,
    write_config,
    write_rows,
)
from tests.e2e.test_new_tokens import TOKENS, grown, plain
from tests.e2e.test_other_parts import load_whole, save_whole
from tests.e2e.test_same_weights import reference
from tests.e2e.trained import assert_trained
from tests.gpu.machine import GPU, NEEDS_GPU
from tests.reference import train_in_memory
from tests.simulated_gpu import is_simulated
from tests.tiers import sample

pytestmark = NEEDS_GPU

GPU_KEY = "auto" if is_simulated() else "cuda"
"""A config's `device` for the GPU of this process."""
BFLOAT16 = {"device": GPU_KEY, "dtype": "bfloat16", "deterministic": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base", hidden_size=128)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


CROSSING = ("copies ", "weights of ", "rows of ", "gradient of ", "norms of ", "sums of ", "activations ")
"""How the purposes of buffers begin that are copied to or from a GPU."""


@pytest.mark.full
def test_the_config_that_ran_on_the_cpu_runs_on_the_gpu(
    tmp_path: Path, base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its host memory, what crosses the link is pinned, and nothing else."""
    lease, pinned = BufferPool.lease, set[str]()

    def noting(
        pool: BufferPool, num_bytes: int, purpose: str, *, crosses_link: bool = True, at_most_bytes: int | None = None
    ) -> Lease:
        if pool._pin is not None and crosses_link:
            pinned.add(purpose)
        return lease(pool, num_bytes, purpose, crosses_link=crosses_link, at_most_bytes=at_most_bytes)

    monkeypatch.setattr(BufferPool, "lease", noting)
    on_cpu = write_config(tmp_path / "cpu", base=base, rows=rows, learning_rate=1e-4)
    on_gpu = write_config(tmp_path / "gpu", base=base, rows=rows, learning_rate=1e-4, device="auto")
    on_cpu.succeed()
    output = on_gpu.succeed()
    assert pinned and {purpose for purpose in pinned if not purpose.startswith(CROSSING)} == set()
    assert "FLOP/s; one block at a time" in output
    assert all(line["gpu_peak_bytes"] > 0 and line["num_alloc_retries"] == 0 for line in on_gpu.metrics)
    for (step, loss, _), (other_step, other_loss, _) in zip(on_cpu.curve, on_gpu.curve, strict=True):
        assert (step, loss) == (other_step, pytest.approx(other_loss, rel=1e-3))
    for name, found in on_gpu.exported.items():
        # Four steps of AdamW of at most 1e-4 each. Rounding may turn their sign where a gradient is almost zero.
        assert float((found - on_cpu.exported[name]).abs().max()) <= 8.1e-4, name


@pytest.mark.full
def test_weights_and_activations_are_pinned_before_the_steps(
    tmp_path: Path, base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step that is recorded, and before the next one, whose plan moves other activations."""
    make, make_idle = BufferPool._made, BufferPool._make_idle
    ahead, in_steps = list[str](), list[str]()

    def noting(pool: BufferPool, size_bytes: int, purpose: str, pin: PinMemory | None) -> object:
        if pin is not None and pin is pool._pin:
            in_steps.append(purpose)
        return make(pool, size_bytes, purpose, pin)

    def noting_idle(pool: BufferPool, size_bytes: int, purpose: str, most_bytes: int) -> bool:
        made = make_idle(pool, size_bytes, purpose, most_bytes)
        ahead.append(in_steps.pop())
        return made

    monkeypatch.setattr(BufferPool, "_made", noting)
    monkeypatch.setattr(BufferPool, "_make_idle", noting_idle)
    write_config(tmp_path, base=base, rows=rows, activations="swap_all", **BFLOAT16).succeed()
    moved = ("weights of ", "activations of ")
    assert all(any(purpose.startswith(words) for purpose in ahead) for words in moved)
    assert [purpose for purpose in in_steps if purpose.startswith(moved)] == []


@pytest.mark.parametrize("dtype", sample(["float32", "bfloat16"], every=2, offset=1))
def test_the_export_is_what_pytorch_trains(tmp_path: Path, base: Path, rows: Path, dtype: str) -> None:
    config = write_config(tmp_path, base=base, rows=rows, dtype=dtype, device=GPU_KEY)
    config.succeed()
    assert_trained(config, reference(config, base))


def test_rows_of_tokens_are_read_in_place(
    tmp_path: Path, base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, where a row has 512 bytes: no step asks host memory to collect them."""
    config = write_config(tmp_path, base=base, rows=rows, dtype="float32", device=GPU_KEY)
    monkeypatch.setattr(WeightReader, "_rows", pytest.fail)
    config.succeed()
    plan = json.loads((config.output / "run" / "plan.json").read_text())
    assert plan["placement"]["read_in_place"] == {"model.embed_tokens.weight": "DHA"}


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_the_language_part_of_a_model_with_other_parts(tmp_path: Path, base: Path, rows: Path, family: str) -> None:
    whole = save_whole(tmp_path / "whole", base, family, torch.bfloat16)
    config = write_config(tmp_path, base=tmp_path / "whole", rows=rows, sample_packing=False, **BFLOAT16)
    config.succeed()
    loaded, _ = load_whole(config.output, dtype=torch.bfloat16)
    data, recipe = config.load_data(), replace(config.recipe, model_class=type(whole), device=GPU.type)
    batches = [data.step(step) for step in range(len(config.metrics))]
    trained = train_in_memory(whole.config, dict(whole.named_parameters()), batches, recipe)
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], values.cpu().bfloat16()) for name, values in trained.weights.items())


@pytest.mark.nightly
@pytest.mark.parametrize("activations", ["recompute", "swap_all"])
def test_the_plan_changes_no_bit(tmp_path: Path, base: Path, rows: Path, activations: str) -> None:
    plain = write_config(tmp_path / "plain", base=base, rows=rows, **BFLOAT16)
    other = write_config(tmp_path / "other", base=base, rows=rows, activations=activations, **BFLOAT16)
    plain.succeed()
    other.succeed()
    assert plain.curve == other.curve
    assert plain.export_hash == other.export_hash


@pytest.mark.nightly
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, base: Path, rows: Path) -> None:
    plain = write_config(tmp_path / "plain", base=base, rows=rows, **BFLOAT16)
    killed = write_config(tmp_path / "killed", base=base, rows=rows, **BFLOAT16)
    plain.succeed()
    killed.run_until_killed(kill_at="commit.written:3")
    assert "resuming from step" in killed.succeed()
    assert plain.curve == killed.curve
    assert plain.export_hash == killed.export_hash


@pytest.mark.full
def test_too_little_gpu_memory_is_reported_before_anything_is_written(tmp_path: Path, base: Path, rows: Path) -> None:
    config = write_config(
        tmp_path, base=base, rows=rows, limits={"gpu_memory": "300MiB", "host_memory": "20GiB"}, **BFLOAT16
    )
    ended = config.finetune()
    assert ended.code == 3, ended.stderr
    [error] = ended.errors
    assert "GPU memory: one block" in error and "288 MiB available" in error
    assert "hint: raise limits.gpu_memory" in ended.stderr
    assert not config.store.parent.exists()


@pytest.mark.nightly
def test_a_run_keeps_the_head_s_chunks_on_another_machine(tmp_path: Path, rows: Path) -> None:
    """A micro-batch of 2048 tokens has 128 MiB of logits: one chunk on the GPU, two on the CPU."""
    base = save_base(tmp_path / "base", vocab_size=16384)
    larger = {"micro_batch_size": 32, "gradient_accumulation_steps": 1, "max_steps": 3}
    config = write_config(tmp_path / "run", base=base, rows=rows, **larger, **BFLOAT16)
    config.run_until_killed(kill_at="commit.written:3")
    elsewhere = write_config(tmp_path / "run", base=base, rows=rows, **larger, **{**BFLOAT16, "device": "cpu"})
    assert "resuming from step" in elsewhere.succeed()
    written_out = load_config(elsewhere.output / "run" / "config.yaml").config
    assert written_out.head_chunk == 128 << 20
    plan = json.loads((elsewhere.output / "run" / "plan.json").read_text())
    assert plan["workload"]["chunk_tokens"] == 2048
    assert "other settings: head_chunk was 134217728, is now 67108864" in elsewhere.finetune("head_chunk=64MiB").stderr


@pytest.mark.nightly
def test_too_little_host_memory_is_reported_with_the_need(tmp_path: Path, base: Path, rows: Path) -> None:
    """Even if the limit is below what this process has, so that nothing is left for measuring the drives."""
    config = write_config(tmp_path, base=base, rows=rows, limits={"host_memory": "200MiB"}, **BFLOAT16)
    ended = config.finetune()
    assert ended.code == 3, ended.stderr
    [error] = ended.errors
    assert "RAM: a step needs" in error and "200 MiB available" in error
    assert "hint: raise limits.host_memory" in ended.stderr
    assert not config.store.parent.exists()


@pytest.mark.nightly
def test_a_limit_is_respected(tmp_path: Path, base: Path, rows: Path) -> None:
    limit_bytes = 2 << 30
    config = write_config(
        tmp_path, base=base, rows=rows, limits={"gpu_memory": limit_bytes, "host_memory": "20GiB"}, **BFLOAT16
    )
    config.succeed()
    assert max(line["gpu_peak_bytes"] for line in config.metrics) <= limit_bytes
    plan = json.loads((config.output / "run" / "plan.json").read_text())
    assert plan["memory"]["gpu_bytes"] <= limit_bytes


@pytest.mark.nightly
def test_profile_and_plan_know_the_gpu(
    tmp_path: Path, base: Path, rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path / "run", base=base, rows=rows, **BFLOAT16)
    assert main(["profile", str(config), "-o", str(tmp_path / "hardware.json")]) == 0
    output = capsys.readouterr().out
    assert "GPU memory" in output and "to the GPU" in output
    assert main(["plan", str(config), "--hardware", str(tmp_path / "hardware.json"), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["time"]["forward"]["up"] > 0 and planned["time"]["backward"]["down"] > 0
    assert planned["memory"]["gpu_bytes"] > 0


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told directly. The user has set nothing."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    return told


def allocator_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_are_not_changed(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], name: str
) -> None:
    monkeypatch.setenv(name, "expandable_segments:False")
    compute_device("auto")
    assert (allocator_variables(), settings) == ({name: "expandable_segments:False"}, [])


def test_the_allocator_is_told_directly_where_it_can_be(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    compute_device("auto")
    assert (allocator_variables(), settings) == ({}, ["expandable_segments:True"])
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    compute_device("auto")
    assert allocator_variables() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch has no getter")
def test_torch_takes_the_settings() -> None:
    torch._C._accelerator_setAllocatorSettings(gpu._ALLOCATOR_SETTINGS)
    assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "is_held"), [(None, False), ("2GiB", True), ("100TiB", False)], ids=["none", "below", "above"]
)
def test_the_allocator_is_held_to_a_limit_below_the_card_alone(
    tmp_path: Path, base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, is_held: bool
) -> None:
    shares: list[float] = []
    module = torch.get_device_module(GPU)
    set_share = module.set_per_process_memory_fraction
    monkeypatch.setattr(
        module, "set_per_process_memory_fraction", lambda share, device: (shares.append(share), set_share(share))
    )
    limits = {"host_memory": "20GiB"} if limit is None else {"host_memory": "20GiB", "gpu_memory": limit}
    with measured_by_each_run():
        write_config(tmp_path, base=base, rows=rows, limits=limits, max_steps=1, **BFLOAT16).succeed()
    trial, run = shares[:2], shares[2:]
    assert trial == run and len(run) == (2 if is_held else 0)
    assert not is_held or (run[0] < 0.05 and run[1] == 1.0)


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["rows of two matrices", "rows of one"])
def test_an_adapter_trains_rows_of_new_tokens(tmp_path: Path, rows: Path, *, tied: bool) -> None:
    """The whole matrix is there while its rows are read, and the rows' gradient is that of PEFT."""
    base = save_base(tmp_path / "base", tied=tied)
    changes = {"tokens": TOKENS, "adapter": "lora", "lora_r": 4, "device": GPU_KEY, "dtype": "bfloat16"}
    config = write_config(tmp_path, base=base, rows=rows, **changes)
    config.succeed()
    first = len(AutoTokenizer.from_pretrained(base))
    new = {name: [first, first + 1] for name in ("embed_tokens", "lm_head")[: 1 if tied else 2]}
    lora = {"r": 4, "lora_alpha": 4, "target_modules": "all-linear", "trainable_token_indices": new}
    grown_base, device = grown(base, tmp_path / "grown", rows=first + 2), compute_device("auto").type
    trained = plain(config, grown_base, lora=tuple(lora.items()), device=device)
    assert [line["loss"] for line in config.metrics] == list(trained.losses)
    assert [line["grad_norm"] for line in config.metrics] == list(trained.norms)
