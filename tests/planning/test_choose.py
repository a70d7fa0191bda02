"""What stays, what is swapped and what is spilled: against trying everything, and what each limit and wish does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.analytic import spec_from_shape
from ratel_cli.planning.profile.placement import LEAST_UNITS, ActivationPolicy, GroupShape, Overlap, Placement, Workload
from ratel_cli.planning.search.choose import adamw_threads, curve, group_shape, weigh
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.evaluation import Evaluation
from ratel_cli.planning.search.plan import make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.split import LEAST_GAIN, SplitRate, best_split
from ratel_cli.schedule.rules import rules_of
from ratel_cli.units import GIB, MIB
from tests.planning.profiles import by_chance, estimated
from tests.planning.shapes import SEEDS, WORKLOAD, gpt, machine, machine_by_chance, unit_of
from tests.tiers import examples

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=20_000)
PROFILE = estimated(SPEC)
NUM_BLOCKS = len(SPEC.blocks)
EVERY = frozenset(range(NUM_BLOCKS))
SLOW_DEVICE = machine(flops_per_second=1e10)
SLOW_DRIVE = machine(flops_per_second=1e15)
EVEN = machine(flops_per_second=1.6e11)
"""Forward has time to spare, backward waits for the drive; in all, computing takes about as long as the drive."""
ROOMY = 64 * GIB
AS_GOOD = 1.005
"""Levels that are as good as the best one (choose.py)."""
WISHES: tuple[ActivationPolicy, ...] = ("auto", "keep", "recompute", "static", "swap_all", 0.3)


def problem(hardware: HardwareProfile = EVEN, *, limit_bytes: int = ROOMY, **decisions: object) -> Problem:
    usual = Decisions(holds_gradients=False, num_slots=2, host_limit_bytes=limit_bytes)
    return Problem(
        spec=SPEC,
        workload=WORKLOAD,
        profile=PROFILE,
        hardware=hardware,
        decisions=replace(usual, **decisions),  # type: ignore[arg-type]
        process_bytes=100 * MIB,
    )


def deciding(of: Problem, **changes: object) -> Problem:
    """The same problem with other decisions."""
    return replace(of, decisions=replace(of.decisions, **changes))


def problem_by_chance(choice: random.Random) -> Problem:
    """A small model with an estimated profile, or any other; a GPU, or the CPU computes."""
    spec = gpt(
        num_layers=choice.randint(1, 4),
        hidden_size=choice.choice([256, 512]),
        vocab_size=choice.choice([500, 4000]),
        tied=choice.random() < 0.3,
    )
    workload = Workload(
        micro_batch_size=choice.randint(1, 8),
        num_micro_batches=choice.randint(1, 3),
        sequence_len=choice.choice([128, 512]),
    )
    profile = estimated(spec, workload)
    if choice.random() < 0.4:
        profile = by_chance(choice, num_layers=spec.num_layers, most_kib=4000, most_flops=10**10)
    inputs_bytes = max(layer.input_bytes for layer in profile.profiles)
    gpu_bytes = GpuMemory(spec, workload, profile).needed_bytes(unit_of(inputs_bytes), units=LEAST_UNITS)
    return Problem(
        spec=spec,
        workload=workload,
        profile=profile,
        hardware=machine_by_chance(choice),
        decisions=Decisions(
            device_limit_bytes=gpu_bytes + choice.randint(0, 100 * MIB) if choice.random() < 0.5 else None,
            holds_gradients=choice.random() < 0.4,
            overlap=choice.choice(["optimized", "optimized", "naive", "separate"]),
            num_slots=2,
            host_limit_bytes=ROOMY,
        ),
        process_bytes=0,
    )


def test_threads_of_adamw_keep_up_with_the_drives_and_on_a_gpus_machine_with_main_memory() -> None:
    computing_on_cpu = machine(adam_parameters_per_second=1e9, num_cores=8)
    drives = replace(computing_on_cpu.nvme, mixed_bytes_per_second=22 * 2.5e9)
    host = replace(computing_on_cpu.host, memory_bytes_per_second=26 * 5.5e9)
    on_cpu = replace(computing_on_cpu, nvme=drives, host=host)
    assert adamw_threads(SPEC, on_cpu) == 3
    assert adamw_threads(SPEC, replace(on_cpu, host=replace(host, num_cores=2))) == 2
    on_gpu = replace(on_cpu, link=machine().link)
    assert on_gpu.link is not None
    assert adamw_threads(SPEC, replace(on_gpu, host=replace(host, num_cores=12))) == 6
    assert adamw_threads(SPEC, on_gpu) == 4
    assert adamw_threads(SPEC, replace(on_gpu, host=replace(host, num_cores=1))) == 1
    assert adamw_threads(SPEC, replace(on_gpu, host=replace(host, memory_bytes_per_second=None))) == 4
    assert adamw_threads(SPEC, replace(on_cpu, host=replace(host, memory_bytes_per_second=None))) == 3


def each_faster(hardware: HardwareProfile, factor: float) -> Iterator[HardwareProfile]:
    """With one rate higher than it was."""
    yield replace(hardware, gpu=replace(hardware.gpu, flops_per_second=factor * hardware.gpu.flops_per_second))
    nvme, host, link = hardware.nvme, hardware.host, hardware.link
    yield replace(hardware, nvme=replace(nvme, read_bytes_per_second=factor * nvme.read_bytes_per_second))
    yield replace(hardware, nvme=replace(nvme, write_bytes_per_second=factor * nvme.write_bytes_per_second))
    yield replace(hardware, nvme=replace(nvme, mixed_bytes_per_second=factor * nvme.mixed_bytes_per_second))
    yield replace(hardware, host=replace(host, adam_parameters_per_second=factor * host.adam_parameters_per_second))
    if host.memory_bytes_per_second is not None:
        yield replace(hardware, host=replace(host, memory_bytes_per_second=factor * host.memory_bytes_per_second))
    if link is not None:
        yield replace(hardware, link=replace(link, to_gpu_bytes_per_second=factor * link.to_gpu_bytes_per_second))
        yield replace(hardware, link=replace(link, from_gpu_bytes_per_second=factor * link.from_gpu_bytes_per_second))
        yield replace(hardware, link=replace(link, both_bytes_per_second=factor * link.both_bytes_per_second))


def with_drives(hardware: HardwareProfile, num_drives: int) -> HardwareProfile:
    return replace(hardware, nvme=replace(hardware.nvme, num_devices=num_drives))


@pytest.mark.parametrize(
    ("num_drives", "limit_bytes", "shape"),
    [
        (1, ROOMY, GroupShape(in_flight=2)),
        (2, ROOMY, GroupShape(elements=4 << 20, in_flight=2)),
        (3, ROOMY, GroupShape(elements=8 << 20, in_flight=2)),
        (12, ROOMY, GroupShape(elements=16 << 20, in_flight=2)),
        (12, 8 * GIB, GroupShape(elements=8 << 20, in_flight=2)),
        (12, 2 * GIB, GroupShape(elements=2 << 20, in_flight=2)),
        (12, GIB, GroupShape()),
    ],
)
def test_groups_grow_with_the_drives_where_memory_allows(num_drives: int, limit_bytes: int, shape: GroupShape) -> None:
    assert group_shape(problem(with_drives(EVEN, num_drives), limit_bytes=limit_bytes)) == shape


@pytest.mark.parametrize(("link", "limit_bytes", "pending"), [(False, ROOMY, 2), (True, ROOMY, 4), (True, 4 * GIB, 2)])
def test_more_blocks_may_be_pending_on_a_gpu_where_memory_allows(link: bool, limit_bytes: int, pending: int) -> None:
    """Four blocks of 20M parameters take 320 MB of the 256 MB that a sixteenth of 4 GiB is."""
    both_ways = Link(to_gpu_bytes_per_second=2e10, from_gpu_bytes_per_second=2e10, both_bytes_per_second=4e10)
    of = problem(replace(SLOW_DRIVE, link=both_ways if link else None), limit_bytes=limit_bytes)
    assert weigh(of).best.placement.pending_updates == pending


def test_groups_of_one_drive_are_taken_where_no_others_fit() -> None:
    """With twelve drives nothing is rejected that fits with one."""
    twelve = problem(with_drives(EVEN, 12))
    assert least_bytes(twelve) == least_bytes(problem())
    assert weigh(twelve).best.placement.groups == group_shape(twelve)
    assert weigh(deciding(twelve, host_limit_bytes=least_bytes(twelve))).best.placement.groups == GroupShape()


def test_fewer_matrices_are_in_flight_where_memory_is_short() -> None:
    """Groups of other blocks stay as large as they may be: what takes the memory is a matrix, which has one size."""
    spec = spec_from_shape(name="large", num_layers=2, hidden_size=4096, vocab_size=500, rules=rules_of("muon"))
    of = replace(problem(), spec=spec)
    needed_bytes = [GroupShape(in_flight=number).buffer_bytes(spec.blocks) for number in (1, 2)]
    for share, in_flight in ((needed_bytes[1], 2), (needed_bytes[1] - 1, 1), (needed_bytes[0] - 1, 1)):
        assert group_shape(deciding(of, host_limit_bytes=16 * share)).in_flight == in_flight


def least_bytes(of: Problem) -> int:
    """The lowest limit with which anything fits: what the error says is missing if there is none."""
    with pytest.raises(DoesNotFit) as raised:
        weigh(deciding(of, host_limit_bytes=0))
    return raised.value.shortfall_bytes


def needed(of: Problem, placement: Placement, *, num_outputs: int = 0) -> int:
    return deciding(of, host_limit_bytes=1 << 50).evaluate(placement, num_outputs=num_outputs).memory.total


def moved(choice: Evaluation) -> int:
    return choice.traffic.read_bytes + choice.traffic.written_bytes


def depth(choice: Evaluation) -> tuple[int, int]:
    return choice.placement.prefetch_blocks, choice.placement.pending_updates


def deep(prefetch_blocks: int, pending_updates: int) -> Placement:
    """On a GPU without a limit, which has memory for the next block and for the sums of gradients."""
    return Placement(
        prefetch_blocks=prefetch_blocks,
        pending_updates=pending_updates,
        gpu_embedding_rows=WORKLOAD.tokens,
        read_in_place={"wte": "DHA"},
        gpu_window_bytes=2 * max(SPEC.block_elements),
        gpu_holds_sums=True,
    )


def level(placement: Placement, number: int, num_blocks: int) -> Placement:
    """Weights of the first blocks stay, and after those of all, states."""
    return replace(
        placement,
        resident_weights=frozenset(range(min(number, num_blocks))),
        resident_states=frozenset(range(max(0, number - num_blocks))),
    )


def fits_gpu(of: Problem, choice: Evaluation) -> bool:
    limit_bytes = of.decisions.device_limit_bytes
    return limit_bytes is None or of.hardware.link is None or choice.memory.device <= limit_bytes


def every_choice(of: Problem, chosen: Evaluation) -> Iterator[Evaluation]:
    """All levels and prefixes that fit at the depth and with the deferral that were chosen, as few units spilled as do.

    Where gradients are spilled nothing else stays; where they need not be, they are not. The head's sums are where they
    were chosen to be.
    """
    of = replace(of, gpu_holds_head=chosen.placement.gpu_holds_head)
    num_blocks = len(of.spec.blocks)
    most_spilled = of.workload.num_micro_batches * (of.spec.num_layers - 1)
    for number in range(1 if chosen.spilled_segments else 2 * num_blocks + 1):
        placement = level(chosen.placement, number, num_blocks)
        for num_outputs in range(of.order.num_outputs + 1):
            for spilled_units in range(most_spilled + 1):
                try:
                    found = of.evaluate(replace(placement, spilled_units=spilled_units), num_outputs=num_outputs)
                except DoesNotFit:
                    continue
                if bool(found.spilled_segments) == bool(chosen.spilled_segments) and fits_gpu(of, found):
                    yield found
                break


@examples(32)
@given(seed=SEEDS)
def test_it_is_as_good_as_the_best_of_all_levels_and_prefixes(seed: int) -> None:
    """Small models and any machine, with just enough memory, a little more, and more."""
    choice = random.Random(seed)
    of = problem_by_chance(choice)
    least, most = least_bytes(of), weigh(of).best.memory.total
    for share in (0.0, choice.random() ** 2, choice.random()):
        tight = deciding(of, host_limit_bytes=least + int(share * max(0, most - least)))
        chosen = weigh(tight).best
        best = min(each.time.total for each in every_choice(tight, chosen))
        assert chosen.time.total <= AS_GOOD * best * (1 + 1e-12)


def in_micro_batches(of: Problem, size: int) -> Problem:
    """The same step in micro-batches of `size` rows."""
    rows = of.workload.micro_batch_size * of.workload.num_micro_batches
    workload = replace(of.workload, micro_batch_size=size, num_micro_batches=rows // size)
    return replace(of, workload=workload, profile=of.profile.of_tokens(workload.micro_batch_tokens))


@pytest.mark.full
@examples(48)
@given(seed=SEEDS)
def test_no_split_with_any_prefix_and_level_is_faster(seed: int) -> None:
    """By trying all of them, with a GPU and host memory that not every split fits into."""
    choice = random.Random(seed)
    of = problem_by_chance(choice)
    rows = choice.choice([2, 3, 4, 6, 8])
    of = in_micro_batches(replace(of, workload=replace(of.workload, micro_batch_size=rows, num_micro_batches=1)), rows)
    memory = GpuMemory(of.spec, of.workload, of.profile)
    least = memory.needed_bytes(of.order.largest_unit(0), units=LEAST_UNITS)
    if of.hardware.link is not None:
        of = deciding(of, device_limit_bytes=int(least * choice.uniform(0.7, 1.5)))
    of = deciding(of, host_limit_bytes=int(least_bytes(of) * choice.uniform(1.0, 3.0)))

    def rate(workload: Workload) -> SplitRate:
        try:
            plan = make_plan(in_micro_batches(of, workload.micro_batch_size))
        except DoesNotFit as failure:
            return SplitRate(workload=workload, tokens_per_second=0.0, shortfall_bytes=failure.shortfall_bytes)
        return SplitRate(workload=workload, tokens_per_second=plan.tokens_per_second, shortfall_bytes=0)

    fastest = 0.0
    for size in (size for size in range(1, rows + 1) if rows % size == 0):
        tried = in_micro_batches(of, size)
        try:
            chosen = weigh(tried).best
        except DoesNotFit:
            continue
        for each in every_choice(tried, chosen):
            fastest = max(fastest, of.workload.tokens / each.time.total)
    found = best_split(of.workload, rate)
    assert found.fits == (fastest > 0)
    if found.fits:
        assert found.tokens_per_second >= (1 - LEAST_GAIN) * fastest / AS_GOOD * (1 - 1e-12)


@examples(40)
@given(seed=SEEDS)
def test_everything_fits_from_just_enough_to_plenty_and_below_it_says_what_is_missing(seed: int) -> None:
    choice = random.Random(seed)
    of = deciding(problem_by_chance(choice), activations=choice.choice(WISHES))
    least, most = least_bytes(of), weigh(of).best.memory.total
    for limit_bytes in {least, least + 1, most, *(choice.randint(least, max(least, most)) for _ in range(6))}:
        chosen = weigh(deciding(of, host_limit_bytes=limit_bytes)).best
        assert chosen.memory.total <= limit_bytes
    for missing_bytes in (1, choice.randint(1, least)):
        with pytest.raises(DoesNotFit) as raised:
            weigh(deciding(of, host_limit_bytes=least - missing_bytes))
        assert raised.value.shortfall_bytes == missing_bytes


@pytest.mark.full
@examples(25)
@given(seed=SEEDS)
def test_what_is_faster_never_makes_a_step_slower(seed: int) -> None:
    """But for the allowances: half a percent for a higher level, 2 % for deferral."""
    choice = random.Random(seed)
    of = problem_by_chance(choice)
    of = deciding(of, host_limit_bytes=choice.randint(least_bytes(of), weigh(of).best.memory.total + MIB))
    before = weigh(of).best.time.total
    factor = choice.choice([1.1, 2.0, 30.0])
    for other in each_faster(of.hardware, factor):
        assert weigh(replace(of, hardware=other)).best.time.total <= before * AS_GOOD / 0.98


@pytest.mark.full
@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
@examples(12)
@given(seed=SEEDS)
def test_more_memory_never_harms(seed: int, overlap: Overlap) -> None:
    """At one depth: a deeper one, which the prediction sees little of, takes memory from what stays."""
    choice = random.Random(seed)
    of = deciding(problem_by_chance(choice), overlap=overlap)
    least, most = least_bytes(of), weigh(of).best.memory.total
    fastest: dict[tuple[int, int, bool], float] = {}
    for limit_bytes in sorted(choice.randint(least, max(least, most)) for _ in range(10)):
        chosen = weigh(deciding(of, host_limit_bytes=limit_bytes)).best
        found = *depth(chosen), chosen.spilled_segments > 0
        assert chosen.time.total <= AS_GOOD * fastest.get(found, chosen.time.total) / 0.98
        fastest[found] = min(fastest.get(found, chosen.time.total), chosen.time.total)


@pytest.mark.full
@examples(40)
@given(seed=SEEDS)
def test_more_gpu_memory_never_harms(seed: int) -> None:
    """A little less than everything takes does not mean that nothing is swapped."""
    choice = random.Random(seed)
    of = problem_by_chance(choice)
    while of.hardware.link is None:
        of = problem_by_chance(choice)
    memory = GpuMemory(of.spec, of.workload, of.profile)
    least = memory.needed_bytes(of.order.largest_unit(0), units=LEAST_UNITS)
    most = memory.needed_bytes(of.order.largest_unit(of.order.num_outputs))
    fastest = weigh(deciding(of, device_limit_bytes=least)).best.time.total
    for limit_bytes in (*sorted(choice.randint(least, most) for _ in range(6)), most, 2 * most):
        chosen = weigh(deciding(of, device_limit_bytes=limit_bytes)).best
        assert chosen.memory.device <= limit_bytes
        assert chosen.time.total <= AS_GOOD * fastest / 0.98
        fastest = min(fastest, chosen.time.total)


@pytest.mark.full
def test_a_gpu_with_a_byte_less_than_all_takes_swaps_less_and_not_nothing() -> None:
    num_partial = 0
    for seed in range(40):
        of = deciding(problem_by_chance(random.Random(seed)), device_limit_bytes=1 << 40)
        free = weigh(of).best
        if of.hardware.link is None or not free.swap.num_outputs:
            continue
        largest = of.order.largest_unit(free.swap.num_outputs)
        needed_bytes = GpuMemory(of.spec, of.workload, of.profile).needed_bytes(largest, units=LEAST_UNITS)
        tight = weigh(deciding(of, device_limit_bytes=needed_bytes - 1)).best
        assert tight.swap.num_outputs < free.swap.num_outputs or not tight.placement.gpu_holds_head
        num_partial += tight.swap.num_outputs > 0
    assert num_partial >= 5


@pytest.mark.parametrize("depths", [(2, 2), (1, 1), (0, 0)])
def test_the_deepest_that_fits_comes_first(depths: tuple[int, int]) -> None:
    total = needed(problem(SLOW_DRIVE), deep(*depths))
    chosen = weigh(problem(SLOW_DRIVE, limit_bytes=total)).best
    assert depth(chosen) == depths
    assert chosen.memory.total <= total


def test_gradients_are_spilled_before_all_depth_is_given_up() -> None:
    limit_bytes = needed(problem(holds_gradients=True), deep(0, 0))
    chosen = weigh(problem(holds_gradients=True, limit_bytes=limit_bytes)).best
    assert depth(chosen) == (1, 1)
    assert chosen.spilled_segments > 0
    assert chosen.placement.resident_weights == frozenset()


def test_depth_is_given_up_where_it_gains_nothing() -> None:
    """Next to no time of computing to hide transfers in: what counts is how much is moved."""
    limit_bytes = needed(problem(SLOW_DRIVE, holds_gradients=True), deep(0, 0))
    chosen = weigh(problem(SLOW_DRIVE, holds_gradients=True, limit_bytes=limit_bytes)).best
    assert (depth(chosen), chosen.spilled_segments) == ((0, 0), 0)


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE])
def test_a_block_of_depth_is_given_up_before_gradients_are_spilled(hardware: HardwareProfile) -> None:
    limit_bytes = needed(problem(hardware, holds_gradients=True), deep(1, 1))
    chosen = weigh(problem(hardware, holds_gradients=True, limit_bytes=limit_bytes)).best
    assert (depth(chosen), chosen.spilled_segments) == ((1, 1), 0)


def test_with_too_little_memory_for_inputs_they_are_spilled() -> None:
    """As few as do; of those the last layer's never."""
    of = problem(SLOW_DEVICE)
    one_bytes = WORKLOAD.micro_batch_tokens * 1024 * 2
    least = least_bytes(of)
    chosen = weigh(deciding(of, host_limit_bytes=least)).best
    most_spilled = WORKLOAD.num_micro_batches * (SPEC.num_layers - 1)
    assert depth(chosen) == (0, 0)
    assert chosen.placement.spilled_units == most_spilled
    for missing_bytes, spilled_units in ((1, most_spilled), (0, most_spilled - 1)):
        chosen = weigh(deciding(of, host_limit_bytes=least + one_bytes - missing_bytes)).best
        assert chosen.placement.spilled_units == spilled_units


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE])
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_with_room_for_everything_everything_stays(hardware: HardwareProfile, holds_gradients: bool) -> None:
    chosen = weigh(problem(hardware, holds_gradients=holds_gradients)).best
    placement = chosen.placement
    assert (placement.resident_weights, placement.resident_states) == (EVERY, EVERY)
    assert (placement.spilled_units, chosen.offloaded.written_bytes) == (0, 0)


