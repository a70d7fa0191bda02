"""Help, a wrong argument and a wrong config answer at once: they never import torch and its like (1.5 s)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import commands_that_take_a_run
from tests.test_layers import HEAVY

ROOT = Path(__file__).parents[1]
FURTHER = {"eval": ["rows.jsonl"], "export": ["-o", "exported"], "generate": ["a"]}
"""What a command that reads a config needs besides."""
PAPER = ("configs/models/gpt-13b.yaml", "--hardware", "configs/hardware/paper-4090-12ssd.yaml")
COMMANDS = [
    (["--help"], 0),
    (["--version"], 0),
    (["finetune", "--help"], 0),
    (["finetune"], 2),
    (["finetune", "none.yaml", "--resume", "perhaps"], 2),
    (["finetune", "there/is/no/such.yaml"], 2),
    (["finetune", "{wrong}"], 2),
    (["finetune", "{right}", "learning_rte=1"], 2),
    (["export", "there/is/no/such", "-o", "out"], 2),
    (["verify", "there/is/no/such"], 2),
    (["restore", "{right}"], 2),
    (["check", "there/is/no/such.yaml"], 2),
    (["check", "{wrong}"], 2),
    (["check", "{wrong}", "--json"], 2),
    (["init", "x", "--data", "y", "-o", "{new}", "learning_rte=1"], 2),
    (["generate", "there/is/no/such", "a", "b"], 2),
    (["status", "configs"], 0),
    (["report", "there/is/no/such"], 2),
    (["status", "there/is/no/such"], 2),
    (["profile", "--help"], 0),
    (["profile", "there/is/no/such.yaml"], 2),
    (["profile", "{wrong}"], 2),
    (["profile", "--storage", "there/is/no/such"], 2),
    (["profile", "-o", "there/is/no/such.json"], 2),
    (["plan", "--help"], 0),
    (["plan", "there/is/no/such.yaml"], 2),
    (["plan", "{right}", "--hardware", "configs/hardware/paper-4090-12ssd.yaml"], 2),
    (["plan", *PAPER], 0),
    (["plan", *PAPER, "limits.host_memory=1GiB"], 3),
    (["plan", *PAPER, "cost_model=paper", "--largest", "--prices"], 0),
]
"""Arguments, and the exit code."""
PROBE = f"""
import json, sys
from ratel_cli.cli.app import main
results, heavy, before = [], set({HEAVY!r}), set()
for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    loaded = heavy & set(sys.modules)
    results.append([code, sorted(loaded - before)])
    before = loaded
print()
print(json.dumps(results))
"""
WATCH = """
import sys
from ratel_cli.cli.app import main
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("imports torch", file=sys.stderr)
sys.meta_path.insert(0, Watch())
sys.exit(main(ARGUMENTS))
"""


def run(commands: list[list[str]], *, source: str = PROBE) -> list[tuple[int, list[str]]]:
    """Runs the commands in one process. For each: its exit code, and what it was the first to import of `HEAVY`."""
    result = subprocess.run(
        [sys.executable, "-c", source, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    return [(code, loaded) for code, loaded in json.loads(result.stdout.splitlines()[-1])]


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """In one process, so that starting Python is paid for once: what a command imports is found after that command."""
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("base_modle: x\n")
    right.write_text("base_model: x\ndatasets: y\n")
    new = tmp_path / "new.yaml"
    commands = [
        [argument.format(wrong=wrong, right=right, new=new) for argument in arguments] for arguments, _ in COMMANDS
    ]
    expected = [(arguments, code, []) for arguments, code in COMMANDS]
    found = run(commands)
    assert [(arguments, *result) for (arguments, _), result in zip(COMMANDS, found, strict=True)] == expected


@pytest.mark.full
def test_a_wrong_config_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """By every command that reads one. `check` looks at the rest, too, and only for that it imports anything heavy."""
    config = tmp_path / "wrong.yaml"
    config.write_text(f"base_model: {tmp_path}/none\ndatasets: {tmp_path}/none.jsonl\nlearning_rte: 1\n")
    names = [name for name in commands_that_take_a_run() if name != "check"]
    assert {"data", "doctor", "env", "finetune", "plan", "profile", "restore", "status"} <= set(names)
    arguments = [[name, str(config), *FURTHER.get(name, [])] for name in names]
    assert dict(zip(names, run(arguments), strict=True)) == {name: (2, []) for name in names}

    source = WATCH.replace("ARGUMENTS", repr(["check", str(config)]))
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, check=False)
    before, _, after = result.stderr.partition("imports torch\n")
    assert result.returncode == 2
    assert before.splitlines() == [
        f"error: {config}:3:1: unknown key `learning_rte`",
        "hint: did you mean `learning_rate`?",
    ]
    assert f"error: {config}:1:13: base_model" in after and f"error: {config}:2:11: " in after


def test_the_probe_can_fail() -> None:
    source = PROBE.replace("main(arguments)\n", "main(arguments)\n    if arguments == ['--help']: import safetensors\n")
    assert run([["--version"], ["--help"], ["--version"]], source=source) == [(0, []), (0, ["safetensors"]), (0, [])]


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ratel_cli", "--version"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ratel ")
