"""scripts/common_cases.py: README.md has its table, with figures that the sizes of the models allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from scripts.common_cases import HEAD, RAM_GIB, TOKENS_PER_STEP, main, models, planned, table_line

README = Path(__file__).parents[2] / "README.md"
UNITS = {"GB": 1e9, "TB": 1e12}


def rows() -> list[list[str]]:
    """The cells of README's table, without its head."""
    _, found, after = README.read_text(encoding="utf-8").partition(table_line(HEAD) + "\n")
    assert found, "README.md has no table of scripts/common_cases.py"
    lines, _, _ = after.partition("\n\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[1:]]


def num_parameters(config: PretrainedConfig) -> int:
    """Of the matrices of a model with gated MLPs and grouped keys, its head not tied."""
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    layer = 2 * hidden * heads * config.head_dim + 3 * hidden * config.intermediate_size
    return int(config.num_hidden_layers * layer + 2 * hidden * config.vocab_size)


def number_of(cell: str) -> float:
    """Bytes of "96.4 GB", seconds of "3 min 05 s"."""
    value, unit = re.findall(r"([\d.]+) (GB|TB|s)$", cell)[0]
    minutes = re.findall(r"(\d+) min", cell)
    return float(value) * UNITS.get(unit, 1) + 60 * sum(map(int, minutes))


def test_the_readme_has_a_row_for_each_case() -> None:
    assert [row[:2] for row in rows()] == [[name, f"{ram} GB"] for name in models() for ram in RAM_GIB]


def test_the_figures_of_the_readme_fit_the_models() -> None:
    """A store has 24 bytes for each parameter, a step writes 12; the drives hold at most half as much besides."""
    for model, _, step, rate, disk, written in rows():
        num = num_parameters(models()[model])
        assert number_of(step) * float(rate) == pytest.approx(TOKENS_PER_STEP, rel=0.01), model
        assert 24 * 0.99 < number_of(disk) / num < 24 * 1.5, model
        assert 12 * 0.99 < number_of(written) / num < 12 * 1.5, model


@pytest.mark.full
def test_a_row_is_what_ratel_plans() -> None:
    name = "Llama-3.1-70B"
    [row] = [row for row in rows() if row[:2] == [name, "128 GB"]]
    assert list(planned(name, 128).cells()) == row, "paste what python -m scripts.common_cases prints into README.md"


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["Llama-9-1T"])
    assert "unknown: Llama-9-1T; the models are Llama-3.1-8B" in capsys.readouterr().err
