"""`ratel plan MODEL --gpu NAME --ram SIZE --ssd NxDRIVE`: a model and a machine that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.units import GIB
from tests.cli.test_plan import LLAMA

DESK = ["--gpu", "rtx4090", "--ram", "64GB", "--ssd", "2x990pro"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def put_config(directory: Path, **changes: object) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def test_a_directory_and_a_model_of_the_hub_are_planned_as_their_config_is(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    put_config(here / "small", max_position_embeddings=1024)
    repository = here / "hub" / "models--org--small"
    put_config(repository / "snapshots" / "0a1b", max_position_embeddings=1024)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a1b")
    (here / "run.yaml").write_text(
        "base_model: small\ndatasets: none.jsonl\nsequence_len: 1024\ntokens_per_step: 32768\n"
    )
    by_config, by_directory, of_hub = (
        json.loads(plan(capsys, name, *DESK, "--json")) for name in ("run.yaml", "small", "org/small")
    )
    assert by_directory == by_config
    assert of_hub == by_config, "under the model's name, not that of its revision"
    shown = plan(capsys, "small", *DESK, "sequence_len=256", "gradient_accumulation_steps=2")
    assert "step       2 micro-batches of 1 x 256 = 512 tokens\n" in shown
    assert "add max_steps=N to predict the whole run" in shown, "there is no config that `ratel check` could read"


def test_a_shape_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "= 32768 tokens" in plan(capsys, "gpt-6b", *DESK), "a step as large as that of other models"
    shown = plan(capsys, "gpt-6b", *DESK, "--json", "micro_batch_size=1")
    file = Path(__file__).parents[2] / "configs" / "models" / "gpt-6b.yaml"
    assert shown == plan(capsys, str(file), *DESK, "--json", "micro_batch_size=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["org/none", *DESK], "org/none: no such file or directory, and the hub's cache has no model of this name"),
        (["gpt-17b", *DESK], "hint: did you mean gpt-175b?"),
        (["org/none", *DESK], "hf download OWNER/NAME config.json"),
        (["a//b", *DESK], "a/b: no such file or directory"),
        (["none.yaml", *DESK], "none.yaml: no such file or directory\n"),
        (["empty", *DESK], "empty: not the output directory of a run"),
        (["small", "--gpu", "rtx9090"], "argument '--gpu': rtx9090 is not known"),
        (["small", "--ram", "64GB"], "argument '--ram': it belongs to --gpu NAME"),
        (["small", "--ssd", "990pro"], "argument '--ssd': it belongs to --gpu NAME"),
        (["small", *DESK, "--hardware", "desk.yaml"], "'--gpu' and '--hardware': each describes the machine"),
        (["small", *DESK, "adapter=lore"], "adapter"),
    ],
)
def test_wrong_names(capsys: pytest.CaptureFixture[str], here: Path, arguments: list[str], message: str) -> None:
    put_config(here / "small")
    (here / "empty").mkdir()
    assert message in plan(capsys, *arguments, code=2)


@pytest.mark.nightly
def test_a_wide_mixture_with_an_adapter_takes_little_memory(here: Path) -> None:
    """Two layers as wide as those of Qwen3-30B-A3B. A stack of experts has 403 million elements."""
    put_config(
        here / "mixture", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=2,
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, vocab_size=151936, decoder_sparse_step=1,
    )  # fmt: skip
    source = "import sys; from ratel_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
    with open(here / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", source, "plan", "mixture", *DESK], cwd=here, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    shown = (here / "log").read_text()
    assert process.returncode == 0, shown
    assert "adapter: lora (" in shown
    assert usage.ru_maxrss * 1024 < 2 * GIB