def test_everything_is_swapped_where_computing_is_slow_and_nothing_where_it_is_fast() -> None:
    slow, fast = problem(SLOW_DEVICE), problem(SLOW_DRIVE)
    assert weigh(slow).best.swap.num_outputs == slow.order.num_outputs
    assert weigh(fast).best.swap.num_outputs == 0


@pytest.mark.parametrize("num_blocks", range(NUM_BLOCKS + 1))
def test_weights_come_first_from_the_first_block_upwards(num_blocks: int) -> None:
    of = problem(SLOW_DRIVE, activations="recompute")
    wanted = level(deep(2, 2), num_blocks, NUM_BLOCKS)
    total = needed(of, wanted)
    found = weigh(deciding(of, host_limit_bytes=total)).best.placement
    # More of them may cost nothing: at the peak, which is the head's, the last layers are read ahead anyway.
    number = len(found.resident_weights) + len(found.resident_states)
    assert number >= num_blocks
    assert found == level(deep(2, 2), number, NUM_BLOCKS)
    assert number == 2 * NUM_BLOCKS or needed(of, level(found, number + 1, NUM_BLOCKS)) > total


@pytest.mark.parametrize("num_blocks", range(NUM_BLOCKS + 1))
def test_then_states_come(num_blocks: int) -> None:
    of = problem(SLOW_DRIVE, holds_gradients=True, activations="recompute")
    wanted = level(deep(2, 2), NUM_BLOCKS + num_blocks, NUM_BLOCKS)
    assert weigh(deciding(of, host_limit_bytes=needed(of, wanted))).best.placement == wanted


