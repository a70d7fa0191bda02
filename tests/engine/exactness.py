"""Training equals plain PyTorch, bit for bit: the check and the matrices that the tests of every device share.

A test names the machine that it opens: `machine` on the CPU, `gpu_machine` on a GPU. The oracle computes on the
device of that machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.planning.profile.placement import LEAST_UNITS, AfterGradient, Placement, UnitsOnGpu
from ratel_cli.sizes import BLOCK_ALIGNMENT
from tests.engine.machine import Machine, attention_of, initial_weights, packs, random_steps
from tests.engine.swaps import EVERYTHING, ChosenEverywhere
from tests.reference import Recipe, Trained, train_in_memory


class OpenMachine(Protocol):
    """`machine` or `gpu_machine`."""

    def __call__(
        self, directory: Path, config: PretrainedConfig, recipe: Recipe, **options: object
    ) -> AbstractContextManager[Machine]: ...


def check_training(
    open_machine: OpenMachine,
    directory: Path,
    config: PretrainedConfig,
    recipe: Recipe,
    *,
    num_steps: int = 2,
    num_micro_batches: int = 2,
    packed: bool = True,
    num_tokens: int = 12,
    steps: Sequence[Sequence[MicroBatch]] | None = None,
    **options: object,
) -> None:
    """Train a new model by Ratel and by the oracle: losses, norms and fp32 masters must be equal in every bit.

    `steps` are random ones if they are not given. `options` are those of the machine.
    """
    recipe = replace(recipe, attn_implementation=attention_of(config))
    [dtype] = [name for name, each in DTYPES.items() if each == recipe.dtype]
    with open_machine(directory, config, recipe, dtype=dtype, weights=initial_weights(config), **options) as ratel:
        if steps is None:
            packed = packed and packs(config)
            steps = random_steps(num_steps, num_micro_batches, packed=packed, num_tokens=num_tokens)
        outcomes = ratel.train(steps, recipe)
        weights = ratel.weights()
        if ratel.model.has_other_parts:
            weights = {**initial_weights(config), **weights}
        assert_same_training(outcomes, weights, reference(config, steps, recipe, device=ratel.device))


def reference(
    config: PretrainedConfig, steps: Sequence[Sequence[MicroBatch]], recipe: Recipe, *, device: str = "cpu"
) -> Trained:
    """What the oracle makes of the initial weights. Tests that ask for the same training share its result."""
    recipe = replace(recipe, device=device)
    contents = tuple(_content(batch) for batches in steps for batch in (*batches, None))
    key = (config.to_json_string(), recipe, _kernels_of_attention(), contents)
    if key not in _TRAINED:
        _TRAINED[key] = train_in_memory(config, initial_weights(config), steps, recipe)
    return _TRAINED[key]


_TRAINED: dict[object, Trained] = {}


def _kernels_of_attention() -> tuple[bool, ...]:
    """Which ones torch may choose from."""
    cuda = torch.backends.cuda
    enabled = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled
    return tuple(each() for each in enabled)


def _content(batch: MicroBatch | None) -> object:
    """All values of a micro-batch. None ends a step."""
    if batch is None:
        return None
    values = (getattr(batch, field.name) for field in fields(batch))
    return tuple(value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in values)


def assert_same_training(outcomes: Sequence[StepOutcome], weights: Mapping[str, torch.Tensor], wanted: Trained) -> None:
    assert [outcome.loss for outcome in outcomes] == list(wanted.losses)
    assert [outcome.grad_norm for outcome in outcomes] == list(wanted.norms)
    assert weights.keys() == wanted.weights.keys()
    different = [
        name
        for name, found in weights.items()
        if not torch.equal(found.view(torch.int32), wanted.weights[name].view(torch.int32))
    ]
    assert different == []


SETTINGS = (("float32", "bfloat16"), (1, 3), (None, 0.5))
"""Compute dtypes, numbers of micro-batches, and limits of the gradient's norm."""
EVERY_BLOCK = frozenset(range(8))
AHEAD = Placement(prefetch_blocks=2, pending_updates=2)
IN_PARTS = UnitsOnGpu(
    forward_bytes=20_000,
    ahead_bytes=5_000,
    moments=dict.fromkeys(
        range(1, 4),
        (AfterGradient("mlp.up_proj.weight", 12_000), AfterGradient("self_attn.o_proj.weight", 20_000)),
    ),
)
PLACEMENTS: dict[str, dict[str, object]] = {
    "io_uring": {"io_engine": "auto"},
    "two drives": {"num_directories": 2},
    "held though nothing clips": {"hold": True},
    "in place": {"in_place": True},
    "all gradients on disk": {"held_in_memory_bytes": 0, "hold": True},
    "some gradients on disk": {"held_in_memory_bytes": 40_000, "hold": True},
    "one ahead": {"placement": Placement(prefetch_blocks=1, pending_updates=1)},
    "two ahead": {"placement": AHEAD},
    "all ahead": {"placement": Placement(prefetch_blocks=9, pending_updates=9)},
    "two ahead, small groups": {"placement": AHEAD, "group_elements": BLOCK_ALIGNMENT},
    "two ahead, two groups each way": {"placement": AHEAD, "group_elements": BLOCK_ALIGNMENT, "groups_in_flight": 2},
    "resident weights": {"placement": replace(AHEAD, resident_weights=EVERY_BLOCK)},
    "some resident weights": {"placement": replace(AHEAD, resident_weights=frozenset((0, 2)))},
    "resident states": {
        "placement": replace(AHEAD, resident_states=frozenset((0, 1, 3))),
        "group_elements": BLOCK_ALIGNMENT,
    },
    "everything resident": {
        "placement": replace(AHEAD, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK, swapped=EVERYTHING)
    },
    "three threads of AdamW": {"placement": replace(AHEAD, adamw_threads=3), "group_elements": BLOCK_ALIGNMENT},
    "many chunks": {"placement": AHEAD, "chunk_elements": BLOCK_ALIGNMENT},
    "three threads of AdamW, many chunks": {
        "placement": replace(AHEAD, adamw_threads=3, resident_weights=EVERY_BLOCK),
        "chunk_elements": BLOCK_ALIGNMENT,
        "group_elements": 8 * BLOCK_ALIGNMENT,
    },
    "everything swapped": {"placement": replace(AHEAD, swapped=EVERYTHING)},
    "everything swapped to NVMe": {"placement": replace(AHEAD, swapped=EVERYTHING, spilled_units=99)},
    "some operators, some on NVMe": {"placement": replace(AHEAD, swapped=ChosenEverywhere(0.5), spilled_units=3)},
    "inputs on NVMe": {"placement": Placement(spilled_units=99)},
    "all kept on a GPU": {
        "placement": replace(
            AHEAD,
            swapped=EVERYTHING,
            gpu_units_from=0,
            gpu_weights=EVERY_BLOCK,
            gpu_window_bytes=1 << 30,
            gpu_leaving_bytes=1 << 30,
            gpu_holds_sums=True,
            gpu_holds_lookup=True,
        )
    },
    "some kept on a GPU": {
        "placement": replace(
            AHEAD,
            swapped=ChosenEverywhere(0.5),
            spilled_units=1,
            gpu_units_from=3,
            gpu_weights=frozenset((2, 3)),
            gpu_window_bytes=20_000,
        )
    },
    "one unit on a GPU": {"placement": replace(AHEAD, swapped=EVERYTHING, gpu_units=LEAST_UNITS)},
    "units in parts on a GPU": {"placement": replace(AHEAD, swapped=EVERYTHING, gpu_units=IN_PARTS, spilled_units=2)},
    "the next block ahead on a GPU": {"placement": replace(AHEAD, gpu_window_bytes=1 << 30)},
    "some parameters ahead on a GPU": {"placement": replace(AHEAD, gpu_window_bytes=7000)},
    "some deferred": {"placement": replace(AHEAD, deferred=frozenset((1, 2)))},
    "all deferred": {"placement": replace(AHEAD, deferred=EVERY_BLOCK)},
    "naive": {"placement": AHEAD, "overlap": "naive", "group_elements": BLOCK_ALIGNMENT},
    "separate": {"placement": AHEAD, "overlap": "separate"},
    "separate, resident": {
        "placement": replace(AHEAD, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK),
        "overlap": "separate",
    },
    "in place, ahead": {"placement": replace(AHEAD, resident_weights=frozenset((0, 3))), "in_place": True},
    "gradients on disk, ahead": {"placement": AHEAD, "held_in_memory_bytes": 40_000, "hold": True},
    "io_uring, ahead": {"placement": AHEAD, "io_engine": "auto"},
}
"""Where weights, states, activations and gradients rest, and what runs ahead: options of a machine."""
DROPOUT: dict[str, dict[str, object]] = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3, "parallel_attn": False},
}
"""Changes of a configuration that let a model drop much, by architecture."""
OFFLOADING = {"all": (1.0, 0), "half, some on NVMe": (0.5, 4), "few, all on NVMe": (0.2, 99)}
"""The share of operators that are offloaded, and the number of units on NVMe."""
