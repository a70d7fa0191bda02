"""`scripts/compare_configs.py`: what is drawn, answered and compared."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from scripts.compare_configs import answer, differences, drawn, main


def test_a_seed_gives_the_same_configs() -> None:
    first, again = (list(itertools.islice(drawn(3, 50_000), 30)) for _ in range(2))
    assert first == again and len({json.dumps(each) for each in first}) > 20


def test_answers_differ_where_a_config_is_read_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [{"base_model": "m", "datasets": [{"path": "d.jsonl"}], **more} for more in ({}, {"what": 1})]
    old, new = (answer(each, tmp_path) for each in configs)
    assert differences(old, old) == {} and "import crash" not in new
    assert any("unknown key `what`" in each for each in differences(old, new)["findings"][1])
    paths = [tmp_path / name for name in ("configs", "old", "new")]
    for path, lines in zip(paths, (configs, [old, old], [old, new]), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", str(paths[1]), str(paths[2]), "--configs", str(paths[0])]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1: ") and "2 configs" in printed
    assert main(["answer", str(paths[0]), str(tmp_path / "again")]) == 0
    assert main(["compare", str(paths[2]), str(tmp_path / "again")]) == 0
