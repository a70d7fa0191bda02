"""On a GPU too: the weights that plain PyTorch would have produced there, bit for bit where its kernels allow it.

Both sides compute on the GPU, with deterministic kernels; masters and AdamW are on the CPU on both sides. Where a
model has an operator without a deterministic kernel, the bound is what rounding may do: see there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ratel_cli.errors import BadInput
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import ARCHITECTURES, larger_config
from tests.engine.machine import attention_of, random_steps
from tests.engine.swaps import EVERYTHING, ChosenEverywhere
from tests.engine.test_exactness import AHEAD, PLACEMENTS, assert_same_training
from tests.gpu.machine import NEEDS_GPU, gpu_machine, gpu_reference
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated

pytestmark = NEEDS_GPU

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
"""They count, and add up, the tokens of each expert with operators that have no deterministic kernel."""
DENSE = [name for name in ARCHITECTURES if name not in EXPERTS]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", DENSE)
def test_equals_plain_pytorch(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    config = larger_config(architecture)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm, attn_implementation=attention_of(config))
    with gpu_machine(tmp_path, config, recipe, dtype=dtype, placement=AHEAD) as ratel:
        steps = random_steps(2, num_micro_batches, packed=ratel.model.packs)
        outcomes = ratel.train(steps, recipe)
        assert_same_training(outcomes, ratel.weights(), gpu_reference(config, steps, recipe))


def test_fp16_with_a_scaled_loss(tmp_path: Path) -> None:
    config = larger_config("llama")
    recipe = Recipe(dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    steps = random_steps(3, 2)
    with gpu_machine(tmp_path, config, recipe, dtype="float16", placement=AHEAD) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), gpu_reference(config, steps, recipe))


def test_an_overflow_is_seen_and_the_step_not_applied(tmp_path: Path) -> None:
    config = larger_config("llama")
    recipe = Recipe(dtype=torch.float16, loss_scale=2.0**24)
    with gpu_machine(tmp_path, config, recipe, dtype="float16") as ratel:
        before = ratel.weights()
        [outcome] = ratel.train(random_steps(1, 1), recipe)
        assert not outcome.applied
        assert all(torch.equal(before[name], after) for name, after in ratel.weights().items())


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_refused_where_bits_are_promised(tmp_path: Path, architecture: str) -> None:
    """Or they are right, should torch have learnt it."""
    config = larger_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, attn_implementation=attention_of(config))
    with gpu_machine(tmp_path, config, recipe) as ratel:
        steps = random_steps(2, 2, packed=ratel.model.packs)
        try:
            outcomes = ratel.train(steps, recipe)
        except BadInput as refusal:
            assert refusal.hint is not None and "deterministic: false" in refusal.hint
        else:
            assert_same_training(outcomes, ratel.weights(), gpu_reference(config, steps, recipe))


@pytest.mark.parametrize("architecture", EXPERTS)
def test_experts_are_within_rounding(tmp_path: Path, architecture: str) -> None:
    """In fp32: losses to 1e-5. A step of AdamW moves a weight by the learning rate, whatever the size of its gradient:
    where that is nothing but rounding it may move the other way, so no weight is further off than 2 steps both ways,
    and all together less than 1 %."""
    torch.use_deterministic_algorithms(False)
    config = larger_config(architecture)
    recipe = Recipe(dtype=torch.float32, weight_decay=0.0, attn_implementation=attention_of(config))
    with gpu_machine(tmp_path, config, recipe, dtype="float32", placement=replace(AHEAD, swapped=EVERYTHING)) as ratel:
        steps = random_steps(2, 2, packed=ratel.model.packs)
        outcomes, weights = ratel.train(steps, recipe), ratel.weights()
    wanted = gpu_reference(config, steps, recipe)
    for outcome, loss in zip(outcomes, wanted.losses, strict=True):
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
    for name, found in weights.items():
        difference = found - wanted.weights[name]
        assert float(difference.abs().max()) <= 4.1 * recipe.learning_rate, name
        assert float(difference.norm()) <= 0.01 * float(wanted.weights[name].norm()), name


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_what_stays_and_what_runs_ahead_changes_no_bit(
    tmp_path: Path, architecture: str, max_grad_norm: float | None, placement: str
) -> None:
    config = larger_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    steps = random_steps(3, 2)
    with gpu_machine(tmp_path, config, recipe, **PLACEMENTS[placement]) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), gpu_reference(config, steps, recipe))


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize(
    ("share", "spilled_units"), [(0.0, 0), (1.0, 0), (0.5, 4), (0.2, 99)], ids=["none", "all", "half", "few"]
)
def test_swapping_changes_no_bit(tmp_path: Path, architecture: str, share: float, spilled_units: int) -> None:
    config = larger_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5, attn_implementation=attention_of(config))
    placement = replace(AHEAD, swapped=ChosenEverywhere(share, 3), spilled_units=spilled_units)
    with gpu_machine(tmp_path, config, recipe, placement=placement) as ratel:
        steps = random_steps(2, 2, packed=ratel.model.packs)
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), gpu_reference(config, steps, recipe))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
        ("llama", {"attention_dropout": 0.3}),
        ("bloom", {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_dropout_draws_the_same_when_recomputed(
    tmp_path: Path, architecture: str, changes: dict[str, object], packed: bool, share: float
) -> None:
    config = larger_config(architecture, **changes)
    recipe = Recipe(dtype=torch.bfloat16, attn_implementation=attention_of(config))
    placement = Placement(swapped=ChosenEverywhere(share))
    with gpu_machine(tmp_path, config, recipe, placement=placement) as ratel:
        steps = random_steps(2, 2, packed=packed and ratel.model.packs)
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), gpu_reference(config, steps, recipe))


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_kernel_of_attention(tmp_path: Path, backend: SDPBackend, share: float, dropout: float) -> None:
    """Without packing, so that there is no mask: flash attention takes none."""
    if is_simulated() and backend != SDPBackend.MATH:
        pytest.skip("the simulated GPU has one kernel of attention")
    config = larger_config("llama", attention_dropout=dropout)
    recipe = Recipe(dtype=torch.bfloat16)
    steps = random_steps(2, 2, packed=False, num_tokens=64)
    placement = replace(AHEAD, swapped=ChosenEverywhere(share))
    with sdpa_kernel(backend), gpu_machine(tmp_path, config, recipe, placement=placement) as ratel:
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), gpu_reference(config, steps, recipe))


def test_evaluation_is_that_of_plain_pytorch(tmp_path: Path) -> None:
    config = larger_config("llama")
    recipe = Recipe(dtype=torch.bfloat16)
    [batches] = random_steps(1, 3)
    with gpu_machine(tmp_path, config, recipe) as ratel:
        total = ratel.engine.evaluate(batches)
    wanted = gpu_reference(config, [batches], recipe)
    assert total / sum(batch.num_targets for batch in batches) == wanted.losses[0]
