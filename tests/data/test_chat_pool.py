"""Several processes that render conversations: the same answers and errors as with one, and an end at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ratel_cli.data.sources.ingest import ahead
from ratel_cli.data.text.chat import ChatRenderer, RenderedChat
from ratel_cli.data.text.chat_pool import ChatPool
from ratel_cli.data.text.drafts import ChatDraft, Unusable
from ratel_cli.errors import BadInput, EnvironmentFailure
from tests.data.test_chat import PLAIN, _turns, children_of_all_threads

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'bad' %}{{ raise_exception('no ' + messages[1].content) }}{% endif %}"
    "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% endif %}" + PLAIN
)


@pytest.fixture(autouse=True, scope="module")
def _chat_children() -> None:
    """The children start as in a run: no forks."""


@pytest.fixture(autouse=True)
def children() -> Iterator[Callable[[], int]]:
    """How many children there are more than before the test; none afterwards."""
    before = children_of_all_threads()
    yield lambda: len(children_of_all_threads() - before)
    assert children_of_all_threads() == before


def _pool(*, most: int, alone: int = 0, **options: object) -> ChatPool:
    begin = partial(ChatRenderer, TEMPLATE, {}, **options)  # type: ignore[arg-type]
    return ChatPool(begin, most=most, alone=alone, notice=lambda text: None)


def _drafts(*first: str) -> list[ChatDraft]:
    return [ChatDraft(messages=_turns(text, f"answer {number}"), tools=None) for number, text in enumerate(first)]


def _asked(pool: ChatPool, *first: str) -> list[tuple[object, ...]]:
    answers = pool.start(_drafts(*first), locate=lambda draft: True).answers()
    return [(each.text, each.spans) if isinstance(each, RenderedChat) else (str(each),) for each in answers]


def test_answers_are_those_of_one_child_in_order(children: Callable[[], int]) -> None:
    first = ["bad" if number % 7 == 3 else f"question {number}" for number in range(107)]
    with _pool(most=1) as pool:
        expected = _asked(pool, *first)
        assert children() == 1
    assert [len(each) for each in expected[:5]] == [2, 2, 2, 1, 2]
    assert "no answer 3" in str(expected[3][0]) and "answer 106" in str(expected[106][0])
    with _pool(most=3) as pool:
        renderings = [pool.start(_drafts(*first), locate=lambda draft: True) for _ in range(2)]
        assert _asked(pool, *first) == expected
        assert children() == 3
        for rendering in renderings:
            assert [str(each) for each in rendering.answers() if isinstance(each, Unusable)] == [
                str(each[0]) for each in expected if len(each) == 1
            ]


@pytest.mark.full
def test_small_data_has_one_child(children: Callable[[], int]) -> None:
    with _pool(most=4, alone=70) as pool:
        assert _asked(pool) == []
        _asked(pool, *["x"] * 70)
        assert children() == 1
        _asked(pool, *["x"] * 70)
        assert children() > 1


@pytest.mark.full
def test_an_endless_template_ends_all(children: Callable[[], int]) -> None:
    with _pool(most=2, limit_seconds=0.3) as pool:
        first = pool.start(_drafts(*["x"] * 40, "endless", *["x"] * 40), locate=lambda draft: False)
        for rendering in (first, pool.start(_drafts("endless", "x"), locate=lambda draft: False)):
            with pytest.raises(BadInput, match=r"did not finish one conversation within 0\.3 s"):
                rendering.answers()
    assert children() == 0


def test_it_is_closed_in_the_middle_of_templates(children: Callable[[], int]) -> None:
    """Also while further children start."""
    pool = _pool(most=3, limit_seconds=3600)
    pool.start(_drafts(*["endless"] * 200), locate=lambda draft: False)
    deadline = time.monotonic() + 60
    while children() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.close()
    pool.close()
    assert children() == 0


@pytest.mark.full
def test_children_that_do_not_start(children: Callable[[], int]) -> None:
    """Without the first nothing is rendered; without the others the first does the work."""
    with pytest.raises(EnvironmentFailure, match="did not start"):
        _pool(most=2, limit_bytes=1 << 80)
    numbers = iter(range(9))

    def begin(**options: object) -> ChatRenderer:
        return ChatRenderer(PLAIN, {}, limit_bytes=1 << (31 if next(numbers) == 0 else 80), **options)  # type: ignore[arg-type]

    with ChatPool(begin, most=3, alone=0, notice=print) as pool:
        assert len(_asked(pool, *["x"] * 300)) == 300
        assert children() == 1 and next(numbers) > 1


@pytest.mark.full
def test_a_slow_template_is_told_once() -> None:
    told: list[str] = []
    slow = PLAIN + "{% for i in range(30) %}{% for j in range(2000) %}{% endfor %}{% endfor %}"
    begin = partial(ChatRenderer, slow, {}, limit_seconds=60, slow_seconds=0.001)
    with ChatPool(begin, most=2, alone=0, notice=told.append) as pool:
        _asked(pool, *["x"] * 40)
    assert len(told) == 1 and "takes long for one conversation" in told[0]


@pytest.mark.parametrize("number", [0, 1, 2, 9])
def test_groups_beginahead_and_an_error_comes_in_its_place(number: int) -> None:
    begun: list[int] = []

    def groups() -> Iterator[int]:
        for each in range(5):
            begun.append(each)
            yield each
        raise BadInput("behind the last")

    finished: list[tuple[int, int]] = []
    with pytest.raises(BadInput, match="behind the last"):
        finished.extend((each, len(begun)) for each in ahead(groups(), number))
    assert finished == [(each, min(5, each + number + 1)) for each in range(5)]
