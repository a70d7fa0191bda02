"""A step takes no more GPU memory than was planned, whatever the depth; copies are overlapped with computing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.engine.reading.weights import SegmentWeights, WeightReader
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES
from ratel_cli.model.values.operators import OperatorMode, TorchOperator
from ratel_cli.planning.memory import gpu_memory
from ratel_cli.planning.memory.gpu_memory import GpuMemory, weight_bytes_of
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, recorded_profile
from ratel_cli.schedule.segments import Segment
from ratel_cli.units import MIB, align_up
from tests.engine.architectures import VOCAB_SIZE, tiny_config
from tests.engine.exactness import AHEAD
from tests.engine.machine import Machine, initial_weights_of_zeros, random_steps
from tests.engine.swaps import EVERYTHING
from tests.engine.test_swap import recorded
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.planning.shapes import unit_of
from tests.real_time import in_real_time
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated
from tests.tiers import rotating

pytestmark = NEEDS_GPU

RECIPE = Recipe(dtype=torch.bfloat16)
EVERY_BLOCK = frozenset(range(99))
HIDDEN_SIZE = 256 if is_simulated() else 512
TOKENS = 128 if is_simulated() else 1024
"""Tokens of a row: enough that activations outweigh the small allocations that the plan leaves out."""


def config_of(*, num_layers: int, hidden_size: int = HIDDEN_SIZE, tied: bool = False) -> PretrainedConfig:
    return tiny_config(
        "llama",
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        vocab_size=8192,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
    )


def test_weights_that_stay_are_those_of_layers_until_their_backward(tmp_path: Path) -> None:
    """Nothing between, such as the head, stays beside them; and after the step nothing is there."""
    stayed = list[set[int]]()
    opened = WeightReader.open

    def noted(reader: WeightReader, segment: Segment) -> SegmentWeights:
        weights = opened(reader, segment)
        stayed.append({*reader._on_gpu})
        return weights

    config = config_of(num_layers=3, hidden_size=64)
    placement = replace(AHEAD, gpu_weights=frozenset({2, 3}))
    with (
        mock.patch.object(WeightReader, "open", noted),
        gpu_machine(tmp_path, config, RECIPE, placement=placement) as ratel,
    ):
        ratel.train(random_steps(1, 1), RECIPE)
    # Embedding, three layers, the head, and back.
    assert stayed == [set(), set(), {2}, {2, 3}, {2, 3}, {2}, set(), set(), set()]


def batches_of(num_micro_batches: int, *, rows: int, tokens: int, vocab_size: int = VOCAB_SIZE) -> list[MicroBatch]:
    """Micro-batches of as many distinct tokens as there can be."""
    generator = torch.Generator().manual_seed(5)
    num_tokens = num_micro_batches * rows * tokens
    all_ids = torch.randperm(align_up(num_tokens, vocab_size), generator=generator)[:num_tokens] % vocab_size
    parts = iter(all_ids.view(num_micro_batches, rows, tokens))

    def batch() -> MicroBatch:
        ids = next(parts)
        positions = torch.arange(tokens).expand(rows, -1).contiguous()
        return MicroBatch(
            input_ids=ids,
            targets=ids.clone(),
            position_ids=positions,
            sample_ids=(),
            num_targets=ids.numel(),
            num_tokens=ids.numel(),
        )

    return [batch() for _ in range(num_micro_batches)]


def distinct_tokens(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same batches, with as many rows of the embedding as they have tokens: what the plan counts on."""
    starts = accumulate((batch.input_ids.numel() for batch in batches), initial=1)
    return [
        replace(batch, input_ids=torch.arange(start, start + batch.input_ids.numel()).view_as(batch.input_ids))
        for start, batch in zip(starts, batches, strict=False)
    ]


def profile_of(ratel: Machine, recording: StepRecording, workload: Workload) -> ModelProfile:
    """The profile without times, from a recorded step."""
    spec = ratel.model.spec
    estimate = analytic_profile(spec, workload, traits=ratel.model.traits)
    times = dict.fromkeys(range(len(spec.blocks)), BlockSeconds(forward=1.0, backward=1.0))
    return recorded_profile(
        recording.units(),
        times,
        spec,
        workload,
        num_micro_batches=recording.num_micro_batches,
        estimate=estimate,
    )


