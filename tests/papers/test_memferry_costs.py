"""What a model's parameters take in each mode, against closed forms of the papers' GPT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.papers.memferry_costs import WeightUse, weight_uses
from ratel_cli.planning.profile.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.time.costs import compute_seconds
from ratel_cli.schedule.blocks import lay_out_block
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU

H, V, LAYERS = 512, 5000, 3
UP, DOWN = 20e9, 10e9
GPU = replace(
    WITH_GPU,
    gpu=replace(WITH_GPU.gpu, flops_per_second=1e13, memory_bytes_per_second=None),
    link=Link(to_gpu_bytes_per_second=UP, from_gpu_bytes_per_second=DOWN, both_bytes_per_second=UP + DOWN),
)
TRAITS = LayerTraits(num_heads=8, head_dim=H // 8)
SPEC = spec_from_shape(name="gpt", num_layers=LAYERS, hidden_size=H, vocab_size=V)


def workload(tokens: int, *, number: int = 1) -> Workload:
    return Workload(micro_batch_size=1, num_micro_batches=number, sequence_len=tokens)


def uses(
    step: Workload, *, spec: ModelSpec = SPEC, is_paper: bool = False, hardware: HardwareProfile = GPU
) -> list[WeightUse]:
    profile = analytic_profile(spec, step, traits=TRAITS)
    return list(weight_uses(spec, profile, step, hardware, is_paper=is_paper))


def named(found: list[WeightUse], name: str) -> WeightUse:
    return next(each for each in found if each.layer.name == name)


@pytest.mark.parametrize(("tokens", "tiles"), [(1, 1), (256, 1), (257, 2), (1024, 4)])
@pytest.mark.parametrize("number", [1, 3])
def test_a_matrix_is_read_once_for_each_row_of_tiles(tokens: int, tiles: int, number: int) -> None:
    step = workload(tokens, number=number)
    use = named(uses(step), "fc1.weight")
    matrix_bytes = 2 * 4 * H * H
    assert use.weight_bytes == matrix_bytes
    assert use.layer.upload == pytest.approx(matrix_bytes / UP)
    assert use.layer.forward == pytest.approx(number * 2 * tokens * 4 * H * H / 1e13)
    assert use.layer.forward_link == pytest.approx(number * tiles * matrix_bytes / UP)
    assert use.layer.direct_forward == max(use.layer.forward, use.layer.forward_link)
    assert use.layer.backward_link == pytest.approx(2 * use.layer.forward_link), "backward recomputes fc1"
    last = named(uses(step), "fc2.weight").layer
    assert last.backward_link == pytest.approx(last.forward_link), "and needs no result of fc2"
    of_paper = named(uses(step, is_paper=True), "fc1.weight").layer
    assert (of_paper.forward_link, of_paper.backward_link) == (0.0, 0.0)
    assert of_paper.direct_forward == pytest.approx(use.layer.direct_forward)
    assert of_paper.backward == pytest.approx(2 * of_paper.forward)


def test_of_an_embedding_rows_are_read() -> None:
    """Ratel uploads the rows of a step's tokens, once; what is read in place is a row for each token."""
    step = workload(100, number=2)
    use = named(uses(step), "embedding.weight")
    assert use.weight_bytes == 2 * 200 * H
    assert use.layer.forward_link == use.layer.direct_forward == pytest.approx(2 * 2 * 100 * H / UP)
    assert (use.layer.direct_backward, use.layer.backward_link) == (0.0, 0.0)
    assert named(uses(step, is_paper=True), "embedding.weight").weight_bytes == 2 * V * H
    many = workload(3 * V)
    assert named(uses(many), "embedding.weight").weight_bytes == 2 * V * H
    assert named(uses(many), "embedding.weight").layer.forward_link == pytest.approx(2 * 3 * V * H / UP)


def test_vectors_are_read_once() -> None:
    use = named(uses(workload(4096, number=2)), "norm1.weight")
    assert use.layer.forward_link == use.layer.direct_forward == pytest.approx(2 * 2 * H / UP)
    assert (use.weight_bytes, use.layer.forward) == (2 * H, 0.0)


