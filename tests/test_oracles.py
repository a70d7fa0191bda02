"""An oracle shares no code with what it judges: it imports nothing of Ratel, or what it calls to judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_layers import imports

ROOT = Path(__file__).parents[1]
ORACLES: dict[str, tuple[str, ...]] = {
    "tests/reference.py": (),
    "tests/trl_oracle.py": (),
    "tests/quantised.py": (),
    "tests/reference_optimizers.py": (),
    "tests/kernels/rules.py": (),
    "tests/ranks/oracle.py": (),
    "tests/data/mistral_oracle.py": (),
    "tests/data/turn_oracle.py": (),
    "tests/papers/memferry_oracle.py": (),
    "tests/papers/memferry_program.py": (),
    "tests/kernels/oracle.py": ("ratel_cli._native",),  # the kernels that are judged
    "tests/store/format_reader.py": (),
    "tests/store/power.py": (
        "ratel_cli.io",
        "ratel_cli.store.barrier",
    ),  # interfaces; the store is judged
}
"""Each with the modules that it may import from."""


@pytest.mark.parametrize("oracle", ORACLES)
def test_it_imports_nothing_that_it_judges(oracle: str) -> None:
    source = (ROOT / oracle).read_text(encoding="utf-8")
    ours = [name for name in imports(source, oracle) if name.startswith("ratel_cli")]
    assert [name for name in ours if not name.startswith(ORACLES[oracle])] == []
    others = tuple(f"{name.removesuffix('.py').replace('/', '.')}." for name in ORACLES)
    borrowed = [name for name in imports(source, oracle) if name.startswith("tests.") and not name.startswith(others)]
    assert borrowed == [], "what an oracle uses is written where this test sees it"
