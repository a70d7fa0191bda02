"""The guide's first run: its commands, as the guide prints them, one after another and without an editor."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ratel_cli.config.load import load_config
from ratel_cli.run.train import profile_machine
from tests.e2e.runs import BRIEFLY, ROWS, ratel, save_base

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "first-run.md"


def commands() -> list[list[str]]:
    """The commands of the guide's chapter about the first run."""
    [chapter] = re.findall(r"^## Your first run\n(.*?)^## ", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    [block] = re.findall(r"^```bash\n(.*?)^```$", chapter, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


@pytest.mark.full
def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model and a few rows in the places of the demo's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile_machine, "BRIEF", BRIEFLY)
    save_base(tmp_path / "demo" / "base")
    rows = [{"messages": row["messages"]} for row in ROWS[:6]]
    Path("demo/topics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {command[0] for command in commands()} == {".venv/bin/ratel"}
    assert [command[1] for command in commands()] == ["init", "check", "data", "plan", "finetune", "report"]
    for command in commands():
        ended = ratel(*command[1:])
        assert (ended.code, ended.errors) == (0, []), ended.stderr
    config = load_config(Path("demo/first.yaml")).config
    assert (config.num_epochs, config.learning_rate) == (16, 1e-3)
    assert (config.output_dir / "run" / "report.html").is_file()
    model = AutoModelForCausalLM.from_pretrained(config.output_dir)
    base = load_file("demo/base/model.safetensors")
    assert any((value != base[name]).any() for name, value in model.state_dict().items() if name in base)
