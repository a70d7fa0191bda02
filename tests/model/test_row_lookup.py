"""Looking tokens up in a matrix that has some rows only: the bits of the whole matrix, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.row_lookup import DistinctTokens, RowLookup
from ratel_cli.planning.profile.placement import Workload, most_rows
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.tiers import thinned

CPU = torch.device("cpu")
VOCAB, WIDTH, PADDING = 500, 24, 7


class Scaled(nn.Embedding):
    """As in Gemma."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * 3.5


def embedding(*, padding_idx: int | None, dtype: torch.dtype, kind: type[nn.Embedding] = nn.Embedding) -> nn.Embedding:
    torch.manual_seed(3)
    return kind(VOCAB, WIDTH, padding_idx=padding_idx, dtype=dtype)


def looked_up(module: nn.Embedding, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the gradient of the matrix as it is bound."""
    module.weight.grad = None
    result = module(ids)
    generator = torch.Generator().manual_seed(9)
    result.backward(torch.randn(result.shape, generator=generator).to(result.dtype))
    assert module.weight.grad is not None
    return result.detach(), module.weight.grad


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, PADDING])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(torch.tensor([[11]]), id="one token"),
        pytest.param(torch.full((2, 9), 11), id="one token, many times"),
        pytest.param(torch.tensor([[499, PADDING, 0, PADDING, 499]]), id="with padding"),
        pytest.param(torch.full((1, 3), PADDING), id="padding alone"),
        pytest.param(torch.tensor([[8, 6, 8]]), id="next to the padding token"),
        pytest.param(torch.arange(VOCAB).flip(0).view(2, -1), id="every token"),
        pytest.param(
            torch.randint(0, VOCAB, (3, 1111), generator=torch.Generator().manual_seed(1)), id="more than 3072"
        ),
    ],
)
def test_rows_have_the_bits_of_the_whole_matrix(
    ids: torch.Tensor, padding_idx: int | None, dtype: torch.dtype, kind: type[nn.Embedding]
) -> None:
    module = embedding(padding_idx=padding_idx, dtype=dtype, kind=kind)
    whole = module.weight
    wanted, wanted_gradient = looked_up(module, ids)
    tokens = DistinctTokens.of([ids], CPU)
    lookup = RowLookup(module)
    lookup.bind(tokens)
    module.weight = nn.Parameter(whole.detach()[tokens.ids])
    found, gradient = looked_up(module, ids)
    assert torch.equal(found, wanted)
    assert torch.equal(gradient, wanted_gradient[tokens.ids])
    assert len(tokens) == len(gradient) and not wanted_gradient.index_fill(0, tokens.ids, 0).any()
    lookup.unbind()
    lookup.unbind()
    module.weight = whole
    again, again_gradient = looked_up(module, ids)
    assert torch.equal(again, wanted) and torch.equal(again_gradient, wanted_gradient)
    assert module.padding_idx == padding_idx


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, every=4, offset=2))
def test_every_architecture_looks_up_rows(architecture: str) -> None:
    skeleton = build_skeleton(tiny_config(architecture), dtype="float32", attn_implementation="eager")
    padding_id = getattr(skeleton.get_input_embeddings(), "padding_idx", None)
    model = find_blocks(skeleton, name="tiny")
    assert model.spec.looks_up_rows
    assert getattr(skeleton.get_input_embeddings(), "padding_idx", None) == padding_id


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda module, ids: module.weight[ids], id="by an index"),
        pytest.param(lambda module, ids: nn.Embedding.forward(module, ids) + module.weight.mean(), id="more than rows"),
        pytest.param(lambda module, ids: functional.embedding(0 * ids, module.weight), id="rows of its own"),
        pytest.param(
            lambda module, ids: functional.one_hot(ids, VOCAB)[..., :97].float() @ module.weight, id="product"
        ),
    ],
)
def test_code_that_reads_the_matrix_itself_is_noticed(
    read: Callable[[nn.Embedding, torch.Tensor], torch.Tensor],
) -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="eager")
    module = skeleton.get_input_embeddings()
    assert isinstance(module, nn.Embedding)
    module.forward = lambda ids: read(module, ids)  # type: ignore[method-assign]
    assert not find_blocks(skeleton, name="tiny").spec.looks_up_rows


@pytest.mark.parametrize("placeholder", [9, 64])
@pytest.mark.parametrize("padding", [2, 50, 90])
def test_a_token_that_is_looked_up_in_the_place_of_another_gets_a_row(placeholder: int, padding: int) -> None:
    """As Gemma 4 does with the token that stands for an image. The padding token need not be one of the step's."""
    config = tiny_config("llama")
    config.other_parts = {"image_token_index": placeholder}
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="eager")
    assert find_blocks(skeleton, name="tiny").spec.substitutes == ()
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="eager")
    owner = skeleton.get_submodule("model")
    forward = owner.forward
    owner.forward = lambda input_ids, **keywords: forward(  # type: ignore[method-assign]
        input_ids=torch.where(input_ids == placeholder, padding, input_ids), **keywords
    )
    spec = find_blocks(skeleton, name="tiny").spec
    assert (spec.looks_up_rows, spec.substitutes) == (True, (padding,))
    tokens = DistinctTokens.of([torch.tensor([[placeholder, 7]])], CPU, substitutes=spec.substitutes)
    assert tokens.ids.tolist() == sorted({placeholder, 7, padding})
    assert most_rows(spec, Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=8)) == 9


def test_another_class_than_torchs_gets_the_matrix() -> None:
    class Table(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return functional.embedding(ids, self.weight)

    skeleton = build_skeleton(tiny_config("llama"), dtype="float32", attn_implementation="eager")
    embedding = skeleton.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    skeleton.set_input_embeddings(Table(embedding.weight))
    try:
        model = find_blocks(skeleton, name="tiny")
    except BadInput:
        pytest.fail("such a model can be streamed")
    assert not model.spec.looks_up_rows
