"""What a matrix moves along in an update by Muon: its momentum, made orthogonal. Calls methods of tensors alone.

Jordan et al., 2024, as `torch.optim.Muon` computes it. The mean of the gradients is found on the CPU, where it lies.
The Newton-Schulz iteration is five times three matrix products, in bf16, on the device that computes: on a GPU they
queue among the model's own work. The kernel then moves the weights (kernels/update/muon.h).

Invariants: the momentum is only read; the bits are those of torch's operations on the same device, with products in
fp32 where the CPU has no bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ratel_cli.schedule.updates import Directed, Numbers

if TYPE_CHECKING:
    import torch

_NUM_STEPS: Final = 5
_LEAST_NORM: Final = 1e-7
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""A step is A X + (B X Xt + C (X Xt)^2) X: it takes singular values into the neighbourhood of 1."""


def mean_gradient(gradient: torch.Tensor, state: Mapping[str, torch.Tensor], numbers: Numbers) -> torch.Tensor:
    """The mean of the gradients after this update, of some elements."""
    momentum = numbers.options["momentum"]
    mean = state["m32"].lerp(gradient, 1 - momentum)
    return gradient.lerp(mean, momentum) if numbers.options["nesterov"] else mean


def orthogonal(matrix: torch.Tensor, products_in: torch.dtype) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly, by Newton and Schulz: bf16 `[rows, columns]`. What
    is given is overwritten. `products_in`: the dtype of matrix products, each of which is rounded to bf16."""
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found.div_(found.norm().clamp(min=_LEAST_NORM))
    for _ in range(_NUM_STEPS):  # what has been used makes room at once
        wide = found.to(products_in)
        del found
        gram = (wide @ wide.T).bfloat16().to(products_in)
        factor = gram.addmm(gram, gram, beta=_B, alpha=_C).bfloat16().to(products_in)
        del gram
        product = wide.addmm(factor, wide, beta=_A)
        del wide, factor
        found = product.bfloat16()
        del product
    return found.T if is_tall else found


ORTHOGONAL: Final = Directed(
    on_cpu=mean_gradient,
    on_device=orthogonal,
    # A product has the matrix, the factor and the result; a CPU copies what it multiplies, too. Before that, products
    # of the matrix with itself are there, one of them in both dtypes.
    num_values=lambda long, short: 3 * long * short + 2 * short**2,
    num_flops=lambda long, short: _NUM_STEPS * (4 * short**2 * long + 2 * short**3),  # three products in a step
)
