"""An operator without a deterministic kernel is found before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.e2e.runs import Config, assert_rejected, measured_by_each_run, ratel, save_base, write_config, write_rows
from tests.gpu.machine import NEEDS_GPU
from tests.simulated_gpu import is_simulated

pytestmark = NEEDS_GPU


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """The config of a run whose layers count their values, which its trial sees even if others were tried before."""
    whole: Callable[[LlamaMLP, torch.Tensor], torch.Tensor] = LlamaMLP.forward

    def forward(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        count = hidden.detach().float().histc(bins=1)
        return whole(self, hidden) + 0 * count.to(hidden.dtype)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    base, rows = save_base(tmp_path / "base", hidden_size=128), write_rows(tmp_path / "rows.jsonl")
    device = "auto" if is_simulated() else "cuda"
    with measured_by_each_run():
        yield write_config(tmp_path / "run", base=base, rows=rows, device=device, dtype="bfloat16", max_steps=2)


@pytest.mark.full
def test_it_is_rejected_by_its_name_and_with_the_key(config: Config) -> None:
    ended = config.finetune()
    assert_rejected(ended, 2, "an operator that is not deterministic on GPUs: _histc_cuda")
    assert "hint: set deterministic: false" in ended.stderr
    assert not config.store.parent.exists() and not (config.output / "run" / "plan.json").exists()
    checked = ratel("check", config, "--json")
    [error] = json.loads(checked.stdout)["errors"]
    assert checked.code == 2 and error["key"] == "deterministic" and "_histc_cuda" in error["message"]


@pytest.mark.full
def test_with_the_key_it_runs(config: Config) -> None:
    ended = config.finetune("deterministic=false")
    assert ended.code == 0, ended.stderr
    profile = json.loads((config.output / "run" / "model.json").read_text())["profile"]
    assert profile["source"] == "recorded"
