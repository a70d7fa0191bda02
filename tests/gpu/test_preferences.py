"""Preference tuning on a GPU, with the reference model computed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.preferences import keys_of, pairs, recipe, verdicts, write
from tests.e2e.runs import save_base, write_config
from tests.gpu.machine import NEEDS_GPU
from tests.tiers import rotating

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base", hidden_size=128)


@pytest.mark.parametrize(
    ("method", "adapted"), rotating(["dpo", "kto", "orpo"], [True, False], every=3, full_rotation=True)
)
def test_it_learns_what_the_cpu_learns(method: str, adapted: bool, base: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", verdicts() if method == "kto" else pairs())
    keys = {**keys_of(recipe(method, adapted=adapted)), "base": base, "rows": rows}
    on_cpu, on_gpu = (
        write_config(tmp_path / name, **{**keys, "device": device})
        for name, device in (("cpu", "cpu"), ("gpu", "auto"))
    )
    on_cpu.succeed()
    assert "one block at a time" in on_gpu.succeed()
    for found, wanted in zip(on_gpu.metrics, on_cpu.metrics, strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert found["preferences"] == pytest.approx(wanted["preferences"], rel=1e-2, abs=1e-4)
