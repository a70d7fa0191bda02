"""Help, a wrong argument and a wrong config answer at once: they never import torch and its like (1.5 s)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "datasets", "numpy", "pandas", "pyarrow", "ratel_cli._native")
PAPER = ("configs/models/gpt-13b.yaml", "--hardware", "configs/hardware/paper-4090-12ssd.yaml")
PROBE = f"""
import sys
from ratel_cli.cli.app import main
code = main(sys.argv[1:])
print("heavy:", sorted(set({HEAVY!r}) & set(sys.modules)), "code:", code)
"""


def run(*arguments: str, source: str = PROBE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
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
        (["profile", "--help"], 0),
        (["profile", "there/is/no/such.yaml"], 2),
        (["profile", "{wrong}"], 2),
        (["profile", "--storage", "there/is/no/such"], 2),
        (["profile", "-o", "there/is/no/such.json"], 2),
        (["plan", "--help"], 0),
        (["plan", "there/is/no/such.yaml"], 2),
        (["plan", "{right}", "--hardware", "configs/hardware/paper-4090-12ssd.yaml"], 2),
        (["plan", *PAPER], 3),
        (["plan", *PAPER, "cost_model=paper", "--largest", "--prices"], 0),
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str], code: int, tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("base_modle: x\n")
    right.write_text("base_model: x\ndatasets: y\n")
    result = run(*(argument.format(wrong=wrong, right=right) for argument in arguments))
    assert result.stdout.splitlines()[-1:] == [f"heavy: [] code: {code}"], result.stderr
    assert "Traceback" not in result.stderr


def test_the_probe_can_fail() -> None:
    assert "heavy: ['numpy']" in run("--version", source="import numpy" + PROBE).stdout


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ratel_cli", "--version"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ratel ")
