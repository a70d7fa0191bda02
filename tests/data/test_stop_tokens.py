"""Stop tokens: which of them answers teach, what is told about those that teach none, and what a cache knows of it.

The expected samples are written out, with the part that has loss in brackets, and counted by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.files.remarks import sentences
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.text.drafts import ChatDraft, Unusable
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.data.text.tokenizer import Tokenizer
from ratel_cli.json_fields import hash_of
from tests.data.conftest import Load, WriteRows
from tests.data.test_thinking import MARKS, ChatMessage, chat, check, tokenizer_of

_WORDS = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|channel|>{{ c.function.arguments }}{% endfor %}"
# The next header ends a turn: `<|user|>` after an answer, `<|channel|>` after a call.
NEXT = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|stop|>{% else %}<|{{ 'bot' if m.role == 'assistant' else 'user' "
    "}}|>{% endif %}{{ '\n' }}" + _WORDS + "{% endfor %}{% if add_generation_prompt %}<|bot|>\n{% endif %}"
)
ENDS = (
    "{% for m in messages %}<|{{ 'bot' if m.role == 'assistant' else 'user' }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>\n{% endif %}"
)
OPEN = ENDS.replace("<|end|>\n", "\n")
TAGGED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n{% else %}<|bot|>\n"
    "{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n{% endif %}{% endfor %}"
)
TWO = chat("q", "a", "r", "b")
U, B, E = "<|user|>\n", "<|bot|>\n", "<|end|>"


def _tokenizer(template: object, *, eos: str | None = "</think>") -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of("")
    tokenizer.chat_template = cast(str, template)
    tokenizer.eos_token = eos  # type: ignore[assignment]
    return tokenizer


def _encoded(
    template: object, draft: ChatDraft, *stops: str, eos: str | None = "</think>", is_whole: bool = False
) -> Encoded | Unusable:
    stop_ids = [MARKS.index(stop) for stop in stops]
    tokenizer = cast(Tokenizer, _tokenizer(template, eos=eos))
    with SampleEncoder(tokenizer, sequence_len=512, train_on_inputs=is_whole, stop_ids=stop_ids) as encoder:
        return encoder.encode([draft])[0]


def _draft(messages: Sequence[ChatMessage], **others: object) -> ChatDraft:
    return ChatDraft(**{"messages": list(messages), "tools": None, **others})  # type: ignore[arg-type]


def _called(arguments: object) -> ChatDraft:
    call = {"type": "function", "function": {"name": "", "arguments": arguments}}
    return _draft([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}])


def test_a_stop_token_that_is_the_next_header() -> None:
    answer = _encoded(NEXT, _draft(TWO), "<|user|>")
    check(answer, f"{U}q{B}⟦a<|user|>⟧\nr{B}⟦b<|user|>⟧")
    assert cast(Encoded, answer).remarks == ()


@pytest.mark.parametrize(
    ("others", "marked"),
    [
        ({"muted": (3,)}, f"{U}q{B}⟦a<|user|>⟧\nr{B}b<|user|>"),
        ({"completion_from": 3}, f"{U}q{B}a{U}r{B}⟦b<|user|>⟧"),
        ({"trained": (1, 3)}, f"{U}q{B}⟦a<|user|>⟧\nr{B}⟦b<|user|>⟧"),
        ({"trained": (1, 3), "train_on_eos": "last"}, f"{U}q{B}⟦a⟧{U}r{B}⟦b<|user|>⟧"),
        ({"trained": (3,), "train_on_eos": "none"}, f"{U}q{B}a{U}r{B}⟦b⟧<|user|>"),
    ],
)
def test_it_is_the_last_turns_in_every_way_of_masking(others: dict[str, object], marked: str) -> None:
    check(_encoded(NEXT, _draft(TWO, **others), "<|user|>"), marked)


def test_the_stop_token_of_a_call_is_that_before_its_results() -> None:
    answer = _encoded(NEXT, _called(""), "<|stop|>", "<|user|>")
    check(answer, f"{U}q{B}⟦<|channel|><|stop|>⟧")


def test_generation_marks_that_leave_the_stop_token_out() -> None:
    check(_encoded(TAGGED, _draft(TWO), E), f"{U}q{E}\n{B}⟦a{E}⟧\n{U}r{E}\n{B}⟦b{E}⟧\n")


@pytest.mark.parametrize(
    ("template", "others", "is_whole", "remarks"),
    [
        (ENDS, {}, False, (("ends", E),)),
        (ENDS, {"completion_from": 3}, False, (("ends", E),)),
        (ENDS, {}, True, (("ends", E),)),
        (OPEN, {}, False, (("open", ""),)),
        (OPEN, {}, True, (("open", ""),)),
        (ENDS, {"trained": (1, 3)}, False, (("open", ""),)),
        (ENDS, {"trained": (1, 3), "train_on_eos": "none"}, False, ()),
    ],
)
def test_answers_that_teach_no_stop_token_are_told(
    template: str, others: dict[str, object], is_whole: bool, remarks: tuple[tuple[str, str], ...]
) -> None:
    for eos in (None, "</think>"):
        answer = _encoded(template, _draft(TWO, **others), eos=eos, is_whole=is_whole)
        assert isinstance(answer, Encoded) and answer.remarks == remarks
    assert cast(Encoded, _encoded(template.replace(E, E * 2), _draft(TWO, **others), E)).remarks in (
        (),
        (("open", ""),),
    )
    if template == ENDS:
        assert cast(Encoded, _encoded(template, _draft(TWO, **others), E, is_whole=is_whole)).remarks == ()


def test_what_is_said_about_them() -> None:
    ends, is_open = sentences({("ends", E): 2, ("open", ""): 3}, 9)
    assert ends.startswith(f"answers end with {E} in 2 of 9 conversations, at which the model does not stop yet")
    assert is_open.startswith(
        "the answers teach no stop token in 3 of 9 conversations, so the model does not learn where"
    )
    assert "`eot_tokens`" in is_open


def test_rows_with_tools_have_the_template_for_them() -> None:
    named = {"default": ENDS, "tool_use": "{% if tools %}<|stop|>{% endif %}" + ENDS}
    tools: list[object] = [{"type": "function", "function": {"name": "f"}}]
    check(_encoded(named, _draft(TWO), E), f"{U}q{E}\n{B}⟦a{E}\n⟧{U}r{E}\n{B}⟦b{E}\n⟧")
    check(_encoded(named, _draft(TWO, tools=tools), E), f"<|stop|>{U}q{E}\n{B}⟦a{E}\n⟧{U}r{E}\n{B}⟦b{E}\n⟧")


def test_texts_are_parts_where_the_template_reads_parts() -> None:
    parts = ENDS.replace("{{ m.content }}", "{% for part in m.content %}{{ part['text'] }}{% endfor %}")
    check(_encoded(parts, _draft(TWO), E), f"{U}q{E}\n{B}⟦a{E}\n⟧{U}r{E}\n{B}⟦b{E}\n⟧")
    refuses = "{{ raise_exception('no') if m.content is string }}"
    answer = _encoded(ENDS.replace("{{ m.content }}", refuses), _draft(TWO))
    assert isinstance(answer, Unusable) and "TemplateError: no" in str(answer)


_EACH, _END = "{% for c in m.tool_calls or [] %}", "{% endfor %}"
ITEMS = _EACH + "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}" + _END
AS_TEXT = _EACH + "{{ c.function.arguments }}" + _END
AS_JSON = _EACH + "{{ c.function.arguments | tojson }}" + _END


@pytest.mark.parametrize(
    ("writes", "written"),
    [(ITEMS, "kv"), (AS_TEXT, '{"k": "v"}'), (AS_JSON, '{"k": "v"}')],
    ids=["items", "text", "JSON"],
)
@pytest.mark.parametrize("arguments", [{"k": "v"}, '{"k": "v"}'], ids=["object", "text"])
def test_arguments_give_the_same_call_in_both_forms(writes: str, written: str, arguments: object) -> None:
    answer = _encoded(ENDS.replace("{{ m.content }}", "{{ m.content or '' }}" + writes), _called(arguments), E)
    check(answer, f"{U}q{E}\n{B}⟦{written}{E}\n⟧")
    assert cast(Encoded, answer).remarks == ()


def test_arguments_that_no_form_brings_into_the_text_are_told() -> None:
    answer = _encoded(ENDS.replace("{{ m.content }}", "{{ m.content or '' }}"), _called({"k": "vast"}), E)
    assert isinstance(answer, Encoded) and ("lost", "arguments of tool calls") in answer.remarks


def _cached(load: Load, rows: Path, **others: object) -> TokenCache:
    return load(DatasetSource(path=str(rows)), tokenizer=_tokenizer(ENDS), **others).cache


def test_tokens_belong_to_the_stop_tokens_that_they_were_made_with(load: Load, write_rows: WriteRows) -> None:
    rows = write_rows(*[{"messages": TWO}] * 2)
    caches = [_cached(load, rows, stop_ids=stop_ids) for stop_ids in ((), [MARKS.index(E)], (), (MARKS.index(E),))]
    assert [cache.summary.end_ids for cache in caches] == [(MARKS.index(E),), ()] * 2
    assert caches[0].directory == caches[2].directory != caches[1].directory == caches[3].directory


def test_a_run_keeps_the_tokens_of_an_earlier_rule(
    load: Load, write_rows: WriteRows, tmp_path: Path, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has the name that such tokens had, and no rule of turns in it."""
    rows = write_rows(*[{"messages": TWO}] * 2)
    made = _cached(load, rows, train_on_inputs=True)  # other labels than the rule of today gives
    keys: list[object] = []

    def hashed(value: object) -> str:
        keys.append(value)
        return hash_of(value)

    with monkeypatch.context() as patched:
        patched.setattr("ratel_cli.data.sources.load_tokens.hash_of", hashed)
        _cached(load, rows, cache_dir=tmp_path / "other")
    earlier = next(each for each in keys if isinstance(each, dict) and "turns" not in each)
    kept = tmp_path / "kept" / hash_of(earlier)[:32]
    kept.parent.mkdir()
    made.directory.rename(kept)
    meta = json.loads((kept / "meta.json").read_bytes())
    del meta["end_ids"]  # which such caches do not have
    (kept / "meta.json").write_text(json.dumps(meta))
    notices.clear()
    found = _cached(load, rows, cache_dir=kept.parent)
    assert found.directory == kept and found.summary.tokens_sha256 == made.summary.tokens_sha256
    assert any("this run keeps the tokens of an earlier version of Ratel" in notice for notice in notices)
    assert found.summary.end_ids == ()
