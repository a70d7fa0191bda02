"""The rule of `storage.wear`: against trying everything, over memory, and what the trade says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given

from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.search.choose import weigh
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.evaluation import Evaluation
from ratel_cli.planning.search.plan import make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.recorded_plan import plan_json
from ratel_cli.planning.time.wear import WearPolicy
from ratel_cli.schedule.rules import FROZEN
from ratel_cli.units import GIB
from tests.planning.forecasters import paper_machine
from tests.planning.profiles import estimated
from tests.planning.shapes import SEEDS, gpt
from tests.planning.test_choose import (
    AS_GOOD,
    deciding,
    depth,
    every_choice,
    least_bytes,
    problem,
    problem_by_chance,
)
from tests.tiers import examples, rotating

POLICIES: tuple[WearPolicy, ...] = ("save", "balanced", "ignore")


def state_bytes(of: Problem) -> int:
    """What is written where everything has memory."""
    return deciding(of, host_limit_bytes=1 << 50).evaluate(Placement()).traffic.written_bytes


def excess(of: Problem, choice: Evaluation) -> int:
    return choice.traffic.written_bytes - state_bytes(of)


def price_of_byte(of: Problem, save: Evaluation) -> float:
    """Seconds for a byte of excess: half a step's for what AdamW would write if nothing were frozen."""
    frozen = sum(block.num_parameters for block in of.spec.blocks if not block.is_trained)
    return 0.5 * save.time.total / (state_bytes(of) + -(-frozen * 2 // 4096) * 4096 * 6)


def mostly_frozen(of: Problem) -> Problem:
    """The problem, with the first layer trained alone: backward goes all the way."""
    trained = of.spec.layers[0].index
    blocks = tuple(each if each.segment == trained else replace(each, rule=FROZEN) for each in of.spec.blocks)
    spec = replace(of.spec, blocks=blocks)
    return replace(of, spec=spec, profile=estimated(spec, of.workload))


def tight_problems(choice: random.Random, number: int, *, is_frozen: bool = False) -> Iterator[Problem]:
    """Small models and any machine, with just enough memory, a little more, and more; drives that are not slow, so that
    spilling often gains. `is_frozen`: all but the first layer is."""
    of = problem_by_chance(choice)
    nvme, device = of.hardware.nvme, of.hardware.gpu
    hardware = replace(
        of.hardware,
        nvme=replace(nvme, write_bytes_per_second=2e10, mixed_bytes_per_second=2e10),
        gpu=replace(device, flops_per_second=10 ** choice.uniform(9, 11.5)),
    )
    of = replace(of, hardware=hardware)
    of = mostly_frozen(of) if is_frozen else of
    least, most = least_bytes(of), weigh(of).best.memory.total
    for share in (0.0, *(choice.random() ** 2 for _ in range(number - 1))):
        yield deciding(of, host_limit_bytes=least + int(share * max(0, most - least)))


def large(*, num_layers: int, wear: WearPolicy, holds_gradients: bool) -> Problem:
    """Layers of the papers' 70B, 64k tokens a step, on an RTX 4090 with two drives."""
    spec = gpt(num_layers=num_layers, hidden_size=8192, vocab_size=50_257)
    workload = Workload(micro_batch_size=16, num_micro_batches=4, sequence_len=1024)
    decisions = Decisions(
        holds_gradients=holds_gradients, num_slots=2, host_limit_bytes=0, wear=wear, device_limit_bytes=24 * GIB
    )
    return replace(
        problem(),
        spec=spec,
        workload=workload,
        profile=estimated(spec, workload),
        hardware=paper_machine("paper-4090-2ssd"),
        decisions=decisions,
    )


@pytest.mark.full
@examples(32)
@given(seed=SEEDS)
def test_every_rule_finds_the_best_of_all_levels_and_prefixes(seed: int) -> None:
    """`save`: the fewest bytes, then the least time. `balanced`: the least sum of time and half a percent of it for
    each percent of written bytes. `ignore`: the least time."""
    for of in (
        *tight_problems(random.Random(seed), 2),
        *tight_problems(random.Random(seed), 2, is_frozen=True),
    ):
        save, balanced, ignore = (weigh(deciding(of, wear=policy)).best for policy in POLICIES)
        price = price_of_byte(of, save)
        everything = [list(every_choice(of, each)) for each in (save, balanced, ignore)]
        fewest = min(each.traffic.written_bytes for each in everything[0])
        assert save.traffic.written_bytes == fewest
        best = min(each.time.total for each in everything[0] if each.traffic.written_bytes == fewest)
        assert save.time.total <= AS_GOOD * best * (1 + 1e-12)
        best = min(each.time.total + price * excess(of, each) for each in everything[1])
        assert balanced.time.total + price * excess(of, balanced) <= AS_GOOD * best * (1 + 1e-12)
        best = min(each.time.total for each in everything[2])
        assert ignore.time.total <= AS_GOOD * best * (1 + 1e-12)


@pytest.mark.full
@examples(40)
@given(seed=SEEDS)
def test_a_percent_of_written_bytes_buys_half_a_percent_of_time(seed: int) -> None:
    """Of what `balanced` writes over `save`, and of what `ignore` would write over `balanced` it is less."""
    for of in tight_problems(random.Random(seed), 3):
        save, balanced, ignore = (weigh(deciding(of, wear=policy)).best for policy in POLICIES)
        assert excess(of, save) <= excess(of, balanced)
        written = [excess(of, each) / state_bytes(of) for each in (save, balanced, ignore)]
        time = [each.time.total / save.time.total for each in (save, balanced, ignore)]
        assert time[0] - time[1] >= 0.5 * (written[1] - written[0]) - 1e-9
        assert time[1] - time[2] <= 0.5 * (written[2] - written[1]) + 1e-9


@pytest.mark.full
@pytest.mark.parametrize("wear", POLICIES)
@examples(12)
@given(seed=SEEDS)
def test_more_memory_never_costs_more_under_any_rule(seed: int, wear: WearPolicy) -> None:
    """At one depth, but for the allowances: half a percent for a higher level, 2 % for deferral."""
    choice = random.Random(seed)
    least: dict[tuple[int, int, bool], tuple[int, float]] = {}
    for of in sorted(tight_problems(choice, 10), key=lambda of: of.decisions.host_limit_bytes):
        found = weigh(deciding(of, wear=wear))
        chosen, price = found.best, 0.5 * found.sparing.time.total / state_bytes(of)
        written, seconds = (excess(of, chosen) if wear == "save" else 0), chosen.time.total
        if wear == "balanced":
            seconds += price * excess(of, chosen)
        at = *depth(chosen), chosen.spilled_segments > 0
        before = least.get(at, (written, seconds))
        assert written <= before[0]
        if written == before[0]:
            assert seconds <= AS_GOOD * before[1] / 0.98
        least[at] = min(before, (written, seconds))


@pytest.mark.parametrize(("wear", "holds_gradients"), rotating(POLICIES, [False, True], full_pairs=True))
@pytest.mark.parametrize("num_layers", [8, pytest.param(80, marks=pytest.mark.nightly)])
def test_a_large_model_gets_no_slower_with_more_memory(
    num_layers: int, wear: WearPolicy, holds_gradients: bool
) -> None:
    """The papers' 70B, or a tenth of it, on two drives. Whatever the rule, no limit is a cliff."""
    of = large(num_layers=num_layers, wear=wear, holds_gradients=holds_gradients)
    fastest, excesses = inf, set()
    for limit_gib in range(4 * num_layers, 12 * num_layers, num_layers):
        chosen = weigh(deciding(of, host_limit_bytes=limit_gib * GIB)).best
        assert chosen.time.total <= 1.02 * fastest
        fastest = min(fastest, chosen.time.total)
        excesses.add(excess(of, chosen))
    assert 0 in excesses or wear == "ignore"
    assert wear != "save" or excesses == {0}


def test_frozen_parameters_leave_a_byte_its_price() -> None:
    """Offloading that gains enough in a full run gains enough where little is trained: the state is not its measure."""
    of = deciding(large(num_layers=8, wear="balanced", holds_gradients=False), host_limit_bytes=9 * GIB)
    of = replace(of, workload=Workload(micro_batch_size=2, num_micro_batches=16, sequence_len=1024))
    of = mostly_frozen(replace(of, hardware=replace(of.hardware, gpu=replace(of.hardware.gpu, flops_per_second=1e13))))
    found = weigh(of)
    assert excess(of, found.sparing) == 0 < excess(of, found.best)
    gained = 1 - found.best.time.total / found.sparing.time.total
    assert gained > excess(of, found.best) * price_of_byte(of, found.sparing) / found.sparing.time.total
    assert gained < 0.5 * excess(of, found.best) / state_bytes(of), "by the state alone it is not worth it"


@pytest.mark.full
def test_a_plan_and_a_forecast_say_what_was_chosen_among() -> None:
    """Slow computing, so that spilling much gains something: less than half as much, in percent, as it writes."""
    of = deciding(large(num_layers=8, wear="balanced", holds_gradients=False), host_limit_bytes=48 * GIB)
    of = replace(of, hardware=replace(of.hardware, gpu=replace(of.hardware.gpu, flops_per_second=1e13)))
    plan, found = make_plan(of), weigh(of)
    trade = plan.wear
    assert trade is not None
    assert trade.policy == "balanced"
    assert trade.state_written_bytes == state_bytes(of) == found.sparing.traffic.written_bytes
    assert (trade.seconds, trade.written_bytes) == (plan.time.total, plan.traffic.written_bytes)
    assert (trade.save_seconds, trade.ignore_seconds) == (found.sparing.time.total, found.fastest.time.total)
    assert trade.state_written_bytes <= trade.written_bytes < trade.ignore_written_bytes
    assert trade.ignore_seconds < trade.seconds
    wear = plan_json(plan)["wear"]
    assert wear == {"tb_written_per_step": trade.written_bytes / 1e12, "trade": trade.to_json()}
    roomy = make_plan(deciding(of, host_limit_bytes=1 << 40))
    assert roomy.wear is None
    assert plan_json(roomy)["wear"] == {"tb_written_per_step": state_bytes(of) / 1e12, "trade": None}


@pytest.mark.full
def test_the_extremes_are_the_same_under_every_rule() -> None:
    for seed in range(20):
        for of in tight_problems(random.Random(seed), 2):
            choices = [weigh(deciding(of, wear=policy)) for policy in POLICIES]
            assert len({(each.sparing.time, each.fastest.time) for each in choices}) == 1
            assert (choices[0].best.time, choices[2].best.time) == (choices[0].sparing.time, choices[0].fastest.time)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_written_in_addition_never_makes_a_step_slower(policy: WearPolicy) -> None:
    """Levels within half a percent count as equal, and the highest one is taken: it may be slower than a choice that
    writes less. 24 x 1024 tokens of 70B on two drives are such a case."""
    spec = gpt(num_layers=80, hidden_size=8192, vocab_size=50_257)
    for rows in (16, 24, 32):
        workload = Workload(micro_batch_size=8, num_micro_batches=rows // 8, sequence_len=1024)
        of = replace(
            large(num_layers=80, wear=policy, holds_gradients=True),
            spec=spec,
            workload=workload,
            profile=estimated(spec, workload),
        )
        choice = weigh(deciding(of, host_limit_bytes=760 * GIB))
        assert choice.fastest.time.total <= choice.sparing.time.total
        gained = choice.best.traffic.written_bytes > choice.sparing.traffic.written_bytes
        assert not gained or choice.best.time.total < choice.sparing.time.total
