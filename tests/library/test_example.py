"""The examples train: what is interrupted ends with the same bits, what is hooked with those of plain PyTorch."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.e2e.runs import file_hash, measured_briefly, save_base

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "own_loop.py"


@pytest.mark.full
def test_it_ends_with_the_same_bits_whether_it_was_interrupted_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(EXAMPLE)])
    main: Callable[[list[str]], None] = runpy.run_path(str(EXAMPLE))["main"]
    base = save_base(tmp_path / "base")
    (tmp_path / "text").write_text("A step is committed when the next one computes. " * 40)

    def run(name: str) -> None:
        sizes = ["--steps", "4", "--tokens", "16", "--micro-batches", "2"]
        storage, output = str(tmp_path / f"{name}.store"), str(tmp_path / name)
        with measured_briefly():
            main([str(base), str(tmp_path / "text"), "--storage", storage, "--output", output, *sizes])

    def interrupt(text: str) -> None:
        if text.startswith("step 3"):
            raise KeyboardInterrupt
        print(text)

    run("whole")
    whole = capsys.readouterr().out
    assert [line.split(":")[0] for line in whole.splitlines()] == [f"step {number}" for number in range(1, 5)]
    main.__globals__["print"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run("parts")
    assert not (tmp_path / "parts").exists()
    main.__globals__["print"] = print
    run("parts")
    assert capsys.readouterr().out == whole
    assert file_hash(tmp_path / "whole" / "model.safetensors") == file_hash(tmp_path / "parts" / "model.safetensors")


class InMemory:
    """What `ratel.hook` gives, for a module that stays in memory."""

    num_steps = 0
    grad_norm = math.nan

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.__dict__["state"] = self

    def save(self, directory: str) -> None:
        self.module.save_pretrained(directory)

    def close(self) -> None:
        """Nothing is open."""


class ClippingAdamW(torch.optim.AdamW):
    """Plain PyTorch with the norm of all gradients clipped."""

    def __init__(self, module: nn.Module, *, max_grad_norm: float, **settings: float) -> None:
        super().__init__(module.parameters(), **settings)
        self.module, self.max_grad_norm = module, max_grad_norm

    def step(self) -> None:  # type: ignore[override]
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        self.module.__dict__["state"].grad_norm = float(norm)
        super().step()


IN_MEMORY = SimpleNamespace(init=lambda storage: nullcontext(), hook=InMemory, AdamW=ClippingAdamW)
"""`import ratel_cli as ratel`, as if there were enough memory."""


@pytest.mark.full
@pytest.mark.parametrize("what", ["distil", "dpo", "reward"])
def test_a_hooked_example_is_the_same_as_in_memory(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, large = save_base(tmp_path / "base"), save_base(tmp_path / "large", num_layers=3, hidden_size=48)
    (tmp_path / "text").write_text("A step is committed when the next one computes. " * 40)
    pairs = [
        {"prompt": f"Which number is {number}? ", "chosen": f"It is {number}.", "rejected": "No idea at all."}
        for number in range(9)
    ]
    (tmp_path / "pairs").write_text("\n".join(map(json.dumps, pairs)))
    program = "distil" if what == "distil" else "preferences"
    main: Callable[[list[str]], None] = runpy.run_path(str(EXAMPLES / f"{program}.py"))["main"]

    def run(name: str) -> str:
        torch.manual_seed(0)
        models = [str(large), str(base), str(tmp_path / "text"), "--tokens", "16"]
        if what != "distil":
            models = [what, str(base), str(tmp_path / "pairs")]
        storage = [str(tmp_path / f"{name}.{number}") for number in range(1 if what == "reward" else 2)]
        main([*models, "--steps", "3", "--dtype", "float32", "--storage", *storage, "--output", str(tmp_path / name)])
        return "".join(line for line in capsys.readouterr().out.splitlines(keepends=True) if line.startswith("step"))

    hooked = run("hooked")
    main.__globals__["ratel"] = IN_MEMORY
    assert hooked == run("plain") and hooked.count("step") == 3
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("hooked", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