@pytest.mark.parametrize("limit_bytes", [GIB, 2 * GIB, ROOMY])
@pytest.mark.parametrize("activations", ["recompute", "static"])
def test_nothing_but_inputs_is_swapped_where_the_user_says_so(limit_bytes: int, activations: ActivationPolicy) -> None:
    chosen = weigh(problem(SLOW_DEVICE, activations=activations, limit_bytes=limit_bytes)).best
    assert (chosen.swap.num_outputs, chosen.placement.swapped) == (0, {})
    assert chosen.offloaded.total_bytes == WORKLOAD.tokens * 1024 * 2 * SPEC.num_layers


def test_everything_is_swapped_where_the_user_says_so_and_goes_where_there_is_room() -> None:
    of = problem(SLOW_DRIVE, activations="swap_all")
    plenty, tight = weigh(of).best, weigh(deciding(of, host_limit_bytes=least_bytes(of))).best
    for chosen in (plenty, tight):
        assert chosen.swap.num_outputs == of.order.num_outputs
    assert plenty.placement.spilled_units == 0
    assert tight.placement.spilled_units > 0
    assert tight.offloaded.written_bytes > tight.offloaded.read_bytes > 0


def test_everything_is_kept_in_memory_or_rejected_where_the_user_says_so() -> None:
    of = problem(SLOW_DRIVE, activations="keep")
    least = least_bytes(of)
    assert least == needed(of, deep(0, 0), num_outputs=of.order.num_outputs)
    for limit_bytes in (least, ROOMY):
        chosen = weigh(deciding(of, host_limit_bytes=limit_bytes)).best
        assert (chosen.swap.num_outputs, chosen.placement.spilled_units) == (of.order.num_outputs, 0)
    with pytest.raises(DoesNotFit, match=r"activations .* \(short by 1 B\)"):
        weigh(deciding(of, host_limit_bytes=least - 1))


