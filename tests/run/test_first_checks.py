"""What a run says before anything of it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.run.train import first_checks
from ratel_cli.run.train.first_checks import check_can_train
from tests.hardware.machines import Machine


@pytest.mark.parametrize(
    ("device", "dtype", "gpus", "is_said"),
    [
        ("cpu", "bfloat16", (), True),
        ("cpu", "bfloat16", ("a GPU",), True),
        ("auto", "bfloat16", (), True),
        ("auto", "bfloat16", ("a GPU",), False),
        ("cuda", "bfloat16", (), False),
        ("cpu", "float32", (), False),
    ],
)
def test_a_run_in_bf16_on_a_processor_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, gpus: tuple[str, ...], is_said: bool
) -> None:
    files = Machine(tmp_path / "root").files
    monkeypatch.setattr(first_checks, "SystemFiles", lambda: files)
    monkeypatch.setattr(first_checks, "gpu_names", lambda: gpus)
    (tmp_path / "run.yaml").write_text(f"base_model: m\ndatasets: d.jsonl\ndevice: {device}\ndtype: {dtype}\n")
    said: list[str] = []
    check_can_train(load_config(tmp_path / "run.yaml").config, said.append)
    assert ["set dtype: float32" in each and "8 to 47 times" in each for each in said] == [True] * is_said
