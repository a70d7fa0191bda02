"""The rows of the embedding's matrix that a step needs, where a GPU computes.

A step looks up the rows of its tokens and nothing else of the matrix. So the matrix stays in host memory:

    1. gather   host memory collects the rows of the step's distinct tokens, in the order of their ids, and these go up;
                or the GPU collects them, where it reads the matrix in place
    2. look up  the model's embedding gets row numbers in place of token ids (model/values/row_lookup.py)
    3. leave    the gradient of the rows comes down; all other rows have a gradient of zero
    4. spread   the update of a group of parameters gets the rows in their places, between zeros

The packed block is the embedding's block with as many rows as the step has tokens, the most that it can need: buffers
in host memory have its size, whatever the number of distinct tokens. Steps with fewer tokens than planned reuse the
buffers of others, which are never larger than the largest packed block (`largest`).

Invariants: rows that no token names have a gradient of zero, not none, so AdamW moves them as torch does; norms are
those of the whole matrix, in torch's order of addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ratel_cli.engine.device.device import Device
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import bytes_ahead, num_looked_up
from ratel_cli.schedule.blocks import BlockSpec, with_rows
from ratel_cli.schedule.segments import Segment


class EmbeddingRows:
    """The rows of one step or of one evaluation."""

    def __init__(self, block: BlockSpec, tokens: DistinctTokens, *, num_rows: int, most_rows: int) -> None:
        """`block`: that of the embedding. `num_rows`: one for each token of the step, not all of them distinct, and
        each substitute. `most_rows`: the most that any step has."""
        self.block = block
        self.tokens = tokens
        self._shape = block.parameters[0].shape
        self.packed = with_rows(block, num_rows)
        self.largest = with_rows(block, min(most_rows, self._shape[0]))
        """The packed block of a step with `most_rows` tokens."""

    @classmethod
    def of(
        cls, spec: ModelSpec, input_ids: Sequence[torch.Tensor], device: torch.device, *, most_rows: int | None
    ) -> EmbeddingRows | None:
        """Return the rows that micro-batches of tokens `[batch, tokens]`, in host memory, look up.

        None if the whole matrix is used: where the plan says so (`most_rows` is that of the placement; None: the CPU
        computes), by code that reads more than rows, or for as many tokens as there are rows.
        """
        num_rows = num_looked_up(spec, sum(ids.numel() for ids in input_ids))
        block = spec.lookup_block
        if block is None or most_rows is None or num_rows > most_rows or not rows_suffice(spec, num_rows):
            return None
        tokens = DistinctTokens.of(input_ids, device, substitutes=spec.substitutes)
        return cls(block, tokens, num_rows=num_rows, most_rows=most_rows)

    @property
    def num_elements(self) -> int:
        """Elements of the rows."""
        return len(self.tokens) * self._width

    @property
    def others_start(self) -> int:
        """Where the elements behind the matrix begin in the block's flat array."""
        return _start_behind_matrix(self.block)

    def parts_ahead(self, window_bytes: int) -> tuple[int, int]:
        """Bytes of the rows, and of what is behind the matrix, that go up while the block before computes.

        They do not depend on the number of distinct tokens, for which the plan takes the most there can be.
        """
        size, ahead = self.block.dtype_bytes, bytes_ahead(Segment((self.packed,)), window_bytes)
        if ahead == self.packed.compute_bytes:
            return size * self.num_elements, size * (self.block.num_elements - self.others_start)
        return (size * self.num_elements, ahead - size * _start_behind_matrix(self.packed)) if ahead else (0, 0)

    def gather(self, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the rows to `out` from the block's flat array `weights`. Both are flat, in host memory."""
        matrix = weights[: self.block.parameters[0].num_elements].view(-1, self._width)
        torch.index_select(matrix, 0, self.tokens.ids, out=out.view(-1, self._width))

    def table(self, device: Device, memory: memoryview) -> torch.Tensor | None:
        """The matrix `[rows, width]` of a block whose weights are in `memory`, as the device reads it in place; None if
        it cannot."""
        num_bytes = self.block.dtype_bytes * self.block.parameters[0].num_elements
        values = device.mapped(memory[:num_bytes])
        return None if values is None else values.view(VALUE_DTYPES[self.block.dtype]).view(-1, self._width)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """The matrix, flat on the device, with these rows, flat as well, in their places, and zeros elsewhere."""
        matrix = torch.zeros(self._shape, dtype=rows.dtype, device=rows.device)
        return matrix.index_copy_(0, self.tokens.on_device, rows.view(-1, self._width)).view(-1)

    def spread(self, packed: torch.Tensor, start: int, out: torch.Tensor) -> None:
        """Fill `out` with elements `[start, start + len(out))` of the block, from the flat array of the packed block.

        Both are in host memory.
        """
        width, stop = self._width, start + len(out)
        out.zero_()
        for whole, own in zip(self.block.parameters[1:], self.packed.parameters[1:], strict=True):
            first, last = max(start, whole.start), min(stop, whole.stop)
            if first < last:
                out[first - start : last - start] = packed[own.start + first - whole.start :][: last - first]
        matrix_stop = min(stop, self.block.parameters[0].stop)
        if start >= matrix_stop:
            return
        ids = self.tokens.ids
        first_row, last_row = -(-start // width), matrix_stop // width  # whole rows
        if first_row < last_row:
            lowest, highest = torch.searchsorted(ids, torch.tensor([first_row, last_row])).tolist()
            inner = out[first_row * width - start : last_row * width - start].view(-1, width)
            inner.index_copy_(
                0, ids[lowest:highest] - first_row, packed[lowest * width : highest * width].view(-1, width)
            )
        for row in {start // width, (matrix_stop - 1) // width}:  # parts of rows
            first, last = max(start, row * width), min(matrix_stop, (row + 1) * width)
            place = int(torch.searchsorted(ids, row))
            if place < len(ids) and int(ids[place]) == row:
                out[first - start : last - start] = packed[place * width + first - row * width :][: last - first]

    @property
    def _width(self) -> int:
        return self._shape[1]


def rows_suffice(spec: ModelSpec, num_rows: int) -> bool:
    """Whether this many rows are all that is used of the embedding's matrix, and fewer than all of them."""
    return spec.looks_up_rows and num_rows < spec.num_rows


def _start_behind_matrix(block: BlockSpec) -> int:
    return next((each.start for each in block.parameters[1:]), block.num_elements)
