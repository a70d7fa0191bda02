"""What one layer's backward needs of its forward for one micro-batch, and how that is offloaded.

Invariant: a unit takes the same bytes wherever it lies: the storages of its tensors, one after another, aligned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from ratel_cli.engine.cache.offloader import Offloaded, TensorLayout
from ratel_cli.sizes import PACKED_ALIGNMENT
from ratel_cli.units import align_up

WINDOW_PURPOSE = "activations on their way"
"""Purpose of the buffers for units that go to NVMe."""


def purpose_of_units(block: int) -> str:
    """Return the purpose of the buffers for a block's units that stay in host memory."""
    return f"activations of block {block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one layer's backward needs of its forward, for one micro-batch."""

    leaf: torch.Tensor
    """The layer's input `[batch, tokens, hidden]`."""
    offloaded: dict[int, tuple[torch.Tensor, ...]]
    """Outputs of swapped operators, by position in the tape, each in the shape that the operator gave it. The replay
    takes them out."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the unit, the layer's input first."""
        return [self.leaf, *(tensor for tensors in self.offloaded.values() for tensor in tensors)]

    @property
    def num_bytes(self) -> int:
        """Size of the packed unit: the tensors' storages, each aligned to `PACKED_ALIGNMENT`."""
        return sum(align_up(tensor.untyped_storage().nbytes(), PACKED_ALIGNMENT) for tensor in self.tensors)


class PackedUnit(Offloaded):
    """A unit that is moved: it lies in a leased buffer now or later, and on NVMe if it is spilled."""

    def __init__(self, block: int, unit: Unit) -> None:
        sizes = [tensor.untyped_storage().nbytes() for tensor in unit.tensors]
        super().__init__(what=purpose_of_units(block), block=block, sizes=sizes)
        self.num_elements = unit.leaf.numel()
        self._layouts = [TensorLayout.of(tensor) for tensor in unit.tensors]
        self._num_outputs = {index: len(tensors) for index, tensors in unit.offloaded.items()}

    def unit_in(self, storages: Iterable[torch.Tensor]) -> Unit:
        """The unit in the bytes of its tensors' storages, each flat uint8 `[bytes]`. It holds them."""
        tensors = iter([layout.tensor_in(values) for layout, values in zip(self._layouts, storages, strict=True)])
        return Unit(
            leaf=next(tensors),
            offloaded={index: tuple(islice(tensors, number)) for index, number in self._num_outputs.items()},
        )
