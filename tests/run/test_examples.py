"""The configs in configs/examples: each is complete, and is planned as it stands for the machine that it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.run.files.hardware_file import to_text
from tests.hardware.profiles import WITHOUT_GPU
from tests.tiers import sample

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "configs" / "examples").glob("*.yaml"))
MACHINES = {
    "cpu": None,
    "long-context": "paper-4090-2ssd",
    "many-ssds": "paper-4090-6ssd",
}
"""By name: the hardware file; None: a machine without a GPU. All others: a GPU of 24 GB and one SSD."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with the config.json of models of the sizes that the examples name."""
    directory = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
    large = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36}
    for name, shape in (("Qwen3-0.6B", small), ("Qwen3-8B", large), ("base", large)):
        config = LlamaConfig(
            vocab_size=151936,
            num_key_value_heads=8,
            max_position_embeddings=40960,
            tie_word_embeddings=shape is small,
            **shape,
        )
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(directory / name)
    return directory


def test_there_are_ten() -> None:
    assert len(EXAMPLES) == 10


@pytest.mark.full
@pytest.mark.parametrize("path", sample(EXAMPLES, every=10, offset=7), ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_says_what_it_is_for(path: Path) -> None:
    """A comment at its head, others behind keys, and an output directory of its own."""
    lines = path.read_text().splitlines()
    assert lines[1].startswith("# ")
    assert any("  # " in line for line in lines)
    others = [load_config(other).config.output_dir for other in EXAMPLES if other != path]
    assert load_config(path).config.output_dir not in others
