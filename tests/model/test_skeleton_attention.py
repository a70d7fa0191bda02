"""Which attention implementation a model uses here, and why it is not the one that was asked for."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from ratel_cli.model.files import skeleton
from ratel_cli.model.files.skeleton import supported_attention, why_unsupported
from ratel_cli.run.inputs.text_data import why_not_packed
from tests.engine.architectures import tiny_config

FLASH = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
}


@pytest.mark.parametrize("wanted", FLASH)
@pytest.mark.parametrize(("architecture", "instead"), [("llama", "sdpa"), ("gptj", "eager")])
def test_without_its_package_flash_attention_becomes_the_next_best(
    architecture: str, instead: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And transformers is not asked about it, because it would look for kernels on the hub."""
    package, module = FLASH[wanted]
    monkeypatch.setattr(skeleton, "find_spec", lambda name: None if name == module else importlib.util.find_spec(name))
    config = tiny_config(architecture)
    assert supported_attention(config, wanted) == instead
    assert why_unsupported(config, wanted) == f"{wanted} needs the package {package}, which is not installed"


def test_what_a_model_supports_needs_no_reason() -> None:
    config = tiny_config("llama")
    for name in ("sdpa", "eager"):
        assert supported_attention(config, name) == name
        assert why_unsupported(config, name) is None


def test_a_model_without_a_kernel_for_it() -> None:
    config = tiny_config("gptj")
    assert why_unsupported(config, "sdpa") == "gptj does not support sdpa attention"
    assert supported_attention(config, "sdpa") == "eager"


def test_a_package_that_is_there_but_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is no such package: what transformers says then is the reason."""
    monkeypatch.setattr(skeleton, "find_spec", lambda name: object())
    config = tiny_config("llama")
    assert why_unsupported(config, "flash_attention_2") == "llama does not support flash_attention_2 attention"
    assert supported_attention(config, "flash_attention_2") == "sdpa"


@pytest.mark.parametrize("attention", FLASH)
def test_flash_attention_is_named_as_the_reason_why_samples_are_not_packed(attention: str) -> None:
    """Transformers separates packed samples there in micro-batches of one row alone. Once it does so in all of them,
    these samples can be packed (model/cut/probe.py)."""
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert _is_packed_sequence(positions, batch_size=1)
    assert not _is_packed_sequence(positions.expand(2, -1), batch_size=2)
    notice = why_not_packed("llama", attention)
    assert attention in notice and "attn_implementation: sdpa" in notice
    assert "attn_implementation" not in why_not_packed("gptj", "eager")
