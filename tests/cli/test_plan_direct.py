"""`ratel plan --direct`: what reading weights in place would gain, and that it says so where that is nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.report.words.direct import NO_LINK
from ratel_cli.run.files.hardware_file import to_text
from tests.hardware.profiles import WITHOUT_GPU

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER_MACHINE = ["--hardware", str(CONFIGS / "hardware" / "paper-4090-12ssd.yaml")]
PAPER_13B = [str(CONFIGS / "models" / "gpt-13b.yaml"), *PAPER_MACHINE]
SMALL = "model_shape: {num_layers: 12, num_heads: 12, hidden_size: 768, vocab_size: 50257}\nsequence_len: 128\n"
"""A model of the size that MemFerry trains."""

Asked = Callable[..., str]


@pytest.fixture
def direct(capsys: pytest.CaptureFixture[str]) -> Asked:
    """What is printed to stdout from the answer on, or all of it as JSON."""

    def plan(*arguments: object) -> str:
        main(["plan", *map(str, arguments), "--direct"])
        out = capsys.readouterr().out
        return out if "--json" in arguments else out[out.index("weights read in place") :]

    return plan


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("cost_model", [pytest.param("ratel", marks=pytest.mark.full), "paper"])
def test_at_training_sizes_it_gains_nothing_and_says_why(direct: Asked, cost_model: str) -> None:
    out = direct(*PAPER_13B, f"cost_model={cost_model}", "micro_batch_size=32")
    share = " (0.093 %)" if cost_model == "paper" else ""
    reason = "a product of 32768 tokens reads a matrix 128 times, once for every 256, and an upload moves it once."
    assert f"  Reading in place gains nothing here{share}: {reason}\n" in out
    fc1 = next(line for line in out.splitlines() if line.startswith("  fc1.weight"))
    assert "x 40   200 MiB  9.28 ms  41.9 ms    1.19 s " in fc1 and fc1.endswith("  GFGB")
    assert ("By MemFerry's equations" in out) == (cost_model == "paper")
    too_much = "The step would not fit: 24.5 GiB of weights stay on the GPU until backward, and it has 24.0 GiB.\n"
    assert (too_much in out) == (cost_model == "ratel")
    assert " \n" not in out


def test_in_a_small_model_it_gains_by_the_paper_s_equations(direct: Asked, small: Path) -> None:
    out = direct(small, *PAPER_MACHINE, "cost_model=paper")
    assert "in place saves 26 % of the step.\n" in out
    assert out.splitlines()[2].split()[-2:] == ["0", "DHA"], "of the embedding rows are read"
    assert "DFGB" in out and "gains nothing" not in out
    ours = direct(small, *PAPER_MACHINE)
    assert "Reading in place gains nothing here: it moves as much over the link as uploads do.\n" in ours


def test_json(direct: Asked, small: Path) -> None:
    found = json.loads(direct(small, *PAPER_MACHINE, "cost_model=paper", "--json"), parse_constant=pytest.fail)[
        "direct"
    ]
    times = {name: time["step_seconds"] for name, time in found["times"].items()}
    assert set(times) == {"uploaded", "planned", "printed"}
    assert times["planned"] <= min(times.values())
    assert found["gain"] == pytest.approx(1 - times["planned"] / times["uploaded"])
    assert found["is_exact"] is False
    assert found["parameters"][0]["modes"] == {"DHA": 1}
    keys = {"parameter", "count", "weight_bytes", "upload_seconds", "direct_forward_seconds", "forward_link_seconds"}
    assert keys <= set(found["parameters"][0])
    assert [each["reserve_factor"] for each in found["gradients"]] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_cpu_has_no_link(direct: Asked, small: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(to_text(WITHOUT_GPU))
    assert NO_LINK in direct(small, "--hardware", machine)
    assert json.loads(direct(small, "--hardware", machine, "--json"))["direct"] == {"why_not": NO_LINK}
