"""What the demo's data is made of. That it runs is shown by tests/e2e/test_demo.py, and by `make demo`."""

from __future__ import annotations

import pytest

from ratel_cli.cli.demo import QUESTION
from ratel_cli.run.start.demo import ANSWER_CHARACTERS, beginning, questions_and_answers


def test_questions_are_distinct_and_answers_are_there() -> None:
    rows = list(questions_and_answers())
    assert len(rows) > 50
    assert len({question for question, _ in rows}) == len(rows)
    assert all(answer and answer == answer.rstrip() for _, answer in rows)
    assert QUESTION in {question for question, _ in rows}
    assert rows == list(questions_and_answers())


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ("one", "one"),
        ("Title\n*****\n\none\n\ntwo", "one\n\ntwo"),
        ("Title\n=====\n\none", "one"),
        ("not a title\n\ntwo", "not a title\n\ntwo"),
        ("a" * (ANSWER_CHARACTERS + 1) + "\n\ntwo", "a" * (ANSWER_CHARACTERS + 1)),
        ("a" * (ANSWER_CHARACTERS - 3) + "\n\ntwo\n\nthree", "a" * (ANSWER_CHARACTERS - 3) + "\n\ntwo"),
        ("a" * (ANSWER_CHARACTERS - 2) + "\n\ntwo", "a" * (ANSWER_CHARACTERS - 2)),
    ],
)
def test_the_beginning_is_whole_paragraphs(text: str, begun: str) -> None:
    assert beginning(text) == begun
