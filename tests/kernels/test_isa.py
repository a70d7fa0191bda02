"""The instruction set is the widest by default, or chosen by name or environment; never silently another."""

from __future__ import annotations

import pytest
import torch

from ratel_cli import _native


def test_widest_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATEL_FORCE_ISA", raising=False)
    isas = _native.supported_isas()
    assert isas[0] == "baseline"
    assert isas == [isa for isa in ("baseline", "avx2", "avx512") if isa in isas]
    assert _native.active_isa() == isas[-1]


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_environment_chooses(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("RATEL_FORCE_ISA", isa)
    assert _native.active_isa() == isa


@pytest.mark.parametrize("name", ["avx1024", "", "AVX2"])
def test_environment_fails_loudly(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RATEL_FORCE_ISA", name)
    with pytest.raises(ValueError, match=rf"^RATEL_FORCE_ISA: no kernels for '{name}' here; .* runs baseline"):
        _native.active_isa()
    with pytest.raises(ValueError, match=r"^RATEL_FORCE_ISA: "):
        _native.square_root(torch.ones(1))
    _native.square_root(torch.ones(1), isa="baseline")


def test_argument_fails_loudly() -> None:
    values = torch.full((3,), 4.0)
    with pytest.raises(ValueError, match=r"^isa: no kernels for 'neon' here; this processor runs baseline"):
        _native.square_root(values, isa="neon")
    assert values.tolist() == [4.0] * 3