@pytest.mark.parametrize(("fraction", "num_layers"), [(0.0, 0), (0.3, 2), (1.0, 6)])
def test_as_great_a_share_is_swapped_as_the_user_says(fraction: float, num_layers: int) -> None:
    of = problem(SLOW_DRIVE, activations=fraction)
    swap, all_bytes = weigh(of).best.swap, of.order.prefix(of.order.num_outputs).num_bytes
    assert swap.num_bytes >= int(fraction * all_bytes)
    assert not swap.num_outputs or of.order.prefix(swap.num_outputs - 1).num_bytes < fraction * all_bytes
    assert (swap.num_bytes >= all_bytes) == (num_layers == SPEC.num_layers)


@pytest.mark.parametrize("activations", WISHES)
@pytest.mark.parametrize("limit_bytes", [GIB, ROOMY])
def test_inputs_are_always_put_aside(activations: ActivationPolicy, limit_bytes: int) -> None:
    chosen = weigh(problem(activations=activations, limit_bytes=limit_bytes)).best
    input_bytes = WORKLOAD.tokens * 1024 * 2 * SPEC.num_layers
    assert chosen.offloaded.total_bytes == input_bytes + WORKLOAD.num_micro_batches * chosen.swap.num_bytes


@pytest.mark.parametrize("hardware", [SLOW_DEVICE, SLOW_DRIVE, EVEN])
@pytest.mark.parametrize("limit_bytes", [int(1.2 * GIB), ROOMY])
def test_a_separate_optimizer_has_nothing_pending_or_deferred(hardware: HardwareProfile, limit_bytes: int) -> None:
    placement = weigh(problem(hardware, overlap="separate", limit_bytes=limit_bytes)).best.placement
    assert (placement.pending_updates, placement.deferred) == (0, frozenset())
    assert placement.prefetch_blocks > 0


