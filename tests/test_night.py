"""The parts of the nightly tier, the order of files, and what begins too late."""

from __future__ import annotations

import itertools

import pytest

from tests.night import NUM_PARTS, TimeLimit, by_file, part, pin, pinned

NAMES = [f"tests/test_{number % 7}.py::test_it[{number}]" for number in range(600)]


def test_thirty_parts_are_all_of_it() -> None:
    parts = [part(NAMES, number) for number in range(41, 41 + NUM_PARTS)]
    assert sorted(name for each in parts for name in each) == sorted(NAMES)
    assert min(map(len, parts)) > 0
    again, later = part(NAMES[::-1], 41), part(NAMES, 41 + NUM_PARTS)
    assert again == parts[0], "whatever the order in which cases are found"
    assert sorted(later) == sorted(again) and later != again, "another order, where there is not time for all"


def test_each_number_has_another_order_of_files() -> None:
    orders = [by_file(NAMES, number) for number in range(40)]
    for each in orders:
        assert sorted(each) == sorted(NAMES)
        files = [name.partition("::")[0] for name in each]
        assert sum(one != other for one, other in itertools.pairwise(files)) == 6, "the cases of a file stay together"
        assert [name for name in each if "test_3.py" in name] == [name for name in NAMES if "test_3.py" in name]
    assert {each[-1] for each in orders} == set(NAMES[-7:]), "each file is the last one at some time"


def test_what_begins_too_late_is_skipped() -> None:
    TimeLimit(3600.0).pytest_runtest_setup()
    with pytest.raises(pytest.skip.Exception, match="no time"):
        TimeLimit(-1.0).pytest_runtest_setup()


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(3))
def test_a_case_that_waits_for_the_night(number: int) -> None:
    assert number in range(3)


def test_a_case_that_failed_is_in_the_full_tier(request: pytest.FixtureRequest) -> None:
    item = request.node
    item.add_marker("nightly")
    pin([item], frozenset({"another"}))
    assert {"nightly"} <= {mark.name for mark in item.iter_markers()}
    pin([item], frozenset({item.nodeid}))
    assert {mark.name for mark in item.iter_markers()} == {"full"}


def test_cases_that_are_pinned_have_names() -> None:
    assert all(name.startswith("tests/") and "::" in name for name in pinned())
