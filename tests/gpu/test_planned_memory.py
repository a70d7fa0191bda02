"""The memory that a plan counts on is what a step takes: no less, and at most a tenth more.

Models of the papers' proportions: hidden size, vocabulary, tokens of a row and of a chunk of the head are all a fixed
share of theirs, so that weights, activations, logits and gradients keep their ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, PretrainedConfig, T5Config

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.freezing import freeze
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.memory.gpu_uses import GpuStep, StaysOnGpu, Uses
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import LEAST_UNITS, Workload
from ratel_cli.planning.profile.recorded import BlockSeconds, UnitRecord, recorded_profile
from ratel_cli.planning.search.swap import SwapOrder
from ratel_cli.sizes import Task
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD
from tests.engine.machine import attention_of, initial_weights_of_zeros
from tests.engine.sharing import SharingLlamaConfig
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.gpu.phase_meter import peaks_of
from tests.gpu.test_memory import batches_of
from tests.planning.steps import planned_step
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated
from tests.tiers import rotating

pytestmark = NEEDS_GPU

NO_TIMES = dict.fromkeys(range(8), BlockSeconds(forward=1.0, backward=1.0))
SMALL_BYTES = 256 << 10
"""What the plan leaves out: statistics of norms, rotary tables, and that sizes are rounded up to 512 bytes. On a GPU it
is a part of the workspace that is planned."""
ATTENTION_COPIES = 8
"""The simulated GPU has no kernel of attention: it makes this many fp32 copies of the queries, where one has none."""
MOST = 1.10
"""The planned memory as a multiple of what a step takes."""
HIDDEN_SIZE = 384
VOCAB_SIZE, ROW_TOKENS, CHUNK_TOKENS = 50257, 1024, 334
"""Of the papers' models; a chunk of the head has 64 MiB of logits."""
LARGE_CHUNK_TOKENS = [2672, 5344]
"""With 512 MiB and 1 GiB."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of the papers, and how it is trained on a card of 24 GiB."""

    name: str
    hidden_size: int
    rows: int
    """Of a micro-batch."""
    vocab_size: int = VOCAB_SIZE

    def scaled(self, size: int) -> int:
        return max(1, round(size * HIDDEN_SIZE / self.hidden_size))


LARGE_HEAD = Shape("Gemma 2 27B", 4608, 1, vocab_size=256_000)
"""The head takes more than any layer."""
SHAPES = [
    Shape("70B", 8192, 2),
    Shape("276B", 14336, 1),
    Shape("30B", 7168, 4),
    Shape("135B", 11264, 2),
    Shape("175B", 12288, 1),
    Shape("13B", 5120, 8),
]
"""The last one takes minutes, since it has many tokens for its size."""


