"""What the demo's data is made of. That the demo runs is for `make demo` to show."""

from __future__ import annotations

import pytest

from scripts.make_demo import ANSWER_CHARACTERS, beginning, questions_and_answers


def test_questions_are_distinct_and_answers_are_there() -> None:
    rows = list(questions_and_answers())
    assert len(rows) > 50
    assert len({question for question, _ in rows}) == len(rows)
    assert all(answer and answer == answer.rstrip() for _, answer in rows)
    assert "What is lambda?" in {question for question, _ in rows}
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
