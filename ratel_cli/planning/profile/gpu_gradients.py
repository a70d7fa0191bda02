"""What gradients of a segment take of a GPU's memory on their way to host memory and back. Pure.

Gradients leave parameter by parameter. Those of norms and biases are made next to a matrix's, and should not wait.
"""

from __future__ import annotations

from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.units import MIB

_VECTORS_BYTES = MIB
"""At most this for gradients of norms and biases, which are downloaded next to that of a matrix and should not wait."""


def largest_elements(block: BlockSpec) -> int:
    """The elements of a block's largest parameter."""
    return max((parameter.num_elements for parameter in block.parameters), default=0)


def largest_bytes(segment: Segment) -> int:
    """The gradient of a segment's largest parameter, as it leaves."""
    return max((largest_elements(block) * block.gradient_dtype_bytes for block in segment.trained), default=0)


def least_leaving_bytes(segment: Segment) -> int:
    """The least GPU memory for a segment's gradients until their downloads have ended: for its largest parameter."""
    vectors_bytes = sum(_vector_elements(block) * block.gradient_dtype_bytes for block in segment.trained)
    return min(largest_bytes(segment) + min(_VECTORS_BYTES, vectors_bytes), segment.gradient_bytes)


def others_leaving_bytes(segment: Segment) -> int:
    """Gradients of a segment that are leaving when its largest one is made, if all are made before any leaves."""
    return min(least_leaving_bytes(segment), segment.gradient_bytes - largest_bytes(segment))


def shared_bytes(segment: Segment) -> int:
    """Gradients of shared blocks: those that come from segments above, with one of them that is being added to; and
    those that go on to segments below."""
    begun_bytes = sum(block.compute_bytes for block in segment.begun)
    added_bytes = max((largest_elements(block) * block.dtype_bytes for block in segment.begun), default=0)
    return begun_bytes + added_bytes + sum(block.compute_bytes for block in segment.unfinished)


def summed_elements(block: BlockSpec) -> int:
    """The elements of a block whose sums may be on the GPU at once where host memory has them: those of its largest
    parameter and of norms and biases, whose gradients come next to those of matrices."""
    return min(block.num_elements, largest_elements(block) + _vector_elements(block))


def returned_bytes(segment: Segment) -> int:
    """The gradient of a segment's largest parameter, back for its norm; with an fp32 copy if the loss is scaled."""
    copy_bytes = 4 if segment.scales_loss else 0
    sizes = (largest_elements(block) * (block.gradient_dtype_bytes + copy_bytes) for block in segment.trained)
    return max(sizes, default=0)


def _vector_elements(block: BlockSpec) -> int:
    return sum(parameter.num_elements for parameter in block.parameters if len(parameter.shape) < 2)
