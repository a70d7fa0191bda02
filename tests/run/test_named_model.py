"""The rows of another place as a run's data."""

from __future__ import annotations

from pathlib import Path

from ratel_cli.config.load import load_config
from ratel_cli.run.inputs.named_model import overrides_for_data, with_data

TEXT = """
base_model: m
datasets: [{path: d.jsonl, type: completion, max_samples: 10, name: n, weight: 2.0}]
"""


def test_the_overrides_for_data_name_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    for given in ([], ["datasets.0.weight=3"]):
        config = load_config(file, given).config
        words = overrides_for_data(config, "my rows.jsonl", given)
        assert load_config(file, words).config.datasets == with_data(config, "my rows.jsonl", given).datasets
    assert words[1:] == ["datasets.0.path=my rows.jsonl", "datasets.0.name=null", "datasets.0.max_samples=null"]