@pytest.mark.parametrize("number", [1, 4])
def test_computing_is_that_of_the_cost_model(number: int) -> None:
    step = workload(512, number=number)
    profile = analytic_profile(SPEC, step, traits=TRAITS)
    compute = compute_seconds(profile, step, GPU)
    layers = [each.layer for each in uses(step)]
    head = compute.head / 3
    assert sum(each.forward + each.then_forward for each in layers) == pytest.approx(compute.forward + head)
    assert sum(each.backward + each.then_backward for each in layers) == pytest.approx(compute.backward - head)
    of_paper = [each.layer for each in uses(step, is_paper=True)]
    forward = sum(each.forward + each.then_forward for each in of_paper)
    assert sum(each.backward + each.then_backward for each in of_paper) == pytest.approx(2 * forward)


def test_by_the_paper_s_equations_backward_may_recompute() -> None:
    step = workload(1024, number=2)
    profile = analytic_profile(SPEC, step, traits=TRAITS)
    found = weight_uses(SPEC, profile, step, GPU, is_paper=True, recomputes=True)
    [costs] = profile.profiles
    layers = [use.layer for use in found]
    of_paper = [each.layer for each in uses(step, is_paper=True)]
    more = sum(each.backward + each.then_backward for each in layers)
    more -= sum(each.backward + each.then_backward for each in of_paper)
    assert more == pytest.approx(2 * LAYERS * costs.flops_recomputed / 1e13)
    fc1 = named(list(found), "fc1.weight").layer
    assert fc1.direct_backward == pytest.approx(2 * 2 * 4 * 2 * 4 * H * H / UP), "read again"
    assert (fc1.forward_link, fc1.backward_link) == (0.0, 0.0)


def test_measured_times_are_divided_by_flops() -> None:
    """A layer's measured forward and backward, among its matrices and attention."""
    step = workload(512, number=2)
    estimate = analytic_profile(SPEC, step, traits=TRAITS)
    [layer] = estimate.profiles
    measured = replace(layer, forward_seconds=0.1, recomputed_seconds=0.08, backward_seconds=0.2)
    profile = replace(estimate, source="recorded", profiles=(measured,), embedding_seconds=0.02, head_seconds=0.3)
    found = list(weight_uses(SPEC, profile, step, GPU, is_paper=False))
    share = 2 * 512 * 4 * H * H / layer.flops_forward
    fc1 = named(found, "fc1.weight").layer
    assert fc1.forward == pytest.approx(0.2 * share)
    assert fc1.backward == pytest.approx(2 * 0.28 * share)
    assert found[0].layer.forward == found[0].layer.backward == pytest.approx(0.02)
    forward = sum(use.layer.forward + use.layer.then_forward for use in found)
    assert forward == pytest.approx(2 * (0.01 + LAYERS * 0.1 + 0.3 / 3))


def test_uploads_are_all_weights() -> None:
    """The matrix of a head that is that of the embedding goes up for the head; vectors too."""
    found = uses(workload(100))
    assert len(found) == 1 + 6 * LAYERS + 2
    rows = 100 * H
    assert sum(each.weight_bytes for each in found) == 2 * (SPEC.num_parameters + rows)
    assert [each.layer.name for each in found[-2:]] == ["norm.weight", "embedding.weight (head)"]


def test_gradients_come_down_for_each_micro_batch() -> None:
    matrix_bytes = 2 * 4 * H * H
    for number in (1, 3):
        gradient = named(uses(workload(16, number=number)), "fc1.weight").gradient
        assert gradient.num_bytes == matrix_bytes
        assert gradient.direct_backward == pytest.approx(number * matrix_bytes / DOWN)


def test_an_expert_reads_its_own_tokens() -> None:
    """Of a stack of eight experts each token visits two: 1024 tokens are 256 for each."""
    spec = SPEC
    block = spec.blocks[1]
    parameters = [(each.name, each.shape, each.decay) for each in block.parameters]
    parameters.insert(4, ("layers.0.experts.weight", (8, H, H), True))
    stacked = lay_out_block(index=1, name=block.name, parameters=parameters, dtype="bfloat16")
    spec = replace(spec, blocks=(spec.blocks[0], stacked, *spec.blocks[2:]))
    for tokens, tiles in ((1024, 1), (1028, 2)):
        step = workload(tokens)
        profile = analytic_profile(spec, step, traits=replace(TRAITS, active_experts=2))
        use = named(list(weight_uses(spec, profile, step, GPU, is_paper=False)), "experts.weight")
        assert use.layer.forward_link == pytest.approx(tiles * 2 * 8 * H * H / UP)


def test_nothing_is_uploaded_where_the_cpu_computes() -> None:
    assert uses(workload(16), hardware=WITHOUT_GPU) == []
