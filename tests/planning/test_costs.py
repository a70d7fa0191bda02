"""FLOPs against the papers' closed form, and the stages of a step against their parts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.step import ONE_TOKEN
from ratel_cli.planning.duties.updates import checksum_bytes
from ratel_cli.planning.profile.activations import NOTHING_OFFLOADED, OffloadedActivations, offload
from ratel_cli.planning.profile.analytic import head_flops, head_sum_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import GroupShape, Overlap, Placement, Workload
from ratel_cli.planning.time.costs import (
    ComputeSeconds,
    StepCosts,
    compute_seconds,
    nvme_seconds,
)
from ratel_cli.planning.time.link import link_seconds
from ratel_cli.planning.time.step_time import StageTime, StepTime
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.schedule.rules import FROZEN
from tests.planning.profiles import candidate, estimated, layer, model
from tests.planning.shapes import BFLOAT16, FLOAT32, SEEDS, WORKLOAD, Widths, gpt, machine
from tests.planning.steps import planned_step, step_traffic
from tests.tiers import examples

SPEC = gpt()
ELEMENTS = sum(block.num_elements for block in SPEC.blocks)
HEAD = SPEC.blocks[-1].num_elements
"""Goes up in backward only."""
IN_TURN = Placement(gpu_window_bytes=1 << 40)
DEEP = replace(IN_TURN, prefetch_blocks=2, pending_updates=2)
COMPUTE = ComputeSeconds(forward=0.5, backward=1.25, head=0.0, is_measured=False)
SPILLED = offload([40_960, 40_960, 8192], num_micro_batches=3, spilled_units=6)
MOVED = (
    "forward_read_bytes",
    "forward_written_bytes",
    "backward_read_bytes",
    "backward_written_bytes",
)
SLOW = (
    "read_bytes_per_second",
    "write_bytes_per_second",
    "adam_parameters_per_second",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "memory_bytes_per_second",
)


def machine_with(slow: str, rate: float) -> HardwareProfile:
    """Where everything but `slow` takes next to no time."""
    return machine(**{name: rate if name == slow else 1e12 for name in SLOW})  # type: ignore[arg-type]


def total_flops(spec: ModelSpec, workload: Workload) -> int:
    profile = estimated(spec, workload)
    layers = sum(profile.profiles[number].flops_forward for number in profile.layers)
    return workload.num_micro_batches * (layers + profile.flops_head)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("num_layers", "h", "vocab_size", "b", "n", "s"),
    [(1, 64, 512, 1, 1, 1), (3, 96, 333, 2, 5, 77), (40, 5120, 50257, 8, 4, 1024)],
)
def test_forward_of_a_gpt(num_layers: int, h: int, vocab_size: int, b: int, n: int, s: int, tied: bool) -> None:
    """papers.md section 2: L (24 b s h^2 + 4 b s^2 h) + 2 b s h V, b being all sequences of the step."""
    spec = gpt(num_layers=num_layers, hidden_size=h, vocab_size=vocab_size, tied=tied)
    workload = Workload(micro_batch_size=b, num_micro_batches=n, sequence_len=s)
    sequences = b * n
    layers = num_layers * (24 * sequences * s * h**2 + 4 * sequences * s**2 * h)
    assert head_flops(spec, tokens=b * s) == 2 * b * s * h * vocab_size
    assert total_flops(spec, workload) == layers + 2 * sequences * s * h * vocab_size


def test_the_papers_13b_at_batch_32() -> None:
    """papers.md section 3: exact."""
    spec = gpt(num_layers=40, hidden_size=5120, vocab_size=50257)
    workload = Workload(micro_batch_size=32, num_micro_batches=1, sequence_len=1024)
    assert total_flops(spec, workload) == 868_984_962_416_640


def test_computing_is_estimated_from_flops() -> None:
    """Three layers; the head is not computed again, since its forward and backward are one."""
    kinds = layer(candidate(flops=100), flops=150), layer(candidate(flops=7), flops=10)
    profile = model(*kinds, layers=(0, 1, 0), flops_head=1000)
    found = compute_seconds(profile, WORKLOAD, machine(flops_per_second=10))
    assert found == ComputeSeconds(
        forward=pytest.approx(3 * 310 / 10),
        backward=pytest.approx(3 * (2 * 310 + 207 + 3 * 1000) / 10),
        head=pytest.approx(3 * 3 * 1000 / 10),
        is_measured=False,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("state", [BFLOAT16, FLOAT32])
def test_a_chunk_adds_up_the_gradients_of_the_whole_head(tied: bool, state: Widths) -> None:
    """Each of them is read, and the fp32 sum read and written."""
    spec = gpt(tied=tied, dtype=state.dtype)
    workload = Workload(micro_batch_size=2, num_micro_batches=3, sequence_len=64)  # 128 tokens
    elements = spec.blocks[-1].num_elements + (spec.blocks[0].num_elements if tied else 0)
    for chunk_tokens, chunks in ((None, 1), (128, 1), (127, 2), (64, 2), (63, 3), (1, 128)):
        found = head_sum_bytes(spec, replace(workload, chunk_tokens=chunk_tokens))
        assert found == 3 * chunks * elements * (state.compute + 4 + 4)


def moving() -> ModelProfile:
    """Two layers without FLOPs; operators of each move 30 bytes forward and 70 backward, those of the head 500."""
    kind = replace(layer(flops=0), forward_moved_bytes=30, backward_moved_bytes=70)
    return replace(model(kind, layers=(0, 0)), head_moved_bytes=500)


def test_what_other_operators_move_takes_the_time_of_the_devices_memory() -> None:
    """Of 10 bytes per second. Backward runs forward again. Host memory counts only where the CPU computes."""
    number = WORKLOAD.num_micro_batches
    gpu, cpu = machine(memory_bytes_per_second=10.0), machine(memory_bytes_per_second=10.0, num_cores=2)
    assert compute_seconds(moving(), WORKLOAD, gpu).backward == 0.0
    for known in (replace(gpu, gpu=replace(gpu.gpu, memory_bytes_per_second=10.0)), cpu):
        found = compute_seconds(moving(), WORKLOAD, known)
        assert found.forward == pytest.approx(number * 2 * 3.0)
        assert found.head == pytest.approx(number * 50.0)
        assert found.backward == pytest.approx(number * (2 * (3.0 + 7.0) + 50.0))


@pytest.mark.parametrize(("share", "taken"), [(None, 0.25), (0.25, 0.25), (1.0, 1.0), (0.0, 0.0)])
def test_adamw_takes_of_computing_what_was_measured(share: float | None, taken: float) -> None:
    """On four cores, or as a layer next to it showed, whatever the number of its threads."""
    for threads in (1, 2):
        placement = replace(DEEP, adamw_threads=threads)
        hardware = machine(num_cores=4, adam_parameters_per_second=ELEMENTS / 2.0, memory_bytes_per_second=1e15)
        time = step_time(hardware, placement=placement, compute=replace(COMPUTE, adamw_share=share))
        assert time.backward.compute == pytest.approx(COMPUTE.backward + 2.0 * taken)


def test_adding_up_the_head_s_gradients_takes_time_in_the_gpu_s_memory() -> None:
    """If its rate is known, and before the first gradient of the step is whole."""
    hardware = machine(flops_per_second=10)
    known = replace(hardware, gpu=replace(hardware.gpu, memory_bytes_per_second=4.0))
    profile = model(layer(candidate(flops=100)), flops_head=1000)
    plain = compute_seconds(profile, WORKLOAD, hardware, head_sum_bytes=80)
    assert plain == compute_seconds(profile, WORKLOAD, known)
    found = compute_seconds(profile, WORKLOAD, known, head_sum_bytes=80)
    assert found == replace(plain, backward=plain.backward + 20, head=plain.head + 20)


def test_computing_is_as_long_as_it_was_measured() -> None:
    kind = replace(layer(), forward_seconds=3.0, recomputed_seconds=2.0, backward_seconds=5.0)
    profile = replace(model(kind, layers=(0, 0)), source="recorded", embedding_seconds=0.5, head_seconds=11.0)
    hardware = machine()
    known = replace(hardware, gpu=replace(hardware.gpu, memory_bytes_per_second=4.0))
    found = compute_seconds(profile, WORKLOAD, known, head_sum_bytes=80)  # the measured head includes it
    assert found == ComputeSeconds(forward=3 * 6.25, backward=3 * (14 + 0.25 + 11), head=3 * 11, is_measured=True)


@pytest.mark.parametrize(
    ("read", "written", "mixed", "seconds"),
    [
        (0, 0, 2.0, 0),
        (12, 0, 2.0, 12 / 3),
        (0, 12, 2.0, 12 / 2),
        (12, 12, 2.0, 24 / 2),
        (12, 12, 2.4, 12 / 3 + 12 / 2),  # the harmonic mean: one at a time
        (12, 12, 4.0, 12 / 2),  # both at full speed: the slower decides
        (12, 12, 99.0, 12 / 2),  # nothing is faster next to something else
        (18, 12, 4.0, 24 / 4 + 6 / 3),
        (12, 18, 4.0, 24 / 4 + 6 / 2),
    ],
)
def test_nvme_takes_both_at_the_mixed_rate_and_the_rest_alone(
    read: int, written: int, mixed: float, seconds: float
) -> None:
    nvme = machine(read_bytes_per_second=3, write_bytes_per_second=2, mixed_bytes_per_second=mixed).nvme
    assert sum(nvme_seconds(nvme, read, written)) == pytest.approx(seconds, rel=1e-12)


@examples(50)
@given(seed=SEEDS)
def test_moving_more_never_takes_less(seed: int) -> None:
    choice = random.Random(seed)
    nvme = machine(
        read_bytes_per_second=choice.uniform(1, 9),
        write_bytes_per_second=choice.uniform(1, 9),
        mixed_bytes_per_second=choice.uniform(1, 30),
    ).nvme
    read, written = choice.randint(0, 99), choice.randint(0, 99)
    seconds = sum(nvme_seconds(nvme, read, written)) * (1 - 1e-12)
    assert sum(nvme_seconds(nvme, read + choice.randint(1, 50), written)) >= seconds
    assert sum(nvme_seconds(nvme, read, written + choice.randint(1, 50))) >= seconds


def traffic_of(
    placement: Placement = DEEP, offloaded: OffloadedActivations = NOTHING_OFFLOADED, *, holds_gradients: bool = False
) -> Traffic:
    return step_traffic(SPEC, placement, offloaded, holds_gradients=holds_gradients)


def step_time(
    hardware: HardwareProfile,
    *,
    placement: Placement = DEEP,
    offloaded: OffloadedActivations = NOTHING_OFFLOADED,
    not_recomputed_seconds: float = 0.0,
    **changes: object,
) -> StepTime:
    """`changes`: of the costs, or of their step."""
    compute = changes.pop("compute", COMPUTE)
    step = replace(
        planned_step(SPEC, ONE_TOKEN, on_gpu=hardware.link is not None),
        **changes,  # type: ignore[arg-type]
    )
    step = replace(step, own=step.spec)
    costs = StepCosts(step=step, hardware=hardware, compute=compute)  # type: ignore[arg-type]
    traffic = step_traffic(step.spec, placement, offloaded, holds_gradients=step.holds_gradients, overlap=step.overlap)
    return costs.time(placement, traffic, offloaded, not_recomputed_seconds=not_recomputed_seconds)


@pytest.mark.parametrize(
    ("both", "up", "down", "seconds"),
    [
        (30, 40, 10, 4.0),  # full duplex: the longer direction
        (30, 0, 60, 3.0),
        (20, 40, 10, 4.0),
        (20, 30, 60, 4.5),  # what both move together
        (20, 20, 20, 2.0),
        (5, 0, 60, 3.0),  # no slower than one direction alone
        (5, 40, 20, 4.0),
        (30, 0, 0, 0.0),
    ],
)
def test_both_directions_of_the_link_share_what_it_moves(both: float, up: int, down: int, seconds: float) -> None:
    """10 bytes per second up and 20 down, alone."""
    link = Link(to_gpu_bytes_per_second=10, from_gpu_bytes_per_second=20, both_bytes_per_second=both)
    assert link_seconds(link, up_bytes=up, down_bytes=down) == pytest.approx(seconds)


@examples(100)
@given(seed=SEEDS)
def test_more_bytes_never_take_the_link_less_time_and_faster_links_never_more(seed: int) -> None:
    choice = random.Random(seed)
    rates = [choice.uniform(1, 10) for _ in range(3)]
    up, down = choice.randint(0, 100), choice.randint(0, 100)

    def seconds(rates: list[float], up: int, down: int) -> float:
        link = Link(
            to_gpu_bytes_per_second=rates[0], from_gpu_bytes_per_second=rates[1], both_bytes_per_second=rates[2]
        )
        return link_seconds(link, up_bytes=up, down_bytes=down)

    before = seconds(rates, up, down)
    assert seconds(rates, up + 1, down) >= before <= seconds(rates, up, down + 1)
    for number in range(3):
        faster = [rate * (choice.uniform(1, 3) if each == number else 1) for each, rate in enumerate(rates)]
        assert seconds(faster, up, down) <= before


def test_a_link_that_moves_less_both_ways_at_once_takes_longer() -> None:
    """Backward moves both ways: units come up while gradients go down."""
    plain = machine_with("", 0)
    assert plain.link is not None
    shared = replace(
        plain,
        link=replace(plain.link, both_bytes_per_second=1e5, to_gpu_bytes_per_second=1e5, from_gpu_bytes_per_second=1e5),
    )
    backward = step_time(shared, offloaded=SPILLED).backward
    booked = (4 * ELEMENTS + SPILLED.total_bytes / 0.85) / 1e5
    assert backward.total == pytest.approx(booked)
    assert max(backward.up, backward.down) < 0.8 * booked


def test_activations_get_no_more_than_85_percent_of_the_link() -> None:
    """In forward they go down alone, so that it takes as much longer. Weights may have all of it."""
    slow_down = machine_with("down_bytes_per_second", 1e5)
    forward = step_time(slow_down, offloaded=SPILLED).forward
    assert forward.down == pytest.approx(SPILLED.total_bytes / 1e5)
    assert forward.down / forward.total == pytest.approx(0.85)
    slow_up = machine_with("up_bytes_per_second", 1e5)
    assert step_time(slow_up).forward.total == pytest.approx(2 * (ELEMENTS - HEAD) / 1e5)
    backward = step_time(slow_up, offloaded=SPILLED).backward
    assert backward.total == pytest.approx((2 * ELEMENTS + SPILLED.total_bytes / 0.85) / 1e5)


def longest(stage: StageTime) -> float:
    return max(stage.compute, stage.up, stage.down, stage.nvme, stage.optimizer, stage.memory)


def test_a_tied_gradient_that_the_gpu_does_not_hold_crosses_the_link_twice() -> None:
    spec = gpt(vocab_size=5000, tied=True)
    workload = Workload(micro_batch_size=1, num_micro_batches=3, sequence_len=100)
    rows_bytes = 3 * 300 * 2 * spec.hidden_size
    away, held = (
        step_time(
            machine(),
            spec=spec,
            placement=replace(DEEP, gpu_holds_lookup=holds, gpu_holds_sums=True),
            workload=workload,
        ).backward
        for holds in (False, True)
    )
    seconds = (4 * spec.blocks[0].num_elements + rows_bytes) / 1e10
    assert [away.up - held.up, away.down - held.down] == pytest.approx([seconds, seconds], rel=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_is_summed_in_host_memory_moves_every_chunk_while_nothing_computes(tied: bool) -> None:
    """Its rounded sum goes up for its norm, and need not come down; nor does the sum of a tied one move twice."""
    spec = gpt(vocab_size=5000, tied=tied)
    workload = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=130, chunk_tokens=20)
    rows_bytes = 2 * 130 * spec.hidden_size * tied
    on_gpu, on_host = (
        step_time(
            machine(),
            spec=spec,
            placement=replace(DEEP, gpu_holds_head=holds, gpu_holds_lookup=holds),
            compute=replace(COMPUTE, backward=1e3),
            workload=workload,
        ).backward
        for holds in (True, False)
    )
    elements = spec.blocks[0 if tied else -1].num_elements
    up_seconds, down_seconds = 2 * elements / 1e10, (6 * 2 * elements + rows_bytes) / 1e10
    assert [on_host.up - on_gpu.up, on_host.down - on_gpu.down] == pytest.approx([up_seconds, down_seconds], rel=1e-9)
    assert on_host.total - on_gpu.total == pytest.approx(8 * 2 * elements / 1e10, rel=1e-6)


@pytest.mark.parametrize("prefetch_blocks", [0, 2])
def test_what_the_window_does_not_take_goes_up_while_nothing_computes(prefetch_blocks: int) -> None:
    """Embedding and three layers in forward; in backward the head, two layers that do not stay, and the embedding."""
    embedding, layer, head = (SPEC.blocks[place].num_elements for place in (0, 1, -1))
    second, third = (SPEC.blocks[1].parameters[place].start for place in (1, 2))
    rate = machine().link.to_gpu_bytes_per_second
    for window_bytes, waiting in (
        (0, (embedding, layer, head)),
        (2 * second - 1, (embedding, layer, head)),
        (2 * third - 1, (embedding, layer - second, head - SPEC.blocks[-1].parameters[1].start)),
        (2 * third, (embedding, layer - third, head - SPEC.blocks[-1].parameters[1].start)),
        (2 * layer, (0 if embedding <= layer else embedding, 0, 0 if head <= layer else head - second)),
        (1 << 40, (0, 0, 0)),
    ):
        placement = replace(DEEP, prefetch_blocks=prefetch_blocks, gpu_weights=frozenset((3,)))
        found, whole = (
            step_time(machine(), placement=replace(placement, gpu_window_bytes=each))
            for each in (window_bytes, 1 << 40)
        )
        assert (found.forward.up, found.backward.up) == (whole.forward.up, whole.backward.up)
        first, each, last = waiting
        assert found.forward.total - whole.forward.total == pytest.approx(2 * (first + 3 * each) / rate, abs=1e-12)
        assert found.backward.total - whole.backward.total == pytest.approx(
            2 * (last + 2 * each + first) / rate, abs=1e-12
        )


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_sums_in_host_memory_bring_every_gradient_down_and_themselves_up(num_micro_batches: int) -> None:
    away, held = (
        step_time(
            machine(memory_bytes_per_second=1e10),
            placement=replace(DEEP, gpu_holds_sums=holds),
            workload=replace(ONE_TOKEN, num_micro_batches=num_micro_batches),
        ).backward
        for holds in (False, True)
    )
    seconds = sum(block.num_elements for block in SPEC.blocks[1:-1]) / 1e10
    up, down = (4, 2 * (num_micro_batches - 1)) if num_micro_batches > 1 else (0, 0)
    added = 0 if num_micro_batches == 1 else 2 + 4 + (num_micro_batches - 2) * (2 + 4 + 4)
    found = [away.up - held.up, away.down - held.down, away.memory - held.memory]
    assert found == pytest.approx([up * seconds, down * seconds, (up + down + added) * seconds], rel=1e-9)


@pytest.mark.parametrize(("share", "late"), [(0.5, 0.5), (0.75, 0.25), (1.0, 0.0), (2.0, 0.0)])
def test_sums_in_host_memory_have_the_last_micro_batch_to_go_up(share: float, late: float) -> None:
    """`share`: the time that one micro-batch computes, of that in which the sums go up."""
    hardware = machine_with("up_bytes_per_second", 1e9)
    sums_seconds = 4 * sum(block.num_elements for block in SPEC.blocks[1:-1]) / 1e9
    compute = replace(COMPUTE, backward=10 * share * sums_seconds)
    away, held = (
        step_time(
            hardware,
            placement=replace(DEEP, gpu_holds_sums=holds),
            compute=compute,
            workload=replace(ONE_TOKEN, num_micro_batches=10),
        ).backward
        for holds in (False, True)
    )
    assert held.total == pytest.approx(compute.backward, rel=1e-2)
    assert away.total - held.total == pytest.approx(late * sums_seconds, abs=1e-9)


def test_every_resource_has_its_work() -> None:
    traffic, time = traffic_of(offloaded=SPILLED), step_time(machine(memory_bytes_per_second=1e10), offloaded=SPILLED)
    forward, backward = time.forward, time.backward
    assert [forward.compute, backward.compute] == pytest.approx([0.5, 1.25], rel=1e-12)
    linked = SPILLED.total_bytes
    assert [forward.up, backward.up] == pytest.approx(
        [2 * (ELEMENTS - HEAD) / 1e10, (2 * ELEMENTS + linked) / 1e10], rel=1e-12
    )
    assert [forward.down, backward.down] == pytest.approx([linked / 1e10, 2 * ELEMENTS / 1e10], rel=1e-12)
    nvme = traffic.read_bytes / 2e9 + traffic.written_bytes / 1e9
    assert forward.nvme + backward.nvme == pytest.approx(nvme, rel=1e-12)
    assert traffic.forward_written_bytes == SPILLED.written_bytes + checksum_bytes(SPEC)
    written = traffic.forward_written_bytes / 1e9
    assert forward.nvme == pytest.approx(traffic.forward_read_bytes / 2e9 + written, rel=1e-12)
    assert [forward.optimizer, backward.optimizer] == pytest.approx([0, ELEMENTS / 1e9], rel=1e-12)
    linked = 6 * ELEMENTS - 2 * HEAD + 2 * SPILLED.total_bytes
    moved = traffic.read_bytes + traffic.written_bytes + linked + 26 * ELEMENTS
    assert forward.memory + backward.memory == pytest.approx(moved / 1e10, rel=1e-12)
    nothing = StageTime(compute=0, up=0, down=0, nvme_read=0, nvme_write=0, optimizer=0, memory=0, total=0)
    assert time.update == nothing
    assert time.total == forward.total + backward.total


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_file_is_read_from_one_drive_and_copied_once_more(num_devices: int) -> None:
    hardware = machine(memory_bytes_per_second=1e8)
    hardware = replace(hardware, nvme=replace(hardware.nvme, num_devices=num_devices))
    frozen = replace(SPEC, blocks=(*(replace(block, rule=FROZEN) for block in SPEC.blocks[:-1]), SPEC.blocks[-1]))
    in_files = frozen.in_files({block.index: block.compute_bytes for block in frozen.blocks[:-1]})
    stored, placed = (step_time(hardware, spec=spec).forward for spec in (frozen, in_files))
    num_bytes = sum(block.compute_bytes for block in frozen.blocks[:-1])
    assert placed.nvme_read == pytest.approx(stored.nvme_read + (num_devices - 1) * num_bytes / 2e9)
    assert placed.memory == pytest.approx(stored.memory + 2 * num_bytes / 1e8)


def test_where_the_cpu_computes_the_optimizer_and_copies_take_their_share_of_it() -> None:
    hardware = machine(num_cores=4, memory_bytes_per_second=1e10)
    time = step_time(hardware, offloaded=SPILLED)
    assert time.forward.compute == pytest.approx(0.5 + SPILLED.written_bytes / 1e10)
    assert time.backward.compute == pytest.approx(1.25 + ELEMENTS / 1e9 / 4)
    assert (time.forward.up, time.forward.down, time.backward.up, time.backward.down) == (0, 0, 0, 0)
    separate = step_time(hardware, overlap="separate")
    assert (separate.backward.compute, separate.update.compute) == (1.25, 0)


def test_what_is_swapped_is_not_recomputed() -> None:
    for saved, left in ((0.25, 1.0), (9.0, 0.0)):
        assert step_time(machine(), not_recomputed_seconds=saved).backward.compute == left


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_in_each_stage_the_slowest_resource_decides(slow: str, holds_gradients: bool) -> None:
    time = step_time(machine_with(slow, 1e5), holds_gradients=holds_gradients)
    for stage in (time.forward, time.backward):
        assert stage.total == longest(stage)
    assert time.total > COMPUTE.forward + COMPUTE.backward


@pytest.mark.parametrize("slow", SLOW)
def test_naive_updates_are_a_sum_overlapped_with_computing(slow: str) -> None:
    hardware = machine_with(slow, 1e6)
    optimized, naive = step_time(hardware), step_time(hardware, overlap="naive")
    backward, traffic = naive.backward, traffic_of()
    chain = backward.nvme_read + backward.optimizer + backward.nvme_write
    longest_seconds = max(backward.compute, chain, backward.up, backward.down, backward.memory)
    assert backward.total == pytest.approx(longest_seconds, rel=1e-6)  # and the embedding, which is written last
    assert backward.nvme_read == traffic.backward_read_bytes / hardware.nvme.read_bytes_per_second
    assert backward.nvme_write == traffic.backward_written_bytes / hardware.nvme.write_bytes_per_second
    assert naive.total >= optimized.total


@pytest.mark.parametrize("slow", SLOW)
def test_a_separate_update_comes_on_top(slow: str) -> None:
    hardware = machine_with(slow, 1e6)
    time = step_time(hardware, overlap="separate", placement=replace(IN_TURN, prefetch_blocks=2))
    assert time.update.total == max(time.update.nvme, time.update.optimizer, time.update.memory) > 0
    assert (time.update.compute, time.forward.optimizer, time.backward.optimizer) == (0, 0, 0)
    assert time.backward.total == longest(time.backward)
    assert time.total == time.forward.total + time.backward.total + time.update.total
    assert time.total >= step_time(hardware).total


def test_updates_begin_with_the_first_gradient() -> None:
    """Where the drive decides, what it waits for comes on top: the head, and layers whose update is deferred."""
    slow = machine_with("write_bytes_per_second", 1e5)
    headed = replace(COMPUTE, head=0.25)
    plain = step_time(slow)
    assert step_time(slow, compute=headed).total == pytest.approx(plain.total + 0.25)
    deferred = replace(DEEP, deferred=frozenset(range(len(SPEC.blocks) - 1, len(SPEC.blocks))))
    later = step_time(slow, compute=headed, placement=deferred).backward
    assert later.total == pytest.approx(later.nvme + 0.25 + 1 / (len(SPEC.blocks) - 2))


def test_the_next_step_waits_for_an_embedding_that_does_not_stay() -> None:
    slow = machine_with("write_bytes_per_second", 1e7)
    embedding = 12 * SPEC.blocks[0].num_elements / 1e7
    backward = step_time(slow, compute=replace(COMPUTE, backward=1000.0)).backward
    assert backward.total == pytest.approx(1000 + embedding)
    stays = replace(DEEP, resident_weights=frozenset({0}))
    assert step_time(slow, compute=replace(COMPUTE, backward=1000.0), placement=stays).backward.total == 1000


def test_the_next_step_waits_for_the_update_of_the_embedding() -> None:
    """Also where the drive is faster than AdamW: for what is not updated when its gradient is there."""
    long = replace(COMPUTE, backward=1000.0)
    groups = GroupShape(elements=1, in_flight=1)
    for threads in (1, 2):
        placement = replace(DEEP, adamw_threads=threads, groups=groups)
        rate = ELEMENTS / 500.0
        found = step_time(machine(adam_parameters_per_second=rate), compute=long, placement=placement).backward
        waited = (SPEC.blocks[0].num_elements - 2) / (rate * threads)
        assert waited > 1.0 and found.total == pytest.approx(1000.0 + waited)


@pytest.mark.parametrize("spare", [0.0, 0.001, 1e9])
def test_pending_updates_end_overlapped_with_the_next_forward(spare: float) -> None:
    """If it has time to spare, and its first block need not be read."""
    slow = machine_with("write_bytes_per_second", 1e7)
    placement = replace(DEEP, resident_weights=frozenset({0}))
    time = step_time(slow, compute=replace(COMPUTE, forward=spare, backward=0.0), placement=placement)
    traffic = traffic_of(placement)
    moved_bytes = traffic.backward_read_bytes + traffic.backward_written_bytes
    pending = 12 * sum(block.num_elements for block in SPEC.blocks[:2]) / moved_bytes * time.backward.nvme
    spare_of_drive = max(0.0, spare - checksum_bytes(SPEC) / 1e7)
    assert time.backward.total == pytest.approx(time.backward.nvme - min(spare_of_drive, pending), rel=1e-5)


@pytest.mark.parametrize(("spilled_units", "drained_share"), [(0, 1.0), (3, 1.0), (4, 0.5), (8, 0.5)])
def test_what_is_spilled_is_written_behind_pending_updates(spilled_units: int, drained_share: float) -> None:
    """Computing goes on for three of twelve units; here forward is twice as long as what is pending takes."""
    slow = machine_with("write_bytes_per_second", 1e7)
    placement = replace(DEEP, resident_weights=frozenset({0}))
    offloaded = offload([64, 64, 64], num_micro_batches=4, spilled_units=spilled_units)
    plain, traffic = step_time(slow, placement=placement).backward, traffic_of(placement)
    moved_bytes = traffic.backward_read_bytes + traffic.backward_written_bytes
    pending = 12 * sum(block.num_elements for block in SPEC.blocks[:2]) / moved_bytes * plain.nvme
    compute = replace(COMPUTE, forward=2 * pending, backward=0.0)
    backward = step_time(slow, compute=compute, placement=placement, offloaded=offloaded).backward
    assert backward.total == pytest.approx(backward.nvme - drained_share * pending, rel=2e-2)


@pytest.mark.parametrize("overlap", ["optimized", "naive"])
def test_what_does_not_run_ahead_stands_in_the_way(overlap: Overlap) -> None:
    time = step_time(machine(), placement=IN_TURN, overlap=overlap)
    update = time.backward.nvme + time.backward.optimizer if overlap == "naive" else time.backward.nvme
    assert time.backward.total == pytest.approx(time.backward.compute + update)
    assert time.forward.total == time.forward.compute + time.forward.nvme
    without_pending = step_time(machine(), placement=replace(IN_TURN, prefetch_blocks=1), overlap=overlap)
    assert without_pending.forward.total == max(time.forward.compute, time.forward.nvme)
    assert without_pending.backward.total > without_pending.backward.compute
    held = step_time(machine(), placement=replace(IN_TURN, prefetch_blocks=1), overlap=overlap, holds_gradients=True)
    assert held.backward.total == max(held.backward.compute, held.backward.nvme)


@pytest.mark.parametrize("placement", [DEEP, IN_TURN])
def test_spilled_activations_overlap_with_the_computing_of_their_own_layers(placement: Placement) -> None:
    """Two layers of three in forward, of five blocks in backward, where the last three units are still in buffers."""
    offloaded = offload([4096, 4096, 4096], num_micro_batches=4, spilled_units=8)
    assert (offloaded.num_units, offloaded.written_bytes, offloaded.read_bytes) == (12, 8 * 4096, 5 * 4096)
    time = StepCosts(
        step=planned_step(SPEC, ONE_TOKEN, holds_gradients=True, on_gpu=True),
        hardware=machine(read_bytes_per_second=5 * 4096 / 0.9, write_bytes_per_second=8 * 4096 / 0.9),
        compute=ComputeSeconds(forward=1.0, backward=1.0, head=0.0, is_measured=False),
    ).time(placement, replace(traffic_of(), **dict.fromkeys(MOVED, 0)).with_offloaded(offloaded), offloaded)
    assert time.forward.total == pytest.approx(0.9 + 4 / 12, rel=1e-3)
    assert time.backward.total == pytest.approx(0.9 + 15 / 20, rel=1e-3)


@examples(50)
@given(seed=SEEDS)
def test_spilling_more_never_takes_less_and_running_ahead_never_more(seed: int) -> None:
    choice = random.Random(seed)
    hardware = machine(
        read_bytes_per_second=10 ** choice.uniform(4, 8),
        write_bytes_per_second=10 ** choice.uniform(4, 8),
        mixed_bytes_per_second=10 ** choice.uniform(4, 8),
        num_cores=choice.choice([None, 2]),
        memory_bytes_per_second=1e10,
    )
    compute = replace(COMPUTE, head=choice.uniform(0, 1))
    unit_bytes, number = [choice.randint(1, 50_000) for _ in range(3)], choice.randint(1, 5)
    seconds = 0.0
    for spilled_units in range(2 * number + 1):
        offloaded = offload(unit_bytes, num_micro_batches=number, spilled_units=spilled_units)
        deep = step_time(hardware, offloaded=offloaded, compute=compute).total
        assert seconds <= deep * (1 + 1e-12)
        assert deep <= step_time(hardware, offloaded=offloaded, compute=compute, placement=IN_TURN).total * (1 + 1e-12)
        seconds = deep


@pytest.mark.parametrize(
    ("slow", "bottleneck"),
    [
        ("", "compute"),
        ("read_bytes_per_second", "nvme read"),
        ("write_bytes_per_second", "nvme write"),
        ("adam_parameters_per_second", "optimizer"),
        ("up_bytes_per_second", "up"),
        ("down_bytes_per_second", "down"),
        ("memory_bytes_per_second", "memory"),
    ],
)
def test_each_resource_can_be_the_bottleneck(slow: str, bottleneck: str) -> None:
    assert step_time(machine_with(slow, 1e3)).bottleneck == bottleneck


def test_both_directions_count_together_against_the_others() -> None:
    nothing = StageTime(compute=0, up=0, down=0, nvme_read=0, nvme_write=0, optimizer=0, memory=0, total=0)
    time = StepTime(
        forward=replace(nothing, compute=3, nvme_read=2),
        backward=replace(nothing, nvme_write=2.5),
        update=replace(nothing, optimizer=4),
    )
    assert time.bottleneck == "nvme write"


@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
def test_rates_twice_as_high_halve_the_time(overlap: Overlap) -> None:
    def seconds(factor: float) -> float:
        rates = dict.fromkeys(SLOW, factor * 1e6) | {"read_bytes_per_second": factor * 2e6}
        hardware = machine(**rates | {"memory_bytes_per_second": factor * 1e7})  # type: ignore[arg-type]
        compute = replace(COMPUTE, forward=COMPUTE.forward / factor, backward=COMPUTE.backward / factor)
        return step_time(hardware, overlap=overlap, offloaded=SPILLED, compute=compute).total

    assert seconds(1) == pytest.approx(2 * seconds(2), rel=1e-12)
