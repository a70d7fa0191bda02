"""scripts/families.py: a sample of the families, drawn by a seed; what it calls a fault; how it goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from scripts import families
from scripts.families import Result, main, table, try_family
from scripts.family_configs import FAMILIES, tiny_config
from tests.tiers import sample

_DRAWN = random.Random(transformers.__version__).sample(FAMILIES, 12)
"""Other families with each version of transformers."""


@pytest.mark.full
@pytest.mark.parametrize("family", sample(_DRAWN, every=6))
def test_a_family_is_equal_or_refused(family: str) -> None:
    result = try_family(family)
    assert result.verdict != "fault", result.reason
    assert result.reason or result.verdict == "equal"


@pytest.mark.full
def test_other_bits_are_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: object) -> object:
        trained = train(*arguments)  # type: ignore[arg-type]
        weight = next(iter(trained.weights.values()))
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
        return trained

    train = families.train_in_memory
    monkeypatch.setattr(families, "train_in_memory", other)
    result = families.try_here("llama", tmp_path)
    assert result.verdict == "fault"
    assert result.reason.startswith("float32: ") and result.reason.endswith(" of the weights have other bits")


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def stopped_at_mixtral(family: str) -> Result:
        tried.append(family)
        if tried == ["llama", "mixtral"]:
            raise KeyboardInterrupt
        return Result(family=family, verdict="refused", reason="a | b", versions=families._versions())

    monkeypatch.setattr(families, "FAMILIES", ("llama", "mixtral", "gpt2"))
    monkeypatch.setattr(families, "RESULTS", tmp_path / "build" / "results.jsonl")
    monkeypatch.setattr(families, "TABLE", tmp_path / "families.md")
    monkeypatch.setattr(families, "try_family", stopped_at_mixtral)
    with pytest.raises(KeyboardInterrupt):
        main([])
    assert main([]) == 0
    assert tried == ["llama", "mixtral", "mixtral", "gpt2"]
    assert capsys.readouterr().out.endswith("3 families: 0 equal, 3 refused, 0 fault, 0 not trainable\n")
    assert "| gpt2 |  | refused |  |  | a \\| b |" in (tmp_path / "families.md").read_text()


def test_a_fault_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(families, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(families, "try_family", lambda family: Result(family=family, verdict="fault", reason="no"))
    assert main(["llama"]) == 1


def test_a_row_for_each_family() -> None:
    rows = table([Result(family=family, bfloat16="refused: some") for family in FAMILIES]).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[-len(FAMILIES) :]] == list(FAMILIES)


@pytest.mark.parametrize("family", ["gemma4_text", "qwen4_exp_text", "dots3_note_text", "gpt_neo"])
def test_layers_of_every_kind_stay(family: str) -> None:
    tiny = tiny_config(family)
    default, chosen = type(tiny)().to_dict(), tiny.to_dict()
    kinds = {"layer_types", "attention_layers"} & default.keys()
    assert kinds
    assert all(set(chosen[key]) == set(default[key]) for key in kinds)
