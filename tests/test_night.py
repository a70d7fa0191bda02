"""The parts of the nightly tier, the order of files, and what begins too late."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import xxhash

from tests.collecting import QuickCollection
from tests.night import NUM_PARTS, TimeLimit, by_file, part, pin, pinned

NIGHT = xxhash.xxh3_64_intdigest(b"tests/test_it.py::test_it[c]") % NUM_PARTS
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


def test_what_begins_too_late_is_skipped(request: pytest.FixtureRequest) -> None:
    """The short tier never is."""
    item = request.node
    TimeLimit(-1.0).pytest_runtest_setup(item)
    for tier in ("full", "nightly"):
        item.own_markers[:] = [getattr(pytest.mark, tier).mark]
        TimeLimit(3600.0).pytest_runtest_setup(item)
        with pytest.raises(pytest.skip.Exception, match="no time"):
            TimeLimit(-1.0).pytest_runtest_setup(item)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(3))
def test_a_case_that_waits_for_the_night(number: int) -> None:
    assert number in range(3)


@pytest.mark.parametrize(
    ("tiers", "argument", "night", "found"),
    [
        ("not full and not nightly", "tests", None, ["a", "b", "pinned"]),
        ("full and not nightly", "tests/test_it.py::test_it", None, ["a", "b", "pinned"]),
        ("not nightly", "tests/test_it.py::test_it[c]", None, ["a", "b", "c", "pinned"]),
        ("", "tests", None, ["a", "b", "c", "pinned"]),
        ("nightly", "tests", None, ["a", "b", "c", "pinned"]),
        ("nightly", "tests", NIGHT, ["c"]),
    ],
)
def test_a_session_makes_no_cases_that_it_leaves_out(
    tiers: str, argument: str, night: int | None, found: list[str]
) -> None:
    """A case that is pinned, or named, is made at any time, and so is the only one of a test."""
    marks = {"a": (), "b": (pytest.mark.full,), "c": (pytest.mark.nightly,), "pinned": (pytest.mark.nightly,)}
    calls = [SimpleNamespace(id=name, marks=[each.mark for each in of_case]) for name, of_case in marks.items()]
    test = SimpleNamespace(
        config=SimpleNamespace(
            option=SimpleNamespace(markexpr=tiers), args=[argument], getoption={"night": night}.__getitem__
        ),
        definition=SimpleNamespace(nodeid="tests/test_it.py::test_it"),
        _calls=calls,
    )
    quick = QuickCollection(frozenset({"tests/test_it.py::test_it[pinned]"}))
    quick.pytest_generate_tests(test)  # type: ignore[arg-type]
    assert [each.id for each in test._calls] == found
    test._calls = calls[2:3]
    quick.pytest_generate_tests(test)  # type: ignore[arg-type]
    assert [each.id for each in test._calls] == ["c"]


def test_a_case_that_failed_is_in_the_full_tier(request: pytest.FixtureRequest) -> None:
    item = request.node
    item.add_marker("nightly")
    pin([item], frozenset({"another"}))
    assert {"nightly"} <= {mark.name for mark in item.iter_markers()}
    pin([item], frozenset({item.nodeid}))
    assert {mark.name for mark in item.iter_markers()} == {"full"}


def test_cases_that_are_pinned_have_names() -> None:
    assert all(name.startswith("tests/") and "::" in name for name in pinned())
