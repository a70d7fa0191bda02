"""Rows of answers that are compared: which prompt they have, which tokens, and what is not used."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ratel_cli.data.sources.formats import RowFormat, decide_format
from ratel_cli.data.text.drafts import ChatDraft, ComparedDraft, TextDraft, Unusable
from ratel_cli.data.text.rows import Compares, DatasetSource
from ratel_cli.errors import BadInput
from tests.data.conftest import Load, MakeTokenizer, WriteRows
from tests.trl_oracle import prepared

Row = Mapping[str, object]
Turn = dict[str, object]


def said(role: str, text: str, **more: object) -> Turn:
    return {"role": role, "content": text, **more}


S, Q, A, C, GOOD, BAD = (
    said("system", "be kind"), said("user", "q"), said("assistant", "a"), said("user", "c"),
    said("assistant", "good"), said("assistant", "bad"),
)  # fmt: skip


def format_of(row: Row, compares: Compares = "pairs", **keys: object) -> RowFormat:
    source = DatasetSource(path="p", compares=compares, **keys)  # type: ignore[arg-type]
    return decide_format(source, dict(row), has_chat_template=True)


def drafted(row: Row, compares: Compares = "pairs", **keys: object) -> ComparedDraft:
    found = format_of(row, compares, **keys).draft(dict(row))
    assert isinstance(found, ComparedDraft)
    return found


def chats_of(row: Row, compares: Compares = "pairs", **keys: object) -> list[tuple[list[Turn], int | None]]:
    answers = drafted(row, compares, **keys).answers
    assert all(isinstance(each, ChatDraft) for each in answers)
    return [(each.messages, each.completion_from) for each in answers if isinstance(each, ChatDraft)]


def texts_of(row: Row, compares: Compares = "pairs", **keys: object) -> list[tuple[str, str]]:
    answers = drafted(row, compares, **keys).answers
    assert all(isinstance(each, TextDraft) for each in answers)
    return [(each.prompt, each.answer) for each in answers if isinstance(each, TextDraft)]


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": [S, C], "chosen": [C, GOOD], "rejected": [C, BAD]}, [S, C], [GOOD], [BAD]),
        ({"prompt": [Q], "chosen": [GOOD], "rejected": [Q, BAD]}, [Q], [GOOD], [BAD]),
        ({"prompt": [Q, A, C], "chosen": [A, C, GOOD], "rejected": [Q, A, C, BAD]}, [Q, A, C], [GOOD], [BAD]),
        ({"prompt": "q", "chosen": [S, Q, GOOD], "rejected": [S, Q, BAD]}, [S, Q], [GOOD], [BAD]),
        ({"prompt": "q", "chosen": [Q, A, C, GOOD], "rejected": [Q, A, C, BAD]}, [Q, A, C], [GOOD], [BAD]),
        ({"prompt": [Q], "chosen": [A, C, GOOD], "rejected": [BAD]}, [Q], [A, C, GOOD], [BAD]),
        ({"chosen": [Q, A], "rejected": [Q, A, C, BAD]}, [Q], [A], [A, C, BAD]),
        ({"chosen": [Q, GOOD], "rejected": [Q, GOOD]}, [Q], [GOOD], [GOOD]),
        (
            {"chosen": [{**Q, "id": 1}, GOOD], "rejected": [{**Q, "id": 2}, BAD]},
            [{**Q, "id": 1}], [GOOD], [BAD],
        ),
    ],
)  # fmt: skip
def test_the_prompt_comes_once(row: Row, prompt: list[Turn], chosen: list[Turn], rejected: list[Turn]) -> None:
    """Whether the answers have it, or the end of it, or more before it, or not at all."""
    assert chats_of(row) == [(prompt + chosen, len(prompt)), (prompt + rejected, len(prompt))]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [S, Q, A], "chosen": [C, GOOD], "rejected": [C, BAD]}, "'chosen' begins with a user turn that"),
        ({"prompt": "what?", "chosen": [C, GOOD], "rejected": [C, BAD]}, "'chosen' begins with a user turn that"),
        ({"prompt": [Q], "chosen": [GOOD], "rejected": [C, BAD]}, "'rejected' begins with a user turn that is not in"),
        ({"prompt": [Q], "chosen": [GOOD], "rejected": [S, Q, BAD]}, "the two answers have different prompts"),
        ({"prompt": [Q], "chosen": [S, Q, GOOD], "rejected": [Q, BAD]}, "the two answers have different prompts"),
        ({"prompt": [Q], "chosen": [Q], "rejected": [Q, BAD]}, "there is no answer behind the prompt"),
        ({"prompt": [Q, A], "chosen": [GOOD], "rejected": [BAD]}, "the prompt ends with an assistant turn"),
        ({"chosen": [Q, GOOD], "rejected": [C, BAD]}, "there is no prompt: the two answers have no"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "there is no prompt: the two answers have no common beginning"),
        ({"chosen": "abc", "rejected": "xyz"}, "there is no prompt: the two answers have no common beginning"),
        ({"chosen": "", "rejected": "xyz"}, "there is no prompt: the two answers have no common beginning"),
        ({"prompt": "", "chosen": "abc", "rejected": "xyz"}, "there is no prompt: 'prompt' is empty"),
    ],
)  # fmt: skip
def test_pairs_without_one_prompt_cannot_be_used(row: Row, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        drafted(row)


def test_what_says_something_else_is_no_part_of_the_prompt() -> None:
    """A call of a tool counts, as words do."""
    call = {**A, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(Unusable, match="the prompt ends with an assistant turn"):
        drafted({"prompt": [Q], "chosen": [Q, A, GOOD], "rejected": [Q, A, BAD]})
    assert [at for _, at in chats_of({"prompt": [Q], "chosen": [Q, A, GOOD], "rejected": [Q, call, BAD]})] == [1, 1]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": [Q, A, C, GOOD], "label": True}, [Q, A, C, GOOD]),
        ({"prompt": "q", "completion": [S, Q, GOOD], "label": True}, [S, Q, GOOD]),
        ({"prompt": [S, Q], "completion": [Q, GOOD], "label": True}, [S, Q, GOOD]),
    ],
)
def test_prompts_of_verdicts(row: Row, turns: list[Turn]) -> None:
    assert chats_of(row, "verdicts") == [(turns, len(turns) - 1)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [Q, A, C], "label": True}, "there is no answer behind the prompt"),
        ({"messages": [A], "label": True}, "there is no prompt$"),
        ({"prompt": "", "completion": "b", "label": True}, "there is no prompt: 'prompt' is empty"),
    ],
)
def test_verdicts_without_a_prompt_or_an_answer(row: Row, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        drafted(row, "verdicts")


@pytest.mark.parametrize(
    "row", [{"completion": "4", "label": True}, {"input": "2+2?", "completion": "4", "label": True}]
)
def test_texts_with_a_verdict_need_a_column_with_the_prompt(row: Row) -> None:
    with pytest.raises(
        BadInput, match=r"`rl: kto` needs answers that are marked .* but its rows have the col"
    ) as caught:
        format_of(row, "verdicts")
    assert "field_prompt" in str(caught.value.hint)


@pytest.mark.parametrize("compares", ["pairs", "verdicts"])
def test_a_first_row_without_a_prompt(load: Load, write_rows: WriteRows, compares: Compares) -> None:
    """Its column has the prompts of the others; it is a bad row alone."""
    row = {"chosen": " b", "rejected": " c", "completion": " b", "label": True}
    rows = [{"prompt": each, **row} for each in (None, *["a"] * 200)]
    source = DatasetSource(path=str(write_rows(*rows)), compares=compares)
    assert load(source, compares=compares, rejects_path=None).num_samples == 200


@pytest.mark.parametrize("kind", ["auto", "completion"])
def test_further_input_stands_behind_the_instruction(kind: str) -> None:
    row = {"instruction": "i", "input": "x", "chosen": " a", "rejected": " b"}
    assert texts_of(row, type=kind) == [("i\nx", " a"), ("i\nx", " b")]
    found = format_of({"instruction": "i", "chosen": " a", "rejected": " b"}, type=kind)
    [one, _] = found.draft(dict(row)).answers  # type: ignore[union-attr]
    assert isinstance(one, TextDraft) and one.prompt == "i\nx"
    verdict = {"instruction": "i", "input": "x", "completion": " a", "kto_tag": True}
    assert texts_of(verdict, "verdicts", type=kind) == [("i\nx", " a")]
    assert texts_of({**row, "input": ""}, type=kind)[0] == ("i", " a")


@pytest.mark.parametrize("compares", ["pairs", "verdicts"])
def test_history_comes_before_the_instruction(compares: Compares) -> None:
    """As `ratel import` names LLaMA-Factory's columns."""
    row: dict[str, object] = {"instruction": "i", "input": "x", "system": "be kind", "history": [["q", "a"]]}
    row |= {"chosen": "good", "rejected": "bad"} if compares == "pairs" else {"completion": "good", "label": True}
    keys = {"type": "chat_template", "field_system": "system", "field_history": "history"}
    wanted = [S, Q, A, said("user", "i\nx"), GOOD]
    assert chats_of(row, compares, **keys)[0] == (wanted, 4)
    assert chats_of({**row, "history": None, "system": None}, compares, **keys)[0] == (wanted[3:], 1)
    turns = {"prompt": [S, C], **row}
    assert chats_of(turns, compares, **keys)[0] == ([S, Q, A, C, GOOD], 4)
    with pytest.raises(Unusable, match="round 1 of 'history' must be a pair"):
        drafted({**row, "history": [["q"]]}, compares, **keys)


