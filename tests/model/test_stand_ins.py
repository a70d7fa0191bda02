"""Products with stand-ins for large matrices are those of the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ratel_cli.model.cut import stand_ins
from ratel_cli.model.cut.stand_ins import StandIns


class Place:
    """A place for one parameter."""

    def __init__(self, *shape: int) -> None:
        self.shape = self.computed_shape = shape
        self.parameter: nn.Parameter | None = None

    def put(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def unbind(self) -> None:
        self.parameter = None


USES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "linear": ((3, 40), (50, 40), nn.functional.linear),
    "batched linear": ((2, 3, 40), (50, 40), nn.functional.linear),
    "with a bias": ((3, 40), (50, 40), lambda x, w: nn.functional.linear(x, w, torch.arange(50.0).double())),
    "scaled sum": ((3, 40), (40, 50), lambda x, w: torch.addmm(torch.ones(50).double(), x, w, beta=2, alpha=3)),
    "inputs first": ((3, 40), (40, 50), lambda x, w: x @ w),
    "matrix first": ((40, 3), (50, 40), lambda x, w: w @ x),
    "some columns": ((3, 10), (50, 40), lambda x, w: x @ w[:, 5:15].T),
    "every second row": ((3, 40), (50, 40), lambda x, w: x @ w[::2].T),
    "heads": ((5, 3, 40), (50, 40), lambda x, w: x @ w.view(5, 10, 40).transpose(1, 2)),
    "experts": ((4, 3, 40), (4, 40, 50), torch.bmm),
    "one expert": ((3, 40), (4, 50, 40), lambda x, w: nn.functional.linear(x, w[2])),
    "no rows": ((0, 40), (50, 40), nn.functional.linear),
    "equation": ((2, 3, 40), (5, 10, 40), lambda x, w: torch.einsum("bti,hdi->bthd", x, w)),
    "groups": (
        (9, 40),
        (4, 40, 50),
        lambda x, w: torch._grouped_mm(x, w, offs=torch.tensor([2, 2, 7, 8], dtype=torch.int32)),
    ),
    "cast": ((3, 40), (50, 40), lambda x, w: nn.functional.linear(x.to(torch.bfloat16), w.float())),
    "rows": ((1,), (50, 40), lambda x, w: nn.functional.embedding(torch.tensor([[3, 49, 0]]), w)),
}


@pytest.mark.parametrize("use", USES)
def test_products_are_those_of_the_matrix(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_DENSE_ELEMENTS", 0)
    monkeypatch.setattr(stand_ins, "_COPIED_ELEMENTS", 0)
    left, right, function = USES[use]
    place = Place(*right)
    with torch.no_grad(), StandIns() as mode, mode.bound([place]):
        assert place.parameter is not None and place.parameter.untyped_storage().nbytes() < 8 * (sum(right) + 200)
        matrix = place.parameter.clone()
        activations = mode.random(left)
        found = function(activations, place.parameter)
    if use == "groups":
        wanted = torch.cat([activations[start:end] @ matrix[expert] for expert, (start, end) in enumerate(
            [(0, 2), (2, 2), (2, 7), (7, 8)]
        )] + [torch.zeros(1, 50).double()])  # fmt: skip
    elif use == "cast":
        wanted = nn.functional.linear(activations, matrix)
    else:
        wanted = function(activations, matrix)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_large_matrix_has_full_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix of low rank, norms and softmaxes could hide what passes through it."""
    monkeypatch.setattr(stand_ins, "_DENSE_ELEMENTS", 0)
    place = Place(60, 40)
    with torch.no_grad(), StandIns() as mode, mode.bound([place]):
        assert place.parameter is not None
        values = torch.linalg.svdvals(place.parameter.detach().clone())
    assert place.parameter is None
    assert len(values) == 40 and values.min() > 1e-3 * values.max()


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.empty])
def test_all_numbers_are_fp64(make: Callable[..., torch.Tensor]) -> None:
    with StandIns():
        assert make(3).dtype == torch.float64
        assert make(3, dtype=torch.bfloat16).dtype == torch.float64
        assert make(3, dtype=torch.long).dtype == torch.long
        assert torch.full((2,), 7).dtype == torch.long


def test_what_would_need_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_DENSE_ELEMENTS", 0)
    monkeypatch.setattr(stand_ins, "_MOST_ELEMENTS", 1000)
    place = Place(60, 40)
    with torch.no_grad(), StandIns() as mode, mode.bound([place]):
        assert place.parameter is not None
        with pytest.raises(RuntimeError, match="on a tensor of this size"):
            place.parameter.sin()
