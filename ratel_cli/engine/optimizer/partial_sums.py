"""The gradients of shared blocks, which several segments bind: added up within each micro-batch from use to use.

In PyTorch the uses of a parameter add up within a micro-batch, those of later uses first, in the dtype of the gradient;
then micro-batches add up. A step meets a use for all micro-batches before the next one. So between two uses of a block
each micro-batch has a partial sum, in host memory (`planning/memory/capacity.py` counts them). It goes into the
backward of the next use as a root, which autograd adds to before all else, as in `model/values/carried.py`. The first
segment that binds the block comes last, and takes the whole sum of a micro-batch as one contribution.

Invariant: at most two partial sums of a block are on the device, that of the micro-batch before and the one in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, Download, Upload
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.optimizer.gradients import taken_gradient
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.values.carried import Roots
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment


@dataclass(slots=True)
class _Partial:
    """The partial sum of one block and one micro-batch in host memory."""

    lease: Lease
    download: Download
    present: tuple[bool, ...]
    """Whether each parameter has a gradient yet."""


class PartialSums(Closing):
    """The partial sums of one step, in host memory."""

    def __init__(self, pool: BufferPool, device: Device) -> None:
        self._pool = pool
        self._device = device
        self._partials: dict[tuple[int, int], _Partial] = {}
        """By block and micro-batch."""

    @contextmanager
    def added_to(self, weights: SegmentWeights, number: int) -> Iterator[Roots]:
        """A context for the backward of one micro-batch of a segment: what this backward begins with besides, and
        afterwards the gradients of borrowed parameters taken away."""
        segment = weights.segment
        roots = Roots([], [], list(weights.of(*segment.unfinished)))
        with ExitStack() as in_use:
            for block in segment.begun:
                partial = self._partials[block.index, number]
                in_use.callback(self._add_roots(roots, block, weights.of(block), partial).wait)
            in_use.callback(roots.tensors.clear)
            in_use.callback(roots.gradients.clear)
            yield roots
            in_use.close()  # what comes next takes the memory of what has gone up
            for block in segment.unfinished:
                found = [each.grad if each.grad is None else taken_gradient(each) for each in weights.of(block)]
                self._keep(block, found, number)
        for block in segment.trained:
            if block.has_partial_sums:
                self._partials.pop((block.index, number)).lease.release()

    def begin(self, segment: Segment, gradients: Sequence[torch.Tensor | None], number: int) -> None:
        """Keep the gradients of the parameters in all `unfinished` blocks of the last segment, for one micro-batch."""
        left = iter(gradients)
        for block in segment.unfinished:
            self._keep(block, [next(left) for _ in block.parameters], number)

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        partials, self._partials = self._partials, {}
        for partial in partials.values():
            partial.download.wait()
            partial.lease.release()

    def _add_roots(
        self, roots: Roots, block: BlockSpec, parameters: Sequence[torch.nn.Parameter], partial: _Partial
    ) -> Upload:
        memory, label = partial.lease.memory, _label(block)
        upload = self._device.upload(
            memory, self._device.reserve(len(memory)), label, lane="activations", after=partial.download
        )
        values = upload.open().view(VALUE_DTYPES[block.dtype])
        for place, parameter, is_present in zip(block.parameters, parameters, partial.present, strict=True):
            if is_present:
                roots.tensors.append(parameter)
                roots.gradients.append(values[place.start : place.stop].view(place.shape))
        return upload

    def _keep(self, block: BlockSpec, gradients: Sequence[torch.Tensor | None], number: int) -> None:
        """Bring the gradients that a backward has made of borrowed parameters to host memory."""
        key, present = (block.index, number), tuple(gradient is not None for gradient in gradients)
        if key not in self._partials:
            lease = self._pool.lease(block.compute_bytes, f"gradient of {block.name} so far")
            self._partials[key] = _Partial(lease, self._device.download([], _label(block)), present)
        partial, size = self._partials[key], block.dtype_bytes
        pieces = [
            (
                gradient.contiguous().view(-1).view(torch.uint8),
                partial.lease.memory[place.start * size : place.stop * size],
            )
            for place, gradient in zip(block.parameters, gradients, strict=True)
            if gradient is not None
        ]
        partial.download, partial.present = self._device.download(pieces, _label(block)), present


def _label(block: BlockSpec) -> SpanLabel:
    return SpanLabel.of("gradient", block, "backward")
