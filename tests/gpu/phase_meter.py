"""What a step takes of a GPU's memory in each phase: a meter that knows nothing of rows."""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest
import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.reading.weights import SegmentWeights, WeightReader
from ratel_cli.engine.segments.layer import Layer
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.uses import step_uses
from tests.engine.machine import Machine
from tests.gpu.test_memory import RECIPE


class PhaseMeter:
    """Takes the peak from one boundary to the next: a use opens, a layer is computed again, its gradients are made, a
    use closes. What happens between two uses belongs to the one that opens."""

    def __init__(self, spec: ModelSpec) -> None:
        self._num_uses = len(step_uses(spec.segments))
        self._base_bytes = torch.accelerator.memory_allocated()
        self._position, self._is_replaying, self._is_open = -1, False, False
        self.most: dict[tuple[int, bool], int] = defaultdict(int)
        """By the position of a use, and whether a layer is computed again."""
        torch.accelerator.reset_peak_memory_stats()

    def boundary(self, position: int, *, is_replaying: bool = False) -> None:
        """Something begins in the use at `position`."""
        torch.accelerator.synchronize()
        key, peak_bytes = (self._position, self._is_replaying), torch.accelerator.max_memory_allocated()
        if self._position >= 0:
            self.most[key] = max(self.most[key], peak_bytes - self._base_bytes)
        torch.accelerator.reset_peak_memory_stats()
        self._position, self._is_replaying = position, is_replaying

    def opens(self) -> None:
        """The next use opens."""
        self.boundary(max(0, self._position))
        self._is_open = True

    def closes(self) -> None:
        """The use that is open closes, if one is."""
        if self._is_open:
            self.boundary((self._position + 1) % self._num_uses)
            self._is_open = False

    def replays(self, *, is_over: bool) -> None:
        """A layer is computed again, or has been."""
        self.boundary(self._position, is_replaying=not is_over)


def peaks_of(ratel: Machine, batches: list[MicroBatch]) -> dict[tuple[int, bool], int]:
    """The peaks of two steps, as in `PhaseMeter.most`."""
    gc.collect()  # what earlier tests left must not be freed in the middle of this
    torch.accelerator.synchronize()
    meter = PhaseMeter(ratel.model.spec)
    opened, closed, replay = WeightReader.open, SegmentWeights.close, Layer._replay

    def open_next(reader: WeightReader, *arguments: object) -> object:
        meter.opens()
        return opened(reader, *arguments)  # type: ignore[arg-type]

    def close(weights: SegmentWeights) -> None:
        closed(weights)
        meter.closes()

    def replay_layer(layer: Layer[MicroBatch], *arguments: object) -> object:
        meter.replays(is_over=False)
        found = replay(layer, *arguments)  # type: ignore[arg-type]
        meter.replays(is_over=True)
        return found

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(WeightReader, "open", open_next)
        monkeypatch.setattr(SegmentWeights, "close", close)
        monkeypatch.setattr(Layer, "_replay", replay_layer)
        ratel.train([batches, batches], RECIPE)
        meter.boundary(-1)
    return dict(meter.most)
