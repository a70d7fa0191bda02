"""The turns of TRL's training templates against those that Ratel finds in the original ones.

TRL replaces a model's chat template by one that marks with `{% generation %}` what the assistant wrote, and
transformers makes a mask of the marks. Both mean the same tokens, or a row of `DIFFERS` says which characters and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import cast

import pytest
from jinja2.exceptions import UndefinedError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from tests.data.test_turns_of_families import (
    ALL,
    ASK,
    CALL,
    CALLS,
    CONVERSATIONS,
    MORE,
    ONE,
    PROMPTS,
    RESULT,
    TEMPLATES,
    THINKS,
    TOOLS,
    TWO,
    Unfit,
    answer,
    fitting,
    in_form,
    rendered,
    said,
)
from tests.data.turn_oracle import Message
from tests.data.turn_templates import Family
from tests.tiers import sample

ENDING = "_training"
NAMES = [path.stem.removesuffix(ENDING) for path in sorted(TEMPLATES.glob(f"*{ENDING}.jinja"))]
ASSISTANT_FIRST, LATE_WORDS = "the assistant first", "words before a call"
OF_TRL: Mapping[str, list[Message]] = {
    **CONVERSATIONS,
    ASSISTANT_FIRST: [ONE, ASK, TWO],
    "two calls at once": [ASK, CALL | {"tool_calls": [*CALLS, *CALLS]}, RESULT, RESULT, ONE],
    "all together": [said("system", "Zsystem"), ASK, CALL | THINKS, RESULT, ONE | THINKS, MORE, TWO | THINKS],
    "the user last": [ASK, ONE, MORE],
    "the same again": [ASK, ONE, ASK, ONE],
}


class Why(Enum):
    """Why Ratel and TRL train other characters."""

    PROMPT = "TRL trains the end of the prompt for a turn, which the model gets"
    KEPT = "TRL's template keeps the reasoning of earlier turns, or writes an empty thought; a prompt has none"
    STOP = "Ratel trains the stop token behind a turn"
    BLANK = "the white space around a turn"
    LATE = "TRL trains words behind the results of the call that they came before; there they are no answer"
    REFUSED = "the original template refuses the conversation"
    FAILS = "TRL's template fails where a call has no words"


Differences = Mapping[Why, tuple[str, ...]]
"""The characters that differ, or the conversations."""
_EMPTY, _OPEN, _FULL = "<think>\n\n</think>\n\n", "<think>\n", "<think>\nZwhy\n</think>\n\n"
_NEMOTRON: Differences = {Why.PROMPT: ("<think></think>", _OPEN)}
_QWEN3_6: Differences = {
    Why.PROMPT: (_OPEN,),
    Why.KEPT: (_EMPTY, _FULL),
    Why.REFUSED: (ASSISTANT_FIRST,),
}
DIFFERS: Mapping[str, Differences] = {
    "deepseek_r1_distill": {
        Why.PROMPT: ("<\uff5cAssistant\uff5c>",),
        Why.FAILS: (
            "tools",
            "two calls",
            "thinking before a call",
            "last: a call",
            "two calls at once",
            "all together",
        ),
    },
    "deepseekv3": {Why.PROMPT: ("<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>")},
    "diffusion_gemma": {Why.STOP: ("<|tool_response>",), Why.LATE: (LATE_WORDS,)},
    "gptoss": {Why.PROMPT: ("<|start|>assistant",)},
    "llava_next": {Why.BLANK: (" ",)},
    "muse_glimmer": {Why.PROMPT: ("<|start|>assistant",)},
    "nemotron_3_5_lightning": _NEMOTRON,
    "nemotron_3_nano": _NEMOTRON,
    "nemotron_3_super": _NEMOTRON,
    "nemotron_3_ultra": _NEMOTRON,
    "qwen2_5": {Why.PROMPT: ("\n",)},
    "qwen3": {Why.KEPT: (_EMPTY, _FULL)},
    "qwen3_5_nothink": {**_QWEN3_6, Why.PROMPT: (_EMPTY, _OPEN)},
    "qwen3_5_think": _QWEN3_6,
    "qwen3_6": _QWEN3_6,
    "qwen3_8": {Why.PROMPT: (_OPEN,), Why.REFUSED: (ASSISTANT_FIRST,)},
}
"""By template; in all others the same characters have loss."""


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _trained_by_trl(tokenizer: PreTrainedTokenizerFast, family: Family, messages: list[Message]) -> list[str]:
    """What transformers' mask has of a conversation. Raises Unfit if the template does not write all of it."""
    has_calls = any("tool_calls" in each for each in messages)
    form = fitting(family, messages)
    encoded = tokenizer.apply_chat_template(
        in_form(messages, form),
        chat_template=family.template,
        tools=TOOLS if has_calls else None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **family.variables,
    )
    mask = "".join(map(str, encoded["assistant_masks"]))
    ids = encoded["input_ids"]
    return [tokenizer.decode(ids[slice(*each.span())]) for each in re.finditer("1+", mask)]


