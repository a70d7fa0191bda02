"""What gradients of a block take of a GPU's memory on their way to host memory and back. Pure.

Gradients leave parameter by parameter. Those of norms and biases are made next to a matrix's, and should not wait.
"""

from __future__ import annotations

from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.units import MIB

_VECTORS_BYTES = MIB
"""At most this for gradients of norms and biases, which are downloaded next to that of a matrix and should not wait."""


def largest_elements(block: BlockSpec) -> int:
    """The elements of a block's largest parameter."""
    return max((parameter.num_elements for parameter in block.parameters), default=0)


def least_leaving_bytes(block: BlockSpec) -> int:
    """The least GPU memory for a block's gradients until their downloads have ended: for its largest parameter."""
    gradient_bytes = block.gradient_dtype_bytes
    vectors = _vector_elements(block)
    leaving = largest_elements(block) * gradient_bytes + min(_VECTORS_BYTES, vectors * gradient_bytes)
    return min(leaving, block.num_elements * gradient_bytes)


def others_leaving_bytes(block: BlockSpec) -> int:
    """Gradients of a block that are leaving when its largest one is made, if all are made before any leaves."""
    others_bytes = (block.num_elements - largest_elements(block)) * block.gradient_dtype_bytes
    return min(least_leaving_bytes(block), others_bytes)


def summed_elements(block: BlockSpec) -> int:
    """The elements of a block whose sums may be on the GPU at once where host memory has them: those of its largest
    parameter and of norms and biases, whose gradients come next to those of matrices."""
    return min(block.num_elements, largest_elements(block) + _vector_elements(block))


def returned_bytes(block: BlockSpec) -> int:
    """The gradient of a block's largest parameter, back for its norm; with an fp32 copy if the loss is scaled."""
    return largest_elements(block) * (block.gradient_dtype_bytes + (4 if block.scales_loss else 0))


def _vector_elements(block: BlockSpec) -> int:
    return sum(parameter.num_elements for parameter in block.parameters if len(parameter.shape) < 2)
