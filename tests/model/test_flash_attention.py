"""Packages of flash attention under `deterministic: true`: what transformers passes them, and which are rejected.

The packages here are fakes with the functions that transformers looks for. What reaches them is what transformers'
own code passes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import modeling_flash_attention_utils

from ratel_cli.errors import BadInput
from ratel_cli.hardware.gpu import determinism
from ratel_cli.model.values.flash_attention import require_deterministic

ASKED = "FLASH_ATTENTION_DETERMINISTIC"
MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
DISTRIBUTIONS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_3"}
GOOD = [("flash_attention_2", "2.4.1"), ("flash_attention_2", "2.8.3.post1"), ("flash_attention_3", "3.0.0")]
BAD = [("flash_attention_2", "2.4.0"), ("flash_attention_2", "2.3.6"), ("flash_attention_3", "3.0.0b1")]
SOURCE = """
calls = []

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False{argument}):
    calls.append(locals().get("deterministic", "not passed"))
    return q

flash_attn_varlen_func = flash_attn_with_kvcache = flash_attn_func
"""
PADDING = "def pad_input(): ...\ndef unpad_input(): ...\n"


@pytest.fixture(autouse=True)
def _environment_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ASKED, raising=False)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                 "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True)
    yield
    for module in (*MODULES.values(), "flash_attn.bert_padding"):
        sys.modules.pop(module, None)


def install(
    directory: Path, attention: str, version: str | None, monkeypatch: pytest.MonkeyPatch, *, takes: bool = True
) -> None:
    """Put a fake package on the path, with its metadata if it has a `version`."""
    package = directory / MODULES[attention]
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE.format(argument=", deterministic=False" if takes else ""))
    (package / "bert_padding.py").write_text(PADDING)
    if version is not None:
        name = DISTRIBUTIONS[attention]
        (directory / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (directory / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(directory)


def passed(attention: str) -> object:
    """What transformers passes as `deterministic` when a model's layer attends."""
    states = torch.zeros(1, 3, 2, 4, dtype=torch.bfloat16)
    modeling_flash_attention_utils._flash_attention_forward(
        states, states, states, None, 3, True, attn_implementation=attention
    )
    return sys.modules[MODULES[attention]].calls[-1]


@pytest.mark.parametrize("attention", MODULES)
@pytest.mark.parametrize("own", [None, "0", "1"])
@pytest.mark.parametrize("required", [True, False])
def test_transformers_passes_what_the_config_says(
    attention: str, own: str | None, required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `deterministic: false` it passes what the user's environment says. Afterwards that is as it was."""
    install(tmp_path, attention, "9.0", monkeypatch)
    if own is not None:
        monkeypatch.setenv(ASKED, own)
    notices: list[str] = []
    before = passed(attention)
    assert before is (own == "1")
    with determinism(required, torch.device("cpu"), notice=notices.append):
        assert passed(attention) is (required or own == "1")
    assert passed(attention) is before
    told = [f"{ASKED} is '0' in the environment; this run takes 1, since it has deterministic: true"]
    assert notices == (told if required and own == "0" else [])


@pytest.mark.parametrize(("attention", "version"), GOOD)
def test_versions_with_a_deterministic_backward_pass(
    attention: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, attention, version, monkeypatch)
    require_deterministic(attention)


@pytest.mark.parametrize(("attention", "version"), BAD)
def test_versions_without_one_are_rejected(
    attention: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they take the argument: builds of flash-attn-3 before its release do, and some of them ignore it."""
    install(tmp_path, attention, version, monkeypatch)
    with pytest.raises(BadInput, match=f"{attention} may give other bits.*{version}") as raised:
        require_deterministic(attention)
    assert raised.value.hint is not None
    assert "attn_implementation: sdpa" in raised.value.hint and "deterministic: false" in raised.value.hint


@pytest.mark.parametrize("attention", MODULES)
def test_a_build_that_does_not_take_the_argument_is_rejected(
    attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, attention, "9.0", monkeypatch, takes=False)
    with determinism(True, torch.device("cpu"), notice=pytest.fail):
        assert passed(attention) == "not passed"
    with pytest.raises(BadInput, match=r"this build of flash-attn.* does not take `deterministic`"):
        require_deterministic(attention)


@pytest.mark.parametrize("version", [None, "of yesterday"])
def test_a_package_of_unknown_version_is_rejected(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "flash_attention_2", version, monkeypatch)
    with pytest.raises(BadInput, match="which flash-attn is installed is not known"):
        require_deterministic("flash_attention_2")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_torchs_own_attention_needs_no_package(attention: str) -> None:
    require_deterministic(attention)