def _prompts(family: Family, messages: list[Message]) -> list[str]:
    """Conversations with the prompt for an answer, of a model that thinks or does not."""
    has_calls = any("tool_calls" in each for each in messages)
    before = messages or [ASK]
    form = fitting(family, before)
    return [rendered(family, before, form, prompt=each, has_tools=has_calls) for each in ("plain", *PROMPTS)]


def _difference(family: Family, allowed: Differences, text: str, place: int, ours: str, theirs: str) -> set[Why]:
    """Why one turn differs. `place`: where it begins in the original template's text."""
    found = set[Why]()
    for why, end in ((Why.STOP, family.stops), (Why.BLANK, (" ",))):
        for each in end if not theirs.endswith(end) else ():
            if each in allowed.get(why, ()) and ours.endswith(each):
                ours, found = ours.removesuffix(each), found | {why}
    assert theirs.endswith(ours)
    more = theirs.removesuffix(ours)
    if not more:
        return found
    if more in allowed.get(Why.PROMPT, ()) and text[:place].endswith(more):
        return found | {Why.PROMPT}
    if more in allowed.get(Why.BLANK, ()) and text[:place].endswith(more):
        return found | {Why.BLANK}
    assert more in allowed.get(Why.KEPT, ()) and not text[:place].endswith(more), (ours, theirs)
    return found | {Why.KEPT}


@pytest.mark.parametrize("name", sample(NAMES, every=7, offset=2))
def test_turns_are_those_of_trl(name: str) -> None:
    family, tokenizer, allowed = ALL[name], _tokenizer(), DIFFERS.get(name, {})
    tokenizer.chat_template, tokenizer.eos_token = family.template, family.stops[-1]
    training = (TEMPLATES / f"{name}{ENDING}.jinja").read_text(encoding="utf-8")
    assert get_training_chat_template(tokenizer) == training
    of_trl = Family(template=training, stops=family.stops, variables=family.variables)
    found, num_compared = set[Why](), 0
    for what, messages in OF_TRL.items():
        reply = answer(family, messages)
        try:
            theirs = _trained_by_trl(tokenizer, of_trl, messages)
        except Unfit:
            continue
        except UndefinedError:
            assert what in allowed[Why.FAILS]
            found.add(Why.FAILS)
            continue
        num_compared += 1
        if "error" in reply:
            assert what in allowed[Why.REFUSED] and "TemplateError" in str(reply["error"])
            found.add(Why.REFUSED)
            continue
        if what in allowed.get(Why.LATE, ()):
            theirs.remove("Zlook")
            found.add(Why.LATE)
        text, spans = cast(str, reply["text"]), cast(list[list[int]], reply["spans"])
        assert len(spans) == len(theirs), (what, theirs)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        for at, span, of_mask in zip(turns, spans, theirs, strict=True):
            reasons = _difference(family, allowed, text, span[0], text[slice(*span)], of_mask)
            if Why.PROMPT in reasons:
                more = of_mask[: of_mask.index(text[slice(*span)])]
                prompts = _prompts(family, messages[:at])
                # A thought may follow, which the conversation does not have.
                assert any(each.removesuffix(end).endswith(more) for each in prompts for end in ("", _OPEN)), what
            found |= reasons
    assert num_compared >= 5, "TRL's template refuses nearly everything"
    assert found == set(allowed)


def test_every_row_has_a_template() -> None:
    assert DIFFERS.keys() <= set(NAMES)
    assert len(NAMES) >= 30
