"""Segments, the unit of computing: the pieces of a model's own code that run one after another. Pure.

Of a decoder, the embedding, each layer and the head are one segment each. A segment binds its blocks, computes for
every micro-batch, and gives them up. The parameters that are trained in the model's dtype are one block; what needs
another dtype or another rule, or is shared with other segments, is in further blocks. A shared block belongs to the
first segment that binds it; the others borrow it. A segment may have no block of its own. What moves ahead of
computing, waits behind it or stays in memory is counted in segments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec


@dataclass(frozen=True)
class Segment:
    """One piece of a model, and the blocks that it binds. Sizes are sums over these, or over those that are its own."""

    blocks: tuple[BlockSpec, ...]
    """Blocks of its own."""
    borrowed: tuple[BlockSpec, ...] = ()
    """Blocks of segments below that it binds, too."""
    index: int = 0
    """Its place in the order of forward."""
    name: str = ""
    """Its name in messages."""

    @cached_property
    def bound(self) -> tuple[BlockSpec, ...]:
        """All blocks that it binds, its own first."""
        return (*self.blocks, *self.borrowed)

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters of all blocks that it binds, in their order. Each begins where its own block says."""
        return tuple(parameter for block in self.bound for parameter in block.parameters)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Where its weights may be cut, in bytes of `compute_bytes`: where a parameter begins, and at both ends."""
        found, start = {0, self.compute_bytes}, 0
        for block in self.bound:
            found.update(start + parameter.start * block.dtype_bytes for parameter in block.parameters)
            start += block.compute_bytes
        return tuple(sorted(found))

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: in fp16."""
        return any(block.scales_loss for block in self.bound)

    @cached_property
    def block_kinds(self) -> tuple[tuple[str, bool, int], ...]:
        """The dtype of each block that it binds, whether it is trained, and how many parameters it has: what shapes do
        not tell."""
        return tuple((block.dtype, block.is_trained, len(block.parameters)) for block in self.bound)

    @cached_property
    def trained(self) -> tuple[BlockSpec, ...]:
        """Its own blocks that have gradients."""
        return tuple(block for block in self.blocks if block.is_trained)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of the flat arrays that have gradients."""
        return sum(block.num_elements for block in self.trained)

    @cached_property
    def update_work(self) -> float:
        """Elements of its updates, as many as AdamW updates in the same time."""
        return sum(block.update_work for block in self.trained)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters of its own, without padding."""
        return sum(block.num_parameters for block in self.blocks)

    @cached_property
    def compute_bytes(self) -> int:
        """Weights that the device computes with (P16), borrowed ones too."""
        return sum(block.compute_bytes for block in self.bound)

    @cached_property
    def own_bytes(self) -> int:
        """The part of `compute_bytes` that is not borrowed."""
        return sum(block.compute_bytes for block in self.blocks)

    @cached_property
    def read_bytes(self) -> int:
        """What reading its own weights takes of the drives."""
        return sum(block.read_bytes for block in self.blocks)

    @cached_property
    def updated_bytes(self) -> int:
        """The part of `own_bytes` that an update changes."""
        return sum(block.compute_bytes for block in self.trained)

    @cached_property
    def begun(self) -> tuple[BlockSpec, ...]:
        """Blocks whose gradients a micro-batch brings from segments above, apart from what tokens are looked up in."""
        return tuple(each for each in self.bound if each.has_partial_sums and self.index < max(each.users))

    @cached_property
    def unfinished(self) -> tuple[BlockSpec, ...]:
        """Blocks whose gradients a micro-batch takes on to segments below, apart from what tokens are looked up in."""
        return tuple(block for block in self.borrowed if block.has_partial_sums)

    @cached_property
    def borrowed_lookups(self) -> tuple[BlockSpec, ...]:
        """Blocks of segments below that tokens are looked up in there: a tied head has one."""
        return tuple(block for block in self.borrowed if block.is_trained and block.is_looked_up)

    @cached_property
    def made_bytes(self) -> int:
        """Gradients of all that it binds, as its backward makes them."""
        return sum(block.compute_bytes for block in self.bound if block.is_trained)

    @cached_property
    def record_bytes(self) -> int:
        """All fields in the store: what updates write."""
        return sum(block.record_bytes for block in self.blocks)

    @cached_property
    def state_bytes(self) -> int:
        """Fields that only the updates read."""
        return sum(block.state_bytes for block in self.blocks)

    @cached_property
    def gradient_bytes(self) -> int:
        """Gradients as they leave the device and are held (G16)."""
        return sum(block.gradient_bytes for block in self.blocks)

    @cached_property
    def sum_bytes(self) -> int:
        """Sums of gradients over micro-batches, in fp32."""
        return 4 * self.trained_elements

    @cached_property
    def update_bytes(self) -> int:
        """What the updates move in main memory."""
        return sum(block.update_bytes for block in self.blocks)


def first_trained(segments: Sequence[Segment]) -> int:
    """The index of the first segment that has something to train: backward ends there. The last one if none has."""
    return next((index for index, segment in enumerate(segments) if segment.trained), len(segments) - 1)


def segments_of(blocks: Sequence[BlockSpec], names: Sequence[str]) -> Iterator[Segment]:
    """The segments of these names, in the order of forward, with the blocks that they bind."""
    own, borrowed = defaultdict[int, list[BlockSpec]](list), defaultdict[int, list[BlockSpec]](list)
    for block in blocks:
        own[block.segment].append(block)
        for borrower in block.borrowers:
            borrowed[borrower].append(block)
    for index, name in enumerate(names):
        yield Segment(tuple(own[index]), tuple(borrowed[index]), index, name)