def config_of(architecture: str, shape: Shape, *, tied: bool) -> PretrainedConfig:
    """Two layers of matrices of 12 h^2 elements, or of 16 h^2 in a gated one, with one head of attention for each 128
    elements. What the simulated GPU has no kernel of its own for (SiLU) is left out."""
    common = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": HIDDEN_SIZE // 128,
        "vocab_size": shape.scaled(shape.vocab_size),
        "max_position_embeddings": shape.scaled(ROW_TOKENS) + 2,
        "tie_word_embeddings": tied,
    }
    if architecture == "opt":
        own = {"ffn_dim": 4 * HIDDEN_SIZE, "word_embed_proj_dim": HIDDEN_SIZE, "dropout": 0.0}
    else:
        own = {"intermediate_size": 4 * HIDDEN_SIZE, "num_key_value_heads": HIDDEN_SIZE // 128, "hidden_act": "gelu"}
    if architecture == "sharing":
        return SharingLlamaConfig(**common, **own)
    return tiny_config(architecture, **common, **own)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "architecture", "num_micro_batches", "tied", "holds_sums"),
    rotating(SHAPES, ["opt", "llama"], [1, 2, 3], [True, False], [True, False], every=3, offset=3),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_a_step_takes_what_was_planned(
    tmp_path: Path, shape: Shape, architecture: str, num_micro_batches: int, tied: bool, holds_sums: bool
) -> None:
    check(tmp_path, shape, config_of(architecture, shape, tied=tied), num_micro_batches, holds_sums=holds_sums)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "architecture", "num_micro_batches", "tied", "chunk_tokens"),
    rotating(
        [LARGE_HEAD, *SHAPES[::2]],
        ["llama", "opt"],
        [3, 2, 1],
        [False, True],
        [CHUNK_TOKENS, LARGE_CHUNK_TOKENS[0]],
        every=3,
    ),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_where_host_memory_has_the_sums_of_the_head(
    tmp_path: Path, shape: Shape, architecture: str, num_micro_batches: int, tied: bool, chunk_tokens: int
) -> None:
    check(
        tmp_path,
        shape,
        config_of(architecture, shape, tied=tied),
        num_micro_batches,
        holds_sums=False,
        holds_head=False,
        chunk_tokens=chunk_tokens,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "num_micro_batches", "tied", "chunk_tokens"),
    rotating(SHAPES, [1, 3], [True, False], LARGE_CHUNK_TOKENS, every=len(SHAPES)),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_where_the_logits_are_large(
    tmp_path: Path, shape: Shape, num_micro_batches: int, tied: bool, chunk_tokens: int
) -> None:
    config = config_of("llama", shape, tied=tied)
    check(tmp_path, shape, config, num_micro_batches, holds_sums=True, chunk_tokens=chunk_tokens)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "architecture", "num_micro_batches", "share"),
    rotating(SHAPES, ["opt", "llama"], [1, 2, 3], [0.4, 1.0], every=3, offset=1),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_with_swapped_outputs(
    tmp_path: Path, shape: Shape, architecture: str, num_micro_batches: int, share: float
) -> None:
    config = config_of(architecture, shape, tied=True)
    check(tmp_path, shape, config, num_micro_batches, holds_sums=True, swapped_share=share)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "architecture", "num_micro_batches", "share"),
    rotating(SHAPES, ["llama", "opt"], [3, 1], [0.0, 0.5], every=3, offset=2),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_where_two_units_do_not_fit(
    tmp_path: Path, shape: Shape, architecture: str, num_micro_batches: int, share: float
) -> None:
    check(
        tmp_path,
        shape,
        config_of(architecture, shape, tied=True),
        num_micro_batches,
        holds_sums=True,
        swapped_share=1.0,
        units_share=share,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "num_micro_batches", "holds_sums"),
    rotating(SHAPES, [3, 1], [True, False], every=4),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_where_layers_share_weights(
    tmp_path: Path, shape: Shape, num_micro_batches: int, holds_sums: bool
) -> None:
    check(tmp_path, shape, config_of("sharing", shape, tied=False), num_micro_batches, holds_sums=holds_sums)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "task", "num_micro_batches"),
    rotating([SHAPES[0], SHAPES[-1]], ["masked_lm", "classification"], [1, 3], every=2),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_so_it_does_with_an_encoder_whose_rows_are_padded(
    tmp_path: Path, shape: Shape, task: Task, num_micro_batches: int
) -> None:
    config = BertConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=4 * HIDDEN_SIZE,
        num_hidden_layers=2,
        num_attention_heads=HIDDEN_SIZE // 128,
        vocab_size=shape.scaled(VOCAB_SIZE),
        max_position_embeddings=shape.scaled(ROW_TOKENS) + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    check(tmp_path, shape, config, num_micro_batches, holds_sums=True, task=task, most=1.2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "num_micro_batches", "tied"),
    rotating([SHAPES[0], SHAPES[-1]], [1, 3], [True, False], every=2),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_two_stacks_take_no_more_than_was_planned(
    tmp_path: Path, shape: Shape, num_micro_batches: int, tied: bool
) -> None:
    """The plan takes the largest layer for all of them, so it may count on half as much again."""
    config = T5Config(
        d_model=HIDDEN_SIZE,
        d_kv=128,
        d_ff=4 * HIDDEN_SIZE,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HIDDEN_SIZE // 128,
        vocab_size=shape.scaled(VOCAB_SIZE),
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
    )
    check(tmp_path, shape, config, num_micro_batches, holds_sums=True, task="seq2seq", most=1.5, is_by_use=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("unfrozen", "shape", "num_micro_batches", "tied"),
    rotating(
        ["model.layers.1.", r"model.layers.\d.self_attn.", "model.layers.0.mlp"],
        [SHAPES[3], SHAPES[-1]],
        [1, 3],
        [False, True],
    ),
    ids=lambda value: value.name if isinstance(value, Shape) else str(value),
)
def test_a_part_that_is_trained_takes_no_more_than_was_planned(
    tmp_path: Path, shape: Shape, unfrozen: str, num_micro_batches: int, tied: bool
) -> None:
    config = config_of("llama", shape, tied=tied)
    check(
        tmp_path,
        shape,
        config,
        num_micro_batches,
        holds_sums=True,
        unfrozen=(unfrozen,),
        most=1.2,
        left_out_bytes=2 * SMALL_BYTES,  # no gradient of a weight hides the rotary tables
    )


def padded(batch: MicroBatch, task: Task) -> MicroBatch:
    """The batch with padding at the end of each row but the first, and a class for each row of a classifier."""
    mask = torch.ones_like(batch.input_ids)
    mask[1:, -3:] = 0
    if batch.input_ids.shape[0] == 1:
        mask[:, -3:] = 0
    num_targets = len(mask) if task == "classification" else batch.num_targets
    targets = torch.zeros_like(batch.targets) if task == "classification" else batch.targets
    return replace(batch, mask=mask, targets=targets, num_targets=num_targets, is_pair=task == "seq2seq")


