"""Which attention implementation a model uses here, and why it is not the one that was asked for."""

from __future__ import annotations

import importlib.util

import pytest

from ratel_cli.model import skeleton
from ratel_cli.model.skeleton import supported_attention, why_unsupported
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
