"""What a matrix moves along in an update by Muon: its momentum, made orthogonal.

Jordan et al., 2024, as `torch.optim.Muon` computes it. The mean of the gradients is found on the CPU, where it lies.
The Newton-Schulz iteration is five times three matrix products, in bf16, on the device that computes: on a GPU they
queue among the model's own work. The kernel then moves the weights (kernels/update/muon.h).

Invariants: the momentum is only read; the bits are those of torch's operations on the same device, with products in
fp32 where the CPU has no bf16.
"""

from __future__ import annotations

import torch

from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.settings import MuonSettings
from ratel_cli.io.views import view
from ratel_cli.schedule.rules import NEWTON_SCHULZ_STEPS

_PIECE_ELEMENTS = 1 << 20
"""Elements of the gradient that are in fp32 at once."""
_LEAST_NORM = 1e-7
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""A step is A X + (B X Xt + C (X Xt)^2) X: it takes singular values into the neighbourhood of 1."""


class Directions:
    """Makes directions, on the optimizer thread."""

    def __init__(self, settings: MuonSettings, device: Device) -> None:
        """`device`: that of the matrix products."""
        self._settings = settings
        self._device = device
        self._products_in = dtype_of_products(device.torch_device)

    @torch.no_grad()
    def make(
        self,
        shape: tuple[int, ...],
        *,
        momentum: memoryview,
        gradient: memoryview,
        gradient_dtype: torch.dtype,
        gradient_scale: float,
        into: memoryview,
    ) -> None:
        """Write the direction of a matrix `[rows, columns]`, as bf16. The memories begin with its elements: the
        momentum before this update, in fp32, and the gradient, which is multiplied by the scale first."""
        settings, size = self._settings, shape[0] * shape[1]
        found = view(into, torch.bfloat16)[:size]
        means, gradients = view(momentum, torch.float32)[:size], view(gradient, gradient_dtype)[:size]
        for start in range(0, size, _PIECE_ELEMENTS):
            piece = slice(start, start + _PIECE_ELEMENTS)
            scaled = gradients[piece].float() * gradient_scale
            mean = means[piece].lerp(scaled, 1 - settings.momentum)
            found[piece] = scaled.lerp(mean, settings.momentum) if settings.nesterov else mean
        matrix = found.view(shape)
        with self._device.joined():
            matrix.copy_(orthogonal(matrix.to(self._device.torch_device), products_in=self._products_in))


def orthogonal(matrix: torch.Tensor, *, products_in: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly, by Newton and Schulz: bf16 `[rows, columns]`. What
    is given is overwritten. `products_in`: the dtype of matrix products, each of which is rounded to bf16."""
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found.div_(found.norm().clamp(min=_LEAST_NORM))
    for _ in range(NEWTON_SCHULZ_STEPS):  # what has been used makes room at once
        wide = found.to(products_in)
        del found
        gram = (wide @ wide.T).bfloat16().to(products_in)
        factor = torch.addmm(gram, gram, gram, beta=_B, alpha=_C).bfloat16().to(products_in)
        del gram
        product = torch.addmm(wide, factor, wide, beta=_A)
        del wide, factor
        found = product.bfloat16()
        del product
    return found.T if is_tall else found


def dtype_of_products(device: torch.device) -> torch.dtype:
    """Return the dtype of Muon's matrix products on a device: bf16, as in torch, but fp32 on processors without
    instructions for it. There torch multiplies in bf16 element by element: a matrix of 1024 x 1024 took 24 s, and in
    fp32 0.1 s (2-core EPYC with AVX2, 2026-11)."""
    has_bf16 = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32
