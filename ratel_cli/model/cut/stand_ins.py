"""Random weights that take next to no memory, so that layers of any size compute real numbers in seconds.

A large matrix stands on few random numbers: its element (i, j) is number i + j of a buffer, a Hankel matrix. Torch
takes it for a strided tensor, so the model's own slices, transposes and reshapes work. Its product with an activation
is a correlation, which a Fourier transform computes: no large matrix ever exists. A random Hankel matrix has full rank
and mixes all inputs into every output, so nothing that depends on an input can vanish in it, as it could in a matrix
of low rank, where norms and softmaxes of equal elements give constants.

All numbers are fp64, whatever the model's code converts to, so that a difference is a dependence and not rounding.
Parameters get random values of a moderate size, whatever their initialisation: a convolution that begins with zeros,
or a recurrence that begins by forgetting everything, would hide what it passes on.

Invariant: nothing here has more than `_MOST_ELEMENTS` elements; a model whose code would need that raises RuntimeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ratel_cli.model.values.operators import OperatorMode, TorchOperator, tensors_in

_DTYPE = torch.float64
_DENSE_ELEMENTS = 1 << 16
"""Up to this size a parameter has numbers of its own."""
_COPIED_ELEMENTS = 1 << 21
"""Up to this size torch may copy a Hankel matrix to multiply with it."""
_MOST_ELEMENTS = 1 << 26
_GROUPED_PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Products of groups of rows (experts), each with its own matrix."""
_READS_ROWS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
"""Operators whose results do not grow with what they read from."""
_VECTOR_DEVIATION = 0.5
"""Standard deviation of vectors: biases, gains of norms, gates, logarithms of decays."""


class StandsIn(Protocol):
    """A parameter of a model, in whose place another can be put."""

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """The shape of what the model's code computes with."""

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter of this shape into the model."""

    def unbind(self) -> None:
        """Undo `put`."""


class StandIns(OperatorMode):
    """A context in which parameters that `bound` has replaced compute, in fp64."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._hankel: set[int] = set()
        """Storages of the buffers that matrices stand on."""

    def random(self, shape: Sequence[int]) -> torch.Tensor:
        """Random activations."""
        return torch.randn(tuple(shape), dtype=_DTYPE, generator=self._generator)

    @contextlib.contextmanager
    def bound(self, parameters: Iterable[StandsIn]) -> Iterator[None]:
        """A context in which random values are bound to the parameters."""
        parameters, made = tuple(parameters), set[int]()
        try:
            for parameter in parameters:
                values = self._values(parameter.computed_shape)
                made.add(values.untyped_storage()._cdata)
                parameter.put(nn.Parameter(values, requires_grad=False))
            self._hankel |= made
            yield
        finally:
            self._hankel -= made
            for parameter in parameters:
                parameter.unbind()

    def _values(self, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape)
        if len(size) < 2:
            return _VECTOR_DEVIATION * self.random(size)
        deviation: float = (size[-1] * size[-2]) ** -0.25
        if size.numel() <= _DENSE_ELEMENTS:
            return self.random(size) * deviation
        num_rows = size[:-1].numel()
        buffer = self.random([num_rows + size[-1] - 1]) * deviation
        strides = [size[dim + 1 : -1].numel() for dim in range(len(size) - 1)]
        return buffer.as_strided(size, [*strides, 1])

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if func.is_view:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs = {**kwargs, "dtype": _DTYPE}
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
        result: object = self._product(func, args, kwargs)
        if result is None:
            if any(tensor.numel() > _MOST_ELEMENTS for tensor in tensors_in(args)) and func not in _READS_ROWS:
                raise RuntimeError(f"{func} on a tensor of this size")
            result = func(*args, **kwargs)
        return tree_map(_widened, result)

    def _product(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor | None:
        """The result of a matrix product with a large matrix; None if the operator is none."""
        if str(func) in _GROUPED_PRODUCTS:
            return self._grouped(*tensors_in((args, kwargs)))
        added = func in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
        if not added and func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return None
        tensors = tensors_in(args)
        left, right = tensors[-2:]
        if not any(self._is_large(each) for each in (left, right)):
            return None
        product = self.multiply(left, right)
        if not added:
            return product
        beta, alpha = (kwargs.get(name, 1) for name in ("beta", "alpha"))
        assert isinstance(beta, int | float) and isinstance(alpha, int | float)
        return tensors[0] * beta + product * alpha

    def _is_large(self, matrix: torch.Tensor) -> bool:
        return matrix.untyped_storage()._cdata in self._hankel and matrix.numel() > _COPIED_ELEMENTS

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product of `[.., rows, inner]` and `[.., inner, columns]`, with the same leading sizes."""
        if right.dim() == 3:
            return torch.stack([self.multiply(*pair) for pair in zip(left, right, strict=True)])
        if self._is_large(left) and not self._is_large(right):
            return self.multiply(right.T, left.T).T
        if not len(left):
            return left.new_zeros((0, right.shape[1]))
        if not self._is_large(right):
            return left @ right
        if right.stride() == (1, 1):
            return _correlation(left, right)
        step = max(1, _COPIED_ELEMENTS // right.shape[0])
        return torch.cat([left @ columns for columns in right.split(step, dim=1)], dim=1)

    def _grouped(self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Products of rows `[rows, inner]`, grouped by the row at which each group ends, with a matrix for each group:
        `[groups, inner, columns]`."""
        if right.dim() != 3:
            raise RuntimeError("a product of groups of another shape")
        bounds = [0, *map(int, ends)]
        groups = [left[start:end] for start, end in pairwise(bounds)]
        products = [self.multiply(rows, matrix) for rows, matrix in zip(groups, right, strict=True)]
        return torch.cat([*products, left.new_zeros((len(left) - bounds[-1], right.shape[-1]))])


def _correlation(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right`, where element (i, j) of `right` is number i + j of its buffer."""
    inner, columns = right.shape
    length = inner + columns - 1
    numbers = right.as_strided((length,), (1,))
    size = _fast_length(length)
    # Below the dispatcher a lazy conj() would be ignored.
    spectrum = torch.conj_physical(torch.fft.rfft(left, size)) * torch.fft.rfft(numbers, size)
    product: torch.Tensor = torch.fft.irfft(spectrum, size)
    return product[:, :columns]


def _fast_length(length: int) -> int:
    """The least length, of at least this many numbers, that has no prime factor but 2, 3 and 5."""
    while True:
        rest = length
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return length
        length += 1


def _widened(leaf: object) -> object:
    is_narrow = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype is not _DTYPE
    return leaf.to(_DTYPE) if isinstance(leaf, torch.Tensor) and is_narrow else leaf
