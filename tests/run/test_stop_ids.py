"""The tokens with which a model stops, of configurations of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.run.inputs.tokenizer import read_stop_ids

TOKENIZER = SimpleNamespace(eos_token_id=7, get_vocab=lambda: {"<|end|>": 9})


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {"eos_token_id": 3}, (3, 5, 7, 9)),
        ("llama", {"eos_token_id": [2, 3]}, (2, 3, 5, 7, 9)),
        ("llama", {"eos_token_id": None}, (5, 7, 9)),
        ("qwen3_vl", {}, (5, 7, 9)),  # neither it nor its text's configuration has the attribute
        ("qwen2_5_vl", {"eos_token_id": 4}, (4, 5, 7, 9)),
        ("llava", {"text_config": {"model_type": "llama", "eos_token_id": 6}}, (5, 6, 7, 9)),
        ("bert", {}, (5, 7, 9)),
    ],
)
def test_all_places_are_read(tmp_path: Path, kind: str, changes: dict[str, object], expected: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    config = RunConfig(base_model="m", datasets=[{"path": "d"}], eot_tokens=["<|end|>"])  # type: ignore[list-item]
    model_config = AutoConfig.for_model(kind, **changes)
    assert read_stop_ids(config, tmp_path, model_config, TOKENIZER) == expected  # type: ignore[arg-type]
