"""What must run again, against the definition: an operator runs if a value that is needed depends on it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given

from ratel_cli.planning.profile.liveness import Decision, Liveness, decide
from tests.planning.shapes import SEEDS
from tests.tiers import examples

EXEC, SWAP, DEAD = Decision.EXEC, Decision.SWAP, Decision.DEAD


@dataclass(frozen=True)
class Operator:
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    is_needed: bool = False
    can_be_skipped: bool = True


def by_chance(choice: random.Random) -> list[Operator]:
    """Fresh outputs, views, which write nothing, and mutations, which write what they read."""
    storages, operators = [0, 1], []
    for _ in range(choice.randint(1, 12)):
        reads = tuple(choice.sample(storages, choice.randint(0, min(3, len(storages)))))
        kind = choice.choice(["fresh", "fresh", "fresh", "view", "mutation"])
        writes: tuple[int, ...] = ()
        if kind == "fresh":
            writes = tuple(len(storages) + number for number in range(choice.randint(1, 2)))
            storages += writes
        elif kind == "mutation":
            writes = reads
        is_needed = kind == "fresh" and choice.random() < 0.1
        operators.append(Operator(reads, writes, is_needed, can_be_skipped=kind == "fresh" and not is_needed))
    return operators


def wanted_of(operators: list[Operator], position: int, saved: set[int], swapped: set[int]) -> bool:
    """By the definition, forwards: it is needed itself, it wrote what is saved, or what someone later needs to run."""
    operator = operators[position]
    if operator.is_needed or saved & set(operator.writes):
        return True
    return any(
        set(operators[later].reads) & set(operator.writes)
        and not (later in swapped and operators[later].can_be_skipped)
        and wanted_of(operators, later, saved, swapped)
        for later in range(position + 1, len(operators))
    )


@examples(300)
@given(seed=SEEDS)
def test_an_operator_runs_if_and_only_if_its_value_is_needed(seed: int) -> None:
    choice = random.Random(seed)
    operators = by_chance(choice)
    storages = sorted({0, 1, *(number for operator in operators for number in operator.writes)})
    saved = set(choice.sample(storages, choice.randint(0, len(storages))))
    swapped = {position for position in range(len(operators)) if choice.random() < choice.choice([0, 0.2, 0.8])}
    expected = []
    for position, operator in enumerate(operators):
        is_wanted = wanted_of(operators, position, saved, swapped)
        if not operator.can_be_skipped:
            expected.append(EXEC)
        elif not is_wanted:
            expected.append(DEAD)
        else:
            expected.append(SWAP if position in swapped else EXEC)
    assert decide(operators, saved, swapped) == expected


def chain(length: int) -> list[Operator]:
    return [Operator(reads=(number,), writes=(number + 1,)) for number in range(length)]


def test_a_swapped_output_hides_those_that_made_it() -> None:
    assert decide([], saved=[1]) == []
    assert decide(chain(4), saved=[4], swapped=[1]) == [DEAD, SWAP, EXEC, EXEC]
    assert decide(chain(4), saved=[1, 4], swapped=[1]) == [EXEC, SWAP, EXEC, EXEC]


@examples(300)
@given(seed=SEEDS)
def test_swaps_one_by_one_are_swaps_at_once(seed: int) -> None:
    """What each swap frees, and what runs after it, is what a decision about all swaps says."""
    choice = random.Random(seed)
    operators = by_chance(choice)
    saved = {storage for operator in operators for storage in operator.writes if choice.random() < 0.3}
    liveness, swapped = Liveness(operators, saved), set[int]()

    def wanted() -> set[int]:
        return {position for position in range(len(operators)) if wanted_of(operators, position, saved, swapped)}

    skippable = [position for position, operator in enumerate(operators) if operator.can_be_skipped]
    for position in choice.sample(skippable, len(skippable)):
        before = wanted()
        assert liveness.is_run(position) == (position in before)
        if position not in before:
            continue
        freed = liveness.freed_by(position)
        liveness.swap(position)
        swapped.add(position)
        assert sorted(freed) == sorted(before - wanted())
        for each in range(len(operators)):
            assert liveness.is_run(each) == (each in wanted() - swapped)


def test_of_two_that_a_swap_frees_neither_reads_for_the_other() -> None:
    """In any order in which their outputs are read, so in any order in which they are followed."""
    for first, second in ((1, 2), (2, 1)):
        readers = [Operator(reads=(0,), writes=(first,)), Operator(reads=(0,), writes=(second,))]
        operators = [Operator(writes=(0,)), *readers, Operator(reads=(1, 2), writes=(3,))]
        assert sorted(Liveness(operators, saved=[3]).freed_by(3)) == [0, 1, 2]


def test_thousands_of_operators_are_swapped_at_once() -> None:
    """Each reads the one before, and all read one storage."""
    number = 20_000
    operators = [Operator((0, position), (position + 1,)) for position in range(number)]
    liveness = Liveness(operators, range(1, number + 1, 2))
    freed = 0
    for position in range(number - 1, -1, -1):
        if liveness.is_run(position):
            freed += len(liveness.freed_by(position))
            liveness.swap(position)
    assert freed == number // 2 - 1
    assert not any(map(liveness.is_run, range(number)))
