"""Systems that keep the model in host memory: their steps by hand, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.papers.memferry import DirectLayer, OffloadedGradient
from ratel_cli.papers.memferry_costs import WeightUse
from ratel_cli.papers.own_model import OwnModel
from ratel_cli.papers.paper_forecast import PaperForecaster
from ratel_cli.papers.ratel import PaperShape
from ratel_cli.papers.rivals import InMemoryModel, Outcome, Strategy, compare_in_memory
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU
from tests.papers.paper_profiles import paper_forecaster
from tests.planning.forecasters import paper_machine, ratel_forecaster, setting
from tests.tiers import examples

GB = 10**9
AMPLE = replace(WITH_GPU, gpu=replace(WITH_GPU.gpu, memory_bytes=1 << 50))


def machine(*, up: float = 10e9, down: float = 10e9, adam: float = 0.5e9, memory: float = 100e9) -> HardwareProfile:
    """Four cores."""
    return replace(
        WITH_GPU,
        link=Link(to_gpu_bytes_per_second=up, from_gpu_bytes_per_second=down, both_bytes_per_second=up + down),
        host=replace(WITH_GPU.host, num_cores=4, adam_parameters_per_second=adam, memory_bytes_per_second=memory),
    )


def use(*, direct_forward: float, direct_backward: float) -> WeightUse:
    """Half of the model: 1 GB of weights, which go up in 0.1 s; 0.3 s of forward and 0.6 s of backward."""
    layer = DirectLayer(
        name="weight",
        upload=0.1,
        forward=0.3,
        backward=0.6,
        direct_forward=direct_forward,
        direct_backward=direct_backward,
    )
    gradient = OffloadedGradient(num_bytes=GB, backward=0.6, direct_backward=0.6)
    return WeightUse(weight_bytes=GB, layer=layer, gradient=gradient)


def model(
    hardware: HardwareProfile | None = None,
    *,
    number: int = 1,
    gpu_bytes: int = 100 * GB,
    host_bytes: int = 100 * GB,
    direct_forward: float = 0.35,
    direct_backward: float = 1.0,
) -> InMemoryModel:
    """10^9 parameters in two layers that are alike."""
    layer = use(direct_forward=direct_forward, direct_backward=direct_backward)
    return InMemoryModel(
        uses=(layer, layer),
        hardware=hardware or machine(),
        num_micro_batches=number,
        num_trained=GB,
        weight_bytes=2 * GB,
        updated_bytes=2 * GB,
        gradient_bytes=2 * GB,
        largest_gradient_bytes=GB,
        activation_bytes=GB,
        recomputed_flops=7,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
    )


def outcomes(model: InMemoryModel) -> dict[Strategy, Outcome]:
    return {outcome.strategy: outcome for outcome in compare_in_memory(model)}


def seconds(model: InMemoryModel) -> tuple[float, float]:
    """Of ZeRO-Offload and of MemFerry, both of which fit."""
    found = outcomes(model)
    assert [outcome.why_not for outcome in found.values()] == [None, None]
    return found["zero-offload"].point.seconds, found["memferry"].point.seconds


@pytest.mark.parametrize(
    ("step", "zero_offload", "memferry"),
    [
        # AdamW takes 0.5 s, gradients 0.2 s, new weights 0.2 s. MemFerry reads the first layer in place in forward, and
        # uploads it for backward: 0.35 + 0.3 + 1.2.
        (model(), 0.6 + 1.2 + 0.5, 0.65 + 1.2 + 0.5),
        # Gradients of each of 8 micro-batches: 1.6 s. MemFerry's go down once.
        (model(number=8), 0.6 + 1.6 + 0.5, 0.65 + 1.2 + 0.5),
        # Gradients take 4 s.
        (model(machine(down=0.5e9)), 0.6 + 4.0 + 0.5, 0.65 + 4.0),
        # New weights take 2 s. MemFerry's uploads are in its forward, whose times this test gives.
        (model(machine(up=1e9)), 0.6 + 1.2 + 2.0, 0.65 + 1.2 + 0.5),
        # AdamW moves 28 bytes per parameter in 1.4 s.
        (model(machine(memory=20e9)), 0.6 + 1.2 + 1.4, 0.65 + 1.2 + 1.4),
        # Reading in place is of no use: the first upload is waited for.
        (model(direct_forward=9.0, direct_backward=9.0), 2.3, 0.1 + 0.6 + 1.2 + 0.5),
    ],
)
def test_steps_by_hand(step: InMemoryModel, zero_offload: float, memferry: float) -> None:
    assert seconds(step) == pytest.approx((zero_offload, memferry))


def test_nothing_is_swapped() -> None:
    for outcome in compare_in_memory(model()):
        point = outcome.point
        assert (point.swapped_bytes, point.spilled_bytes, point.recomputed_flops) == (0, 0, 7)


@pytest.mark.parametrize(
    ("host_bytes", "zero_offload", "memferry"),
    [
        (16 * GB, None, None),
        (16 * GB - GIB, None, "the model does not fit into RAM (short by 1.00 GiB)"),
        (14 * GB, None, "the model does not fit into RAM (short by 1.86 GiB)"),
        (
            14 * GB - GIB,
            "the model does not fit into RAM (short by 1.00 GiB)",
            "the model does not fit into RAM (short by 2.86 GiB)",
        ),
    ],
)
def test_states_and_gradients_take_14_bytes_of_ram_and_weights_two(
    host_bytes: int, zero_offload: str | None, memferry: str | None
) -> None:
    found = outcomes(model(host_bytes=host_bytes))
    assert [outcome.why_not for outcome in found.values()] == [zero_offload, memferry]


def test_the_gpu_has_weights_a_layer_s_gradients_or_all_and_activations() -> None:
    short = "the model does not fit into GPU memory (short by 1.00 GiB)"
    of_zero_offload, of_memferry = (1 + 2 + 1) * GB, (1 + 2 + 2) * GB
    found = [outcomes(model(gpu_bytes=each)) for each in (of_zero_offload, of_zero_offload - GIB)]
    assert [each["zero-offload"].why_not for each in found] == [None, short]
    found = [outcomes(model(gpu_bytes=each)) for each in (of_memferry, of_memferry - GIB)]
    assert [each["memferry"].why_not for each in found] == [None, short]
    in_place = model(gpu_bytes=of_memferry - GB, direct_forward=0.3, direct_backward=0.6)
    assert outcomes(in_place)["memferry"].why_not is None, "the first layer is read in place and takes nothing"


def test_without_a_gpu_there_is_nothing_to_offload_from() -> None:
    assert [each.why_not for each in compare_in_memory(model(WITHOUT_GPU))] == ["there is no GPU"] * 2
    of_plan = OwnModel(ratel_forecaster()).in_memory(setting(WITHOUT_GPU))
    assert [each.why_not for each in compare_in_memory(of_plan)] == ["there is no GPU"] * 2


@pytest.mark.parametrize(
    "asked",
    [paper_forecaster("gpt-13b"), OwnModel(ratel_forecaster(num_layers=40, hidden_size=5120))],
    ids=["paper", "ratel"],
)
def test_a_model_that_is_larger_than_ram_does_not_fit(asked: PaperForecaster | OwnModel) -> None:
    """13B takes 182 GB and more."""
    found = compare_in_memory(asked.in_memory(setting(AMPLE, host_limit_bytes=128 * GIB)))
    assert all((each.why_not or "").startswith("the model does not fit into RAM (short by ") for each in found)
    ample = asked.in_memory(setting(AMPLE, host_limit_bytes=512 * GIB))
    assert outcomes(replace(ample, uses=ample.uses[:9]))["memferry"].why_not is None


def test_by_the_paper_s_counts() -> None:
    """Where neither link nor CPU takes time, a step computes what Eq. 2 and 5 say, with all recomputed."""
    forecaster, asked = paper_forecaster("gpt-13b"), setting(rows=32)
    found, equations = forecaster.in_memory(asked), forecaster.equations(asked)
    shape, rate = equations.shape, equations.hardware.flops_per_second
    assert found.state_bytes + found.gradient_bytes == 14 * 13 * GB
    assert (found.weight_bytes, found.updated_bytes) == (26 * GB, 26 * GB)
    assert found.activation_bytes == (2 * 40 + 34) * 32 * 1024 * 5120
    fast = replace(asked.hardware.host, adam_parameters_per_second=1e30, memory_bytes_per_second=None)
    link = Link(to_gpu_bytes_per_second=1e30, from_gpu_bytes_per_second=1e30, both_bytes_per_second=2e30)
    free = replace(found, hardware=replace(asked.hardware, host=fast, link=link), host_bytes=1 << 50, gpu_bytes=1 << 50)
    flops = 3 * shape.flops_forward + equations.shape.num_layers * sum(each.flops for each in shape.operators)
    assert outcomes(free)["zero-offload"].point.seconds == pytest.approx(flops / rate)
    assert found.recomputed_flops == flops - 3 * shape.flops_forward


def test_by_ratel_s_counts() -> None:
    forecaster, asked = ratel_forecaster(num_layers=6, hidden_size=1024), setting(rows=4, number=3)
    found, spec = OwnModel(forecaster).in_memory(asked), forecaster.spec
    assert found.weight_bytes == found.updated_bytes == found.gradient_bytes == 2 * spec.trained_elements
    assert found.state_bytes == 12 * spec.trained_elements
    assert found.largest_gradient_bytes == 2 * max(12 * 1024**2 + 2 * 1024, 5000 * 1024)
    assert found.host_bytes == 64 * GIB - GIB // 2
    [layer] = forecaster.profile.profiles
    assert layer.input_bytes == 2 * 4 * 1024 * 1024
    assert layer.backward_bytes >= layer.replay_bytes
    assert found.activation_bytes == 6 * layer.input_bytes + layer.backward_bytes
    problem_seconds = sum(each.layer.forward + each.layer.then_forward for each in found.uses)
    problem_seconds += sum(each.layer.backward + each.layer.then_backward for each in found.uses)
    plan = forecaster.plan(asked)
    assert problem_seconds >= plan.time.forward.compute + plan.time.backward.compute, "the plan recomputes less"
    assert outcomes(found)["zero-offload"].point.seconds > problem_seconds


RATES = ("up", "down", "adam", "memory")


@given(
    hidden_size=st.sampled_from([256, 1024, 4096]),
    tokens=st.integers(1, 3000),
    start=st.tuples(*[st.floats(-2, 2)] * 4),
    faster=st.tuples(*[st.floats(0, 2)] * 4),
)
@examples(200)
def test_a_faster_link_or_cpu_is_never_slower(
    hidden_size: int, tokens: int, start: tuple[float, ...], faster: tuple[float, ...]
) -> None:
    """For a model of so few parameters that MemFerry's plan is the best."""
    shape = PaperShape(
        num_layers=1,
        num_heads=8,
        hidden_size=hidden_size,
        vocab_size=5000,
        num_parameters=12 * hidden_size**2,
        batch_size=1,
        sequence_len=tokens,
    )
    usual = {"up": 20e9, "down": 20e9, "adam": 1e9, "memory": 100e9}
    before = {name: usual[name] * 10**power for name, power in zip(RATES, start, strict=True)}
    after = {name: before[name] * 10**power for name, power in zip(RATES, faster, strict=True)}
    slow, fast = (
        replace(_of_shape(shape, machine(**rates)), gpu_bytes=1 << 50, host_bytes=1 << 50) for rates in (before, after)
    )
    assert all(one >= other * (1 - 1e-9) for one, other in zip(seconds(slow), seconds(fast), strict=True))


def test_a_faster_link_is_hardly_slower_in_a_large_model() -> None:
    """Of many parameters the search may miss the best plan by 1 %."""
    usual = paper_machine()
    assert usual.link is not None
    found = []
    for times in (1, 2, 4, 8):
        rate = usual.link.to_gpu_bytes_per_second * times
        link = Link(to_gpu_bytes_per_second=rate, from_gpu_bytes_per_second=rate, both_bytes_per_second=2 * rate)
        step = OwnModel(ratel_forecaster(num_layers=8)).in_memory(setting(replace(usual, link=link)))
        found.append(seconds(step))
    for (zero_offload, memferry), (next_zero_offload, next_memferry) in pairwise(found):
        assert next_zero_offload <= zero_offload
        assert next_memferry <= 1.01 * memferry


def _of_shape(shape: PaperShape, hardware: HardwareProfile) -> InMemoryModel:
    asked = setting(hardware, rows=1)
    asked = replace(asked, workload=replace(asked.workload, sequence_len=shape.sequence_len))
    return PaperForecaster(name="gpt", shape=shape).in_memory(asked)
