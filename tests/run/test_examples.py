"""The configs in configs/examples: each is complete, and is planned as it stands for the machine that it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.run.files.hardware_file import to_text
from ratel_cli.units import GIB
from scripts import common_cases
from tests.hardware.profiles import WITHOUT_GPU
from tests.tiers import sample

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs" / "examples").glob("*.yaml"))
COSTS = "On an RTX 4090 with one SSD (configs/hardware/paper-4090-1ssd.yaml) `ratel plan` predicts:"
"""The line before that with what a run takes."""
MACHINES = {
    "cpu": None,
    "long-context": "paper-4090-2ssd",
    "many-ssds": "paper-4090-6ssd",
}
"""By name: the hardware file; None: a machine without a GPU. All others: a GPU of 24 GB and one SSD."""


def _qwen3(width: int, layers: int, *, heads: int, intermediate: int) -> PretrainedConfig:
    """A Qwen3 of this size; the small one has one matrix for embedding and head."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=width == 1024,
    )


def _gpt_oss() -> PretrainedConfig:
    """The 20B model, whose experts are MXFP4 in its checkpoint."""
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=24,
        num_local_experts=32,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with the config.json of the models that the examples name."""
    directory = tmp_path_factory.mktemp("models")
    qwen3_8b = _qwen3(4096, 36, heads=32, intermediate=12_288)
    made = {
        "Qwen3-0.6B": _qwen3(1024, 28, heads=16, intermediate=3072),
        "Qwen3-8B": qwen3_8b,
        "base": qwen3_8b,
        "Qwen3-32B": common_cases.models()["Qwen3-32B"],
        "Llama-3.1-70B-Instruct": common_cases.models()["Llama-3.1-70B"],
        "gpt-oss-20b": _gpt_oss(),
    }
    for name, config in made.items():
        config.save_pretrained(directory / name)
    return directory


def test_those_that_are_promised_are_there() -> None:
    assert len(EXAMPLES) == 15
    assert [path.stem for path in EXAMPLES if COSTS in path.read_text()] == [
        "chat-24gb", "classifier", "dpo", "gpt-oss", "lora", "qlora-70b",
    ]  # fmt: skip


def costs_line(plan: dict[str, Any]) -> str:
    """What a run takes, and what it wears, as the head of an example says it."""
    memory = {tier["name"]: tier["need_bytes"] for tier in plan["memory"]["tiers"]}
    disk, written = memory["NVMe"] / 1e9, plan["traffic"]["nvme_written_bytes"] / 1e9
    return (
        f"time {plan['time']['step_seconds']:.3g} s a step, memory {memory['GPU'] / GIB:.3g} GiB of GPU and "
        f"{memory['RAM'] / GIB:.3g} GiB of RAM, disk {disk:.4g} GB, wear {written:.4g} GB written a step"
    )


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d[\d.]*", text)]


@pytest.mark.full
@pytest.mark.parametrize("path", sample(EXAMPLES, every=5, offset=2), ids=lambda path: path.stem)
def test_it_is_planned(
    path: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_config(path)
    assert loaded.notices == ()
    base = loaded.config.base_model
    assert base is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(models / "cache"))
    machine = MACHINES.get(path.stem, "paper-4090-1ssd")
    hardware = tmp_path / "hardware.yaml"
    if machine is None:
        hardware.write_text(to_text(WITHOUT_GPU))
    else:
        hardware = ROOT / "configs" / "hardware" / f"{machine}.yaml"
    code = main(["plan", str(path), f"base_model={models / Path(base).name}", "--hardware", str(hardware), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    plan = json.loads(printed.out)
    workload = plan["workload"]
    size, number = workload["micro_batch_size"], workload["num_micro_batches"]
    assert size * number * workload["sequence_len"] == loaded.config.sequences_per_step * loaded.config.sequence_len
    assert all(tier["shortfall_bytes"] == 0 for tier in plan["memory"]["tiers"])
    _, is_told, told = path.read_text().partition(COSTS)
    if is_told:
        line = told.splitlines()[1].removeprefix("#   ")
        assert numbers(line) == pytest.approx(numbers(costs_line(plan)), rel=0.02), costs_line(plan)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_says_what_it_is_for(path: Path) -> None:
    """A comment at its head, others behind keys, and an output directory of its own."""
    lines = path.read_text().splitlines()
    assert lines[1].startswith("# ")
    assert any("  # " in line for line in lines)
    others = [load_config(other).config.output_dir for other in EXAMPLES if other != path]
    assert load_config(path).config.output_dir not in others