def with_seconds_of_flops(unit: UnitRecord) -> UnitRecord:
    """Times that are no chance: those of FLOPs, and of what is written."""
    return replace(
        unit,
        operators=tuple(replace(each, seconds=each.flops / 1e14 + each.num_bytes / 1e12) for each in unit.operators),
    )


def check(
    tmp_path: Path,
    shape: Shape,
    config: PretrainedConfig,
    num_micro_batches: int,
    *,
    task: Task = "causal_lm",
    holds_sums: bool,
    holds_head: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
    swapped_share: float = 0.0,
    units_share: float | None = None,
    unfrozen: tuple[str, ...] = (),
    most: float = MOST,
    left_out_bytes: int = SMALL_BYTES,
    is_by_use: bool = True,
) -> None:
    """`swapped_share`: of all groups of outputs, the first ones. `units_share`: of the memory between the least that a
    step takes and what it takes with two whole units. `is_by_use`: each use takes no more than is planned for it."""
    tokens = shape.scaled(ROW_TOKENS)
    workload = Workload(
        micro_batch_size=shape.rows,
        num_micro_batches=num_micro_batches,
        sequence_len=tokens,
        chunk_tokens=min(shape.scaled(chunk_tokens), shape.rows * tokens),
    )
    recipe = Recipe(dtype=torch.bfloat16, chunk_tokens=workload.chunk_tokens)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config), task=task)
    freeze(skeleton, unfrozen=unfrozen, frozen=())
    model = find_blocks(skeleton, name=shape.name, task=task)
    estimate = analytic_profile(model.spec, workload, traits=measured_traits(model))
    placement = replace(AHEAD, gpu_holds_sums=holds_sums, gpu_holds_head=holds_head)
    batches = batches_of(num_micro_batches, rows=shape.rows, tokens=tokens, vocab_size=config.vocab_size)
    if task != "causal_lm":
        batches = [padded(each, task) for each in batches]
    weights = initial_weights_of_zeros()
    with gpu_machine(tmp_path / "recorded", config, recipe, weights=weights, placement=placement, model=model) as ratel:
        found = peaks_of(ratel, batches)
        recording = StepRecording()
        ratel.engine.run(batches, step=2, update=3, learning_rate=0.0, recording=recording)
    profile = recorded_profile(
        {key: with_seconds_of_flops(unit) for key, unit in recording.units().items()},
        NO_TIMES,
        model.spec,
        workload,
        num_micro_batches=num_micro_batches,
        estimate=estimate,
    )
    order, memory = SwapOrder(profile), GpuMemory(model.spec, workload, profile)
    num_outputs = order.boundaries[round(swapped_share * (len(order.boundaries) - 1))]
    largest = order.largest_unit(num_outputs)
    if units_share is not None:
        least, whole = (memory.needed_bytes(largest, holds_sums=True, units=units) for units in (LEAST_UNITS, None))
        limit_bytes = least + int(units_share * (whole - least))
        found_choices = memory.choices(order.unit_bytes(num_outputs), largest, limit_bytes=limit_bytes)
        resident = next(each for each in found_choices if each.units is not None and each.holds_sums)
        placement = replace(placement, gpu_units=resident.units, gpu_window_bytes=resident.window_bytes)
    if num_outputs:
        swapping = replace(placement, swapped=order.keys(num_outputs))
        with gpu_machine(
            tmp_path / "swapping", config, recipe, weights=weights, placement=swapping, model=model
        ) as ratel:
            found = peaks_of(ratel, batches)
    stays = StaysOnGpu(holds_sums, holds_head, placement.gpu_window_bytes)
    units, head = placement.gpu_units, model.spec.head.index
    if is_simulated():  # forward waits for gradients that a link is still busy with, which is none here
        phases = memory.phases(largest, stays, units)
        assert max(phases) <= most * max(found.values())
        for phase, takes in zip(phases._fields[1:], phases[1:], strict=True):
            took = max(num_bytes for key, num_bytes in found.items() if phase_of(key, head) == phase)
            assert takes <= most * took + left_out_bytes, phase
    step = planned_step(model.spec, workload, on_gpu=True)
    short = {}
    for key, took in found.items():
        phase, positions = phase_of(key, head), [key[0]] if is_by_use else range(step.turn)
        takes = getattr(Uses(GpuStep(step, profile, positions), stays).phases(largest, units), phase)
        attention = ATTENTION_COPIES * 4 * workload.micro_batch_tokens * config.hidden_size
        left_out = left_out_bytes + (attention if phase == "forward" and is_simulated() else 0)
        if takes < took - left_out:
            short[key] = takes, took
    assert not short


def phase_of(key: tuple[int, bool], head: int) -> str:
    """The phase of a use, as the plan names it."""
    position, is_replaying = key
    if position <= head:
        return "forward" if position < head else "head"
    return "replay" if is_replaying else "backward"
