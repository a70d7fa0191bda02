"""The model card of a run: its settings, data and losses, the same in every export of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

from ratel_cli.config.load import load_config
from ratel_cli.report.page import curves
from ratel_cli.run.inputs.settings import settings_hash
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import SETTINGS, Config, file_hash, works

LONGER: dict[str, object] = {
    "max_steps": 12,
    "val_set_size": 4,
    "eval_steps": 6,
    "save_steps": 6,
    "save_total_limit": 2,
}


def card_of(config: Config) -> str:
    return (config.output / "README.md").read_text()


def settings_in(card: str) -> dict[str, object]:
    found = yaml.safe_load(card.split("```yaml\n")[1].split("```", maxsplit=1)[0])
    assert isinstance(found, dict)
    return found


@pytest.mark.full
def test_it_has_what_the_run_knows_and_no_path(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = make_config(**LONGER)
    config.succeed()
    card, rows = card_of(config), config.metrics
    settings = settings_in(card)
    for key in ("sequence_len", "micro_batch_size", "gradient_accumulation_steps", "learning_rate", "max_grad_norm"):
        assert settings[key] == SETTINGS[key], key
    assert settings["max_steps"] == 12 and settings["seed"] == 42 and "num_epochs" not in settings
    copied = tmp_path / "copied.yaml"
    copied.write_text(yaml.safe_dump({"base_model": str(base), "datasets": ["a.jsonl"], **settings}))
    recorded = config.output / "run" / "config.yaml"
    assert settings_hash(load_config(copied).config) == settings_hash(load_config(recorded).config)
    assert "* `rows.jsonl`\n" in card and "base_model:" not in card and "fine-tuned from `base` with" in card
    for first, step in ((0, 6), (6, 12)):
        mean = sum(float(row["loss"]) for row in rows[first:step]) / 6
        assert f"| {step} | {mean:.4f} | {float(rows[step - 1]['eval_loss']):.4f} |" in card
    assert str(tmp_path) not in card and str(base.parent) not in card
    assert (config.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    # Of the saved step, as if the run had ended there; of the last step, the same again.
    for step in (6, 12):
        works("export", config.output, "--step", step, "-o", tmp_path / "out" / str(step))
    for name in ("README.md", "curves.png"):
        assert file_hash(tmp_path / "out" / "12" / name) == file_hash(config.output / name)
    saved = (tmp_path / "out" / "6" / "README.md").read_text()
    assert "| 6 | " in saved and "| 12 | " not in saved and "curves.png" not in saved
    assert not (tmp_path / "out" / "6" / "curves.png").exists(), "the table shows six steps as well"


@pytest.mark.full
def test_a_planned_split_is_written_out(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tokens_per_step=256, micro_batch_size=None, gradient_accumulation_steps=None, max_steps=2)
    config.succeed()
    settings = settings_in(card_of(config))
    size, number = settings["micro_batch_size"], settings["gradient_accumulation_steps"]
    assert isinstance(size, int) and isinstance(number, int) and size * number == 4
    assert isinstance(settings["head_chunk"], int)
    works("export", config, "-o", tmp_path / "out")
    assert file_hash(tmp_path / "out" / "README.md") == file_hash(config.output / "README.md")


@pytest.mark.full
def test_a_run_that_starts_from_another_says_so(make_config: MakeConfig) -> None:
    first, second = make_config("first", max_steps=2), make_config("second", max_steps=3)
    first.succeed()
    second.succeed("--from", str(first.output))
    assert "The run started from step 2 of the run out." in card_of(second)
    assert "started from" not in card_of(first)


@pytest.mark.full
def test_an_export_does_without_a_picture(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_steps=11)
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        assert "picture" not in config.succeed(), "it is an extra"
    assert "curves.png" not in card_of(config)
    pytest.importorskip("matplotlib")

    def fail(_name: str) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(curves, "import_module", fail)
    assert "note: the model card has no picture: matplotlib failed: no fonts\n" in config.succeed()
    assert "curves.png" not in card_of(config)


@pytest.mark.full
def test_the_scale_of_an_adapter_is_written_out(make_config: MakeConfig) -> None:
    """As the run has it, though the config leaves it to `lora_r`; and nothing that does not count."""
    config = make_config(adapter="lora", lora_r=4, max_steps=1)
    config.succeed()
    settings = settings_in(card_of(config))
    assert (settings["lora_r"], settings["lora_alpha"]) == (4, 4)
    assert not {"mlm_probability", "lora_target_linear", "peft_use_dora", "peft_use_rslora"} & set(settings)
    assert load_config(config.output / "run" / "config.yaml").config.lora_alpha == 4
    assert "lora_alpha: 4\n" in (config.output / "run" / "config.yaml").read_text()