@pytest.mark.parametrize(("hidden_size", "names"), [(255, []), (256, ["wte"])])
def test_rows_that_are_long_enough_are_read_in_place(hidden_size: int, names: list[str]) -> None:
    spec = gpt(num_layers=2, hidden_size=hidden_size, vocab_size=20_000)
    found = weigh(replace(problem(EVEN), spec=spec, profile=estimated(spec))).best.placement
    assert found.gpu_embedding_rows == WORKLOAD.tokens
    assert list(found.read_in_place) == names


@pytest.mark.parametrize("overlap", ["optimized", "naive"])
@pytest.mark.parametrize("limit_bytes", [int(1.5 * GIB), ROOMY])
def test_updates_are_deferred_where_forward_has_time_to_spare(overlap: Overlap, limit_bytes: int) -> None:
    """More of it than the updates take that are pending when backward is over: in a deep model."""
    spec = gpt(num_layers=48)
    usual = problem(machine(flops_per_second=3e11), overlap=overlap, limit_bytes=limit_bytes, activations="recompute")
    of = replace(usual, spec=spec, profile=estimated(spec))
    chosen = weigh(of).best
    num_deferred = len(chosen.placement.deferred)
    assert num_deferred > 0
    assert chosen.placement.deferred == frozenset(range(50 - num_deferred, 50))
    without = of.evaluate(replace(chosen.placement, deferred=frozenset()))
    assert chosen.time.total < 0.98 * without.time.total
    assert moved(chosen) == moved(without)
    # In memory, whatever it is: here the rule says nothing of spilling.
    assert chosen.spilled_segments == 0
    assert chosen.memory.held_gradients == 2 * sum(
        spec.blocks[index].num_elements for index in chosen.placement.deferred
    )


