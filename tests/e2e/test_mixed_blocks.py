"""A model with parameters in fp32 and frozen ones, from its files through a run and back into files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts.family_configs import VOCAB_SIZE
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, ratel, works
from tests.engine.mixed import BOTH, mixed_config

BIAS = "e_score_correction_bias"
"""Frozen, and kept in fp32; `gate.weight` is trained in fp32."""


@pytest.fixture(scope="module")
def mixed_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(mixed_config(BOTH), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # no value that 16 bit can hold
    directory = tmp_path_factory.mktemp("mixed") / "base"
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def config(make_config: MakeConfig, mixed_base: Path, tmp_path: Path) -> Config:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB_SIZE - 1, (40,), generator=draw).tolist() for _ in range(32)]
    data = tmp_path / "tokens.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return make_config(
        base=mixed_base, rows=data, data_type="tokens", dtype="bfloat16", sample_packing=False, sequence_len=40
    )


def test_the_export_has_every_tensor_in_the_dtype_that_transformers_loads(config: Config, mixed_base: Path) -> None:
    config.succeed()
    files, before = config.exported, load_file(mixed_base / "model.safetensors")
    assert files.keys() == before.keys()
    loaded = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        if name in files:
            assert files[name].dtype == parameter.dtype, name
    frozen = {name for name in files if name.endswith(BIAS)}
    routers = {name for name in files if name.endswith("gate.weight")}
    assert len(frozen) == len(routers) == 3
    for name in files:
        assert (name in frozen) == (torch.equal(files[name].float(), before[name]))
    for name in routers:
        assert not torch.equal(files[name], files[name].bfloat16().float())
    assert "bit for bit" in works("verify", config).stdout


@pytest.mark.full
def test_it_goes_on_from_a_saved_step_and_is_evaluated(config: Config, tmp_path: Path) -> None:
    config.succeed()
    parts = Config(tmp_path / "parts" / "run.yaml")
    parts.parent.mkdir()
    parts.write_text(config.read_text().replace(str(config.parent), str(parts.parent)))
    parts.succeed("max_steps=2")
    parts.succeed()
    assert parts.curve == config.curve
    whole, continued = config.exported, parts.exported
    assert all(torch.equal(values, whole[name]) for name, values in continued.items())
    arguments = (tmp_path / "tokens.jsonl", "datasets.0.type=tokens")
    losses = [ratel("eval", each, *arguments, "--json") for each in (config, config.output)]
    assert [ended.code for ended in losses] == [0, 0], [ended.stderr for ended in losses]
    of_store, of_export = (json.loads(ended.stdout) for ended in losses)
    assert of_store["loss"] == of_export["loss"]