def test_texts_have_no_system_prompt_and_no_history() -> None:
    row = {"prompt": "q", "chosen": " a", "rejected": " b", "system": "be kind", "history": [["q", "a"]]}
    found = drafted(row, field_system="system", field_history="history")
    assert {what.partition(";")[0] for kind, what in found.remarks if kind == "unread"} == {"system", "history"}
    assert drafted({**row, "system": "", "history": []}, field_system="system", field_history="history").remarks == ()
    alone = {key: row[key] for key in ("chosen", "rejected", "system")}
    assert drafted({**alone, "chosen": "q a", "rejected": "q b"}, field_system="system").remarks


IMPLICIT = [
    ("what is a list", "what is a lisp"), ("the quick brown fox", "the quick brow"),
    ("the quick brow", "the quick brown"),
    ("the fox\n\n", "the fox jumps"), ("the lazy dog", "the lazy dog"), ("a  b", "a  c"), ("the", "they jump"),
    ("is it 42", "is it 4"), ("a dog ", "a dog  "), ("over the <|endoftext|>", "over a dog<|endoftext|>"),
]  # fmt: skip


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("pair", IMPLICIT)
def test_a_prompt_that_both_texts_begin_with_has_the_tokens_of_trl(
    load: Load, write_rows: WriteRows, make_tokenizer: MakeTokenizer, pair: tuple[str, str], adds_bos: bool
) -> None:
    """Whole texts are tokenised, and cut where the tokens of the prompt alone end."""
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    row = dict(zip(("chosen", "rejected"), pair, strict=True))
    [wanted] = prepared("dpo", [row], tokenizer, max_length=64)
    source = DatasetSource(path=str(write_rows(row)), compares="pairs")
    [batch] = load(source, compares="pairs", tokenizer=tokenizer, sequence_len=64).step(0)
    assert batch.comparison is not None
    for at, key in enumerate(("chosen_ids", "rejected_ids")):
        ids = [*wanted["prompt_ids"], *wanted[key]]
        assert batch.input_ids[at, : len(ids)].tolist() == ids
        answer = batch.comparison.is_answer[at].nonzero().flatten().tolist()
        first = max(1, len(wanted["prompt_ids"]))
        assert answer == list(range(first - 1, len(ids) - 1))
        assert batch.targets[at, answer].tolist() == ids[first:]