def test_deferral_needs_held_gradients_to_be_held_anyway() -> None:
    assert weigh(problem(holds_gradients=True)).best.placement.deferred == frozenset()


def test_without_depth_nothing_is_deferred() -> None:
    placement = weigh(problem(limit_bytes=needed(problem(), deep(0, 0)))).best.placement
    assert (placement.prefetch_blocks, placement.deferred) == (0, frozenset())


@pytest.mark.parametrize("flops_per_second", [1e11, 3e11, 5e11, 7e11, 1e12, 2e12, 3e12, 5e12, 1e13, 3e13, 1e15])
def test_as_many_are_deferred_as_make_the_step_shortest(flops_per_second: float) -> None:
    of = problem(machine(flops_per_second=flops_per_second), activations="recompute")
    chosen = weigh(of).best
    scanned = [
        of.evaluate(replace(chosen.placement, deferred=frozenset(range(first, NUM_BLOCKS)))).time.total
        for first in range(NUM_BLOCKS, -1, -1)
    ]
    assert scanned[len(chosen.placement.deferred)] == chosen.time.total
    assert chosen.time.total <= min(scanned) / 0.98
    assert not chosen.placement.deferred or chosen.time.total < 0.98 * scanned[0]


@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_curve_goes_through_what_was_chosen(holds_gradients: bool, share: float) -> None:
    of = problem(SLOW_DEVICE, holds_gradients=holds_gradients)
    least, most = least_bytes(of), weigh(of).best.memory.total
    of = deciding(of, host_limit_bytes=least + int(share * (most - least)))
    chosen = weigh(of).best
    points = curve(of, chosen)
    assert (chosen.offloaded.total_bytes, chosen.time.total) in points
    assert points == sorted(points)
    assert points[0][0] == WORKLOAD.tokens * 1024 * 2 * SPEC.num_layers


