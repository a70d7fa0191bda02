"""Dry runs of configs of LoRA and QLoRA that axolotl and LLaMA-Factory ship, with a tiny model and tiny data in
their place; the model is a mixture of experts if theirs is one. `shipped_adapters.json` has keys and values of those
whose modules and tokens the tiny model has, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import dump, load_config
from ratel_cli.config.yaml.yaml_marks import Plain
from tests.e2e.runs import Config
from tests.e2e.test_ported_configs import data, dry_run, tiny  # noqa: F401  (fixtures)
from tests.engine.architectures import tiny_config
from tests.tiers import sample

SHIPPED: dict[str, dict[str, Plain]] = json.loads(Path(__file__).with_name("shipped_adapters.json").read_text())


@pytest.mark.parametrize("name", SHIPPED)
def test_it_is_imported_with_nothing_to_decide(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs, shipped = Path("theirs.yaml"), SHIPPED[name]
    theirs.write_text(dump(shipped))
    imported = import_config(theirs)
    assert imported.tool.lower() == name.partition(":")[0]
    assert [outcome.written for outcome in imported.outcomes if outcome.fate == "undecided"] == []
    Path("run.yaml").write_text(imported.text)
    config = load_config(Path("run.yaml")).config
    assert config.adapter == "lora"
    assert config.lora_r == (shipped.get("lora_r") or shipped.get("lora_rank") or config.lora_r)
    bits = shipped.get("quantization_bit")
    assert config.load_in_4bit == bool(shipped.get("load_in_4bit") or bits == 4)
    assert config.load_in_8bit == bool(shipped.get("load_in_8bit") or bits == 8)


@pytest.fixture(scope="module")
def with_experts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The small model's tokenizer with a mixture of experts."""
    directory = tmp_path_factory.mktemp("ported") / "experts"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(directory)
    config = tiny_config("qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize("name", sample(SHIPPED, every=14))
def test_its_dry_run(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny: Path,  # noqa: F811
    with_experts: Path,
    data: dict[str, Path],  # noqa: F811
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(dump(SHIPPED[name]))
    run = Config("run.yaml")
    run.write_text(import_config(Path("theirs.yaml")).text)
    base = with_experts if SHIPPED[name].get("quantize_moe_experts") else tiny
    ended = dry_run(run, base, data)
    assert ended.code == 0, ended.stderr
