"""Patterns over names choose what is trained, with axolotl's meaning."""

from __future__ import annotations

import re

import pytest
from torch import nn

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.freezing import freeze
from tests.engine.architectures import tiny_config


def model() -> nn.Module:
    """Parameters `a.weight`, `a.bias`, `b.0.weight`, `b.0.bias` ... `b.11.bias`."""
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList(nn.Linear(2, 2) for _ in range(12))})


def trained(*, unfrozen: tuple[str, ...] = (), frozen: tuple[str, ...] = ()) -> list[str]:
    made = model()
    freeze(made, unfrozen=unfrozen, frozen=frozen)
    return [name for name, parameter in made.named_parameters() if parameter.requires_grad]


def axolotl_matches(pattern: str, name: str) -> bool:
    """What axolotl documents: a regular expression from the beginning of the name, in which a dot is a dot, unless it
    is repeated with a plus. (Brackets with numbers at its end are rows.)"""
    assert not re.search(r"\[[0-9]*(:[0-9]*)?\]$", pattern)
    return re.match(re.sub(r"\.(?!\+)", r"\\.", pattern), name) is not None


@pytest.mark.parametrize(
    "pattern", ["a", "^a.weight$", "b.1(0|1)", "b.1[01].", "b.1.", "b.[0-9]+.bias", "b.+bias", ".weight", "b$"]
)
def test_patterns_mean_what_they_mean_in_axolotl(pattern: str) -> None:
    wanted = [name for name, _ in model().named_parameters() if axolotl_matches(pattern, name)]
    if wanted:
        assert trained(unfrozen=(pattern,)) == wanted
    else:
        with pytest.raises(BadInput, match="matches no parameter"):
            trained(unfrozen=(pattern,))


def test_both_lists_together() -> None:
    assert trained(unfrozen=("a", r"b\.2\."), frozen=(".*bias",)) == ["a.weight", "b.2.weight"]
    assert len(trained()) == 26


def test_what_the_model_itself_has_frozen_stays_so() -> None:
    made = model()
    made["a"].bias.requires_grad_(False)  # type: ignore[index]
    freeze(made, unfrozen=("a",), frozen=())
    assert [name for name, parameter in made.named_parameters() if parameter.requires_grad] == ["a.weight"]


@pytest.mark.parametrize(
    ("unfrozen", "frozen", "message"),
    [
        (("c",), (), "unfrozen_parameters: c: matches no parameter"),
        ((), ("a.weight.x",), "frozen_parameters: a.weight.x: matches no parameter"),
        (("a(",), (), "unfrozen_parameters: a(: not a regular expression"),
        (("a.weight[:1]",), (), "unfrozen_parameters: a.weight[:1]: brackets at the end are rows"),
        (("a.weight$[1:]",), (), "are rows of a matrix"),
        (("a.weight[1]",), (), "are rows of a matrix"),
        (("a",), ("a",), "unfrozen_parameters and frozen_parameters: no parameter is left to train"),
        ((), (".*",), "frozen_parameters: no parameter is left to train"),
    ],
)
def test_what_cannot_be(unfrozen: tuple[str, ...], frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        trained(unfrozen=unfrozen, frozen=frozen)


def test_blocks_of_frozen_parts() -> None:
    skeleton = build_skeleton(tiny_config("llama_tied"), dtype="bfloat16", attn_implementation="sdpa")
    freeze(skeleton, unfrozen=("model.layers.1.mlp",), frozen=())
    spec = find_blocks(skeleton, name="tiny").spec
    assert spec.first_trained == 2 and spec.num_trained == 3 * 32 * 64
    assert [(each.segment, each.name) for each in spec.blocks if each.is_trained] == [(2, "layer 1")]
    assert all(each.dtype == "bfloat16" for each in spec.blocks)
    assert spec.lookup_block is not None and not spec.lookup_block.is_trained
    assert not spec.tied, "the head's gradient of the matrix is nothing"
    assert spec.head.borrowed == (spec.lookup_block,)
    with_gradients = [segment.index for segment in spec.segments if spec.has_backward(segment)]
    assert with_gradients == [2, 3, 4] and not spec.passes_on(spec.segments[2])
    assert spec.embedding.record_bytes == 0