def test_a_head_that_does_not_fit_is_summed_in_host_memory_and_one_that_fits_on_the_gpu() -> None:
    """Layers of a Gemma 2 of 27B under a vocabulary of 256,000, on cards of several sizes."""
    spec, workload = (
        gpt(num_layers=4, hidden_size=4608, vocab_size=256_000, tied=True),
        replace(WORKLOAD, num_micro_batches=1),
    )
    of = replace(
        problem_by_chance(random.Random(0)),
        spec=spec,
        workload=workload,
        profile=estimated(spec, workload),
        hardware=machine(),
        decisions=Decisions(holds_gradients=False, num_slots=2, host_limit_bytes=200 * GIB),
    )
    held = []
    for gib in (8, 12, 14, 24):
        chosen = weigh(deciding(of, device_limit_bytes=gib * GIB))
        assert chosen.problem.gpu_holds_head == chosen.best.placement.gpu_holds_head
        assert chosen.best.memory.device <= gib * GIB
        held.append(chosen.best.placement.gpu_holds_head)
    assert held == sorted(held) and held[0] is False and held[-1] is True
    without = replace(of, gpu_holds_head=False)
    assert (
        weigh(deciding(without, device_limit_bytes=8 * GIB)).best.memory.total > weigh(of).best.memory.total - 12 * GIB
    )
    with pytest.raises(DoesNotFit, match="RAM"):  # where the GPU cannot have the sums
        weigh(deciding(of, device_limit_bytes=8 * GIB, host_limit_bytes=6 * GIB))