def peak_bytes(ratel: Machine, batches: list[MicroBatch]) -> int:
    """The peak of two steps."""
    gc.collect()  # what earlier tests left must not be freed in the middle of this
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    ratel.train([batches, batches], RECIPE)
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.full
@pytest.mark.parametrize(
    ("kept_layers", "num_micro_batches", "swaps", "tied", "holds_sums", "window_share"),
    rotating([0, 2, 4], [1, 3], [False, True], [False, True], [False, True], [0.0, 0.3, 1.0], offset=2),
)
def test_a_step_takes_no_more_than_was_planned(
    tmp_path: Path,
    holds_sums: bool,
    tied: bool,
    num_micro_batches: int,
    swaps: bool,
    kept_layers: int,
    window_share: float,
) -> None:
    config = config_of(num_layers=4, tied=tied)
    gpu_weights = frozenset(range(5 - kept_layers, 5))
    placement = replace(
        AHEAD,
        gpu_units_from=max(1, (4 - kept_layers) * num_micro_batches),
        gpu_weights=gpu_weights,
        gpu_holds_sums=holds_sums,
        gpu_window_bytes=int(window_share * 2 * 8192 * HIDDEN_SIZE),
    )
    placement = replace(placement, swapped=EVERYTHING) if swaps else placement
    rows, tokens = 2, TOKENS
    with gpu_machine(tmp_path, config, RECIPE, weights=initial_weights_of_zeros(), placement=placement) as ratel:
        batches = distinct_tokens(batches_of(num_micro_batches, rows=rows, tokens=tokens))
        found = peak_bytes(ratel, batches)
        recording = StepRecording()
        outcome = ratel.engine.run(batches, step=2, update=3, learning_rate=0.0, recording=recording)
        units = ratel.model.spec.num_layers * num_micro_batches
        workload = Workload(micro_batch_size=rows, num_micro_batches=num_micro_batches, sequence_len=tokens)
        unit_bytes = outcome.swapped_bytes // units
        profile = profile_of(ratel, recording, workload)
        memory = GpuMemory(ratel.model.spec, workload, profile)
        planned = memory.needed_bytes(
            unit_of(unit_bytes), holds_sums=holds_sums, window_bytes=placement.gpu_window_bytes
        )
        planned += kept_layers * num_micro_batches * unit_bytes
        planned += weight_bytes_of(ratel.model.spec, gpu_weights)
    assert found <= planned - GPU_CONTEXT_BYTES - (gpu_memory._WORKSPACE_BYTES if is_simulated() else 0)


@pytest.mark.full
def test_the_peak_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    peaks = []
    for num_layers in (3, 6):
        config = config_of(num_layers=num_layers)
        with gpu_machine(
            tmp_path / str(num_layers), config, RECIPE, weights=initial_weights_of_zeros(), placement=AHEAD
        ) as ratel:
            peaks.append(peak_bytes(ratel, batches_of(2, rows=2, tokens=TOKENS)))
    assert peaks[1] <= peaks[0] + MIB


class Threads(OperatorMode):
    """Notes which threads run operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.found.add(threading.get_ident())
        return func(*args, **kwargs)


@pytest.mark.parametrize("tied", [True, False])
def test_backward_runs_on_the_compute_thread(tmp_path: Path, tied: bool) -> None:
    """On a thread of its own it would drop its last tensors whenever that thread is scheduled, and the peak of a step
    would differ from run to run."""
    config = config_of(num_layers=2, tied=tied)
    with gpu_machine(tmp_path, config, RECIPE, weights=initial_weights_of_zeros()) as ratel, Threads() as threads:
        ratel.train([batches_of(2, rows=1, tokens=16)], RECIPE)
    assert threads.found == {threading.get_ident()}


def test_a_step_that_does_not_fit_reports_the_shortfall(tmp_path: Path) -> None:
    config = config_of(num_layers=3)
    reserved = torch.accelerator.memory_reserved()
    with gpu_machine(
        tmp_path, config, RECIPE, weights=initial_weights_of_zeros(), limit_bytes=reserved + 32 * MIB
    ) as ratel:
        with pytest.raises(DoesNotFit, match="GPU memory: a step needs more") as raised:
            ratel.train([batches_of(1, rows=2, tokens=2 * TOKENS)], RECIPE)
        assert raised.value.shortfall_bytes > 0
        assert ratel.pool.leased_bytes == 0


@pytest.mark.full
@in_real_time
def test_attention_is_a_candidate_for_swapping(tmp_path: Path) -> None:
    config = config_of(num_layers=3)
    with gpu_machine(tmp_path, config, RECIPE, weights=initial_weights_of_zeros()) as ratel:
        [steps] = random_steps(1, 2, packed=False, num_tokens=128)
        profile = recorded(ratel, RECIPE, steps)
    [layer] = profile.profiles
    assert any("attention" in candidate.operator for candidate in layer.candidates)
    assert all(candidate.seconds is not None and candidate.seconds > 0 for candidate in layer.candidates)


def test_copies_are_overlapped_with_computing(tmp_path: Path) -> None:
    """All copies but the first of a step, if each block computes for long enough."""
    if is_simulated():
        pytest.skip("the simulated GPU overlaps nothing")
    config = config_of(num_layers=3, hidden_size=2048)
    placement = Placement(
        prefetch_blocks=2,
        pending_updates=2,
        resident_weights=EVERY_BLOCK,
        resident_states=EVERY_BLOCK,
        gpu_window_bytes=1 << 40,
    )
    with gpu_machine(tmp_path, config, RECIPE, weights=initial_weights_of_zeros(), placement=placement) as ratel:
        batches = batches_of(1, rows=8, tokens=4096)
        ratel.train([batches] * 2, RECIPE)
        ratel.timeline.take()
        ratel.train([batches] * 3, RECIPE)
        spans = ratel.timeline.take().spans
    layers = range(2, 4)
    up = [
        span for span in spans if span.resource == "up" and span.label.block in layers and span.label.stage == "forward"
    ]
    down = [span for span in spans if span.resource == "down" and span.label.block in layers]
    assert len(up) == 2 and down
    assert overlapped_share(up, spans) > 0.8
    assert overlapped_share(down, spans) > 0.8


def overlapped_share(transfers: Sequence[Span], spans: Sequence[Span]) -> float:
    """The share of the transfers' time in which the GPU computed."""
    computing = [span for span in spans if span.resource == "compute"]
    hidden = sum(
        max(0.0, min(transfer.end, span.end) - max(transfer.start, span.start))
        for transfer in transfers
        for span in computing
    )
    return hidden / sum(span.end - span.start for span in transfers)
