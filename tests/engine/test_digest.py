"""A tensor's digest: equal for equal bits, another one for any other bit or order."""

from __future__ import annotations

import pytest
import torch

from ratel_cli.engine.measure.digest import digest

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES = ((), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3), (4, 1, 5))


@pytest.fixture(params=["CPU", "GPU"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "GPU":  # the sums need no GPU
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("where")
def test_it_changes_with_every_element(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        first = digest(values)
        assert torch.equal(first, digest(values.clone()))
        for index in range(values.numel()):
            other = values.clone()
            other.view(-1)[index] = 1 - other.view(-1)[index].to(torch.float32 if dtype is torch.bool else dtype)
            assert not torch.equal(first, digest(other)), (shape, index)


@pytest.mark.usefixtures("where")
def test_it_changes_with_the_order_the_sign_of_zero_and_the_payload_of_a_nan() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    for other in (values[[1, 0, 2]], values[:, [1, 0, 2, 3]], values.flip(0, 1), -values):
        assert not torch.equal(digest(values), digest(other))
    swapped = values.clone()
    swapped[0, 1], swapped[2, 3] = values[2, 3], values[0, 1]
    assert not torch.equal(digest(values), digest(swapped))
    zero, nan = torch.zeros(2), torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not torch.equal(digest(zero), digest(-zero))
    assert not torch.equal(digest(nan[:1]), digest(nan[1:]))


@pytest.mark.usefixtures("where")
def test_it_is_of_the_values_however_they_lie_in_memory() -> None:
    values = torch.randn(5, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    for view in (values.conj(), values.conj().imag, values.mT, values[::2, 1:]):
        assert torch.equal(digest(view), digest(view.detach().resolve_conj().resolve_neg().clone().contiguous()))
