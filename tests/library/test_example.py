"""examples/own_loop.py: it trains, and goes on after an interruption with the same bits."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import file_hash, measured_briefly, save_base

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


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
