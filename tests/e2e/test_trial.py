"""What cannot train is found by running one layer of each kind, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from ratel_cli.run.train import trial
from scripts import family_configs
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import assert_rejected, measured_by_each_run, ratel


@pytest.fixture(autouse=True)
def _each_run_measures() -> Iterator[None]:
    with measured_by_each_run():
        yield


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return values.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        raise RuntimeError("this kernel has no backward\nmore of it")


@pytest.fixture
def no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that run forward alone."""
    whole: Callable[[LlamaMLP, torch.Tensor], torch.Tensor] = LlamaMLP.forward
    monkeypatch.setattr(
        LlamaMLP,
        "forward",
        lambda self, hidden: NoBackward.apply(whole(self, hidden)),  # type: ignore[no-untyped-call]
    )


@pytest.mark.full
@pytest.mark.usefixtures("no_backward")
def test_a_layer_without_backward_is_rejected_before_anything_is_written(make_config: MakeConfig) -> None:
    config = make_config(dtype="bfloat16")
    reason = "LlamaForCausalLM: its layer 0 cannot run forward and backward in bfloat16 on cpu: this kernel has no back"
    assert_rejected(config.finetune(), 2, reason)
    assert_rejected(ratel("check", config), 2, reason)
    assert not config.store.parent.exists()
    assert not (config.output / "run" / "plan.json").exists()


@pytest.mark.full
def test_a_measured_layer_is_planned_with_from_the_first_step_on(make_config: MakeConfig) -> None:
    """Nothing is recorded, so step 1 is predicted as it is shown."""
    config = make_config(max_steps=2)
    stderr = config.succeed()
    assert "until step 1 is recorded" not in stderr and "plan updated from step 1" not in stderr
    profile = json.loads((config.output / "run" / "model.json").read_text())["profile"]
    assert profile["source"] == "recorded" and profile["head_seconds"] > 0
    assert all(layer["forward_seconds"] > 0 for layer in profile["profiles"])


def test_what_would_take_too_long_is_recorded_in_step_1(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_MOST_SECONDS", 0.0)
    stderr = make_config(max_steps=2).succeed()
    assert "; step 1 is recorded instead" in stderr
    assert "until step 1 is recorded" in stderr and "plan updated from step 1" in stderr


@pytest.mark.full
def test_a_row_of_a_fixed_length_is_tried_whole(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models compute in chunks of a length that divides the run's rows, but not 64 tokens."""
    whole: Callable[[LlamaMLP, torch.Tensor], torch.Tensor] = LlamaMLP.forward

    def only_whole_rows(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and hidden.shape[1] % 96:
            raise ValueError("rows of 96")
        return whole(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", only_whole_rows)
    config = make_config(max_steps=1, sequence_len=96)
    config.succeed()
    assert len(config.metrics) == 1
    assert_rejected(ratel("check", make_config("other", sequence_len=80)), 2, "rows of 96")


@pytest.mark.full
def test_the_model_is_as_before(make_config: MakeConfig, tmp_path: Path) -> None:
    """A trial draws nothing that the run draws: two starts, one without a trial, give the same losses."""
    tried, recorded = make_config("tried"), make_config("recorded")
    tried.succeed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_MOST_SECONDS", 0.0)
        recorded.succeed()
    assert [each["loss"] for each in tried.metrics] == [each["loss"] for each in recorded.metrics]


@pytest.mark.full
def test_an_embedding_with_more_rows_than_the_head(tmp_path: Path, make_config: MakeConfig) -> None:
    """Random tokens may be any row of the embedding, but the head knows fewer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_configs.tiny_config("moshi"))
    model.save_pretrained(tmp_path / "base")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": list(range(start, start + 30))}) + "\n" for start in range(8)))
    datasets = [{"path": str(rows), "type": "tokens"}]
    config = make_config(base=tmp_path / "base", datasets=datasets, max_steps=1, sequence_len=512, micro_batch_size=2)
    config.succeed()
    assert [line["step"] for line in config.metrics] == [1]
