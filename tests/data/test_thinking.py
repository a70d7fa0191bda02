"""Chat templates with reasoning: where loss begins, and what is said about reasoning that a template drops.

The expected samples are written out, with the part that has loss in brackets, and counted by hand: each character and
each mark is a token, and two line ends are one.
"""

from __future__ import annotations

import re
from typing import cast

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.files.remarks import sentences
from ratel_cli.data.samples.samples import Encoded, Sample
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.drafts import ChatDraft, Unusable
from ratel_cli.data.text.tokenizer import Tokenizer

MARKS = ["<|user|>", "<|bot|>", "<|end|>", "<|stop|>", "<|channel|>", "<think>", "</think>"]
_SPACES = {"\n": "\u010a", " ": "\u0120", "\n\n": "\u010a\u010a"}  # as byte-level vocabularies write them
_VOCABULARY = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), _SPACES["\n\n"]]
_PIECES = re.compile("|".join(map(re.escape, [*MARKS, "\n\n"])) + r"|[\s\S]")

_USER = "{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n{% endif %}"
_TURNS = "{% for m in messages %}" + _USER + "{% if m.role == 'assistant' %}<|bot|>\n"
_PROMPT = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>\n"
_THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}<|end|>\n"
# The prompt opens the reasoning, and every turn has some, if only none: as the thinking models of 2025 do.
OPENS = _TURNS + _THOUGHT + _PROMPT + "<think>\n{% endif %}"
# The same, and the reader of the template can say that there is none.
CHOOSES = (
    _TURNS + _THOUGHT + _PROMPT + "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
# The prompt has no thinking unless it is asked for.
QUIET = CHOOSES.replace(
    "enable_thinking is defined and enable_thinking is false", "enable_thinking is not defined or not enable_thinking"
)
# Only the answer to the last user message shows reasoning, and the prompt opens none.
LAST_ONLY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    + _TURNS
    + "{% if loop.index0 > ns.last %}"
    + _THOUGHT
    + "{% else %}{{ m.content }}<|end|>\n{% endif %}"
    + _PROMPT
    + "{% endif %}"
)
OPENS_LAST_ONLY = LAST_ONLY.removesuffix("{% endif %}") + "<think>\n{% endif %}"
# The prompt opens reasoning that finished turns do not show, nor what they have of it in their words.
DROPS = _TURNS + "{{ m.content.split('</think>')[-1] }}<|end|>\n" + _PROMPT + "<think>\n{% endif %}"
# Reasoning is a message of its own before the last answer, which alone ends with another mark.
CHANNELS = (
    _TURNS
    + "{% if m.reasoning_content and loop.last %}<|channel|>a{{ m.reasoning_content }}<|end|><|bot|>\n{% endif %}"
    + "<|channel|>f{{ m.content }}{% if loop.last %}<|stop|>{% else %}<|end|>{% endif %}"
    + _PROMPT
    + "{% endif %}"
)
# Reasoning inside the words of a message is found, as most templates do it.
SPLITS = _TURNS + (
    "{% set parts = m.content.split('</think>') %}<think>\n{{ parts[0].replace('<think>', '').strip() if "
    "parts | length > 1 else '' }}\n</think>\n\n{{ parts[-1].strip() }}<|end|>\n"
) + _PROMPT + "<think>\n{% endif %}"  # fmt: skip

U, B, E = "<|user|>\n", "<|bot|>\n", "<|end|>\n"


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose one merge is that of two line ends."""
    ids = {token: place for place, token in enumerate(_VOCABULARY)}
    backend = Backend(models.BPE(vocab=ids, merges=[(_SPACES["\n"], _SPACES["\n"])]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


def ids_and_labels(marked: str) -> tuple[list[int], list[int]]:
    """The ids and labels of a text whose part with loss is in brackets."""
    ids, labels = [], []
    for number, part in enumerate(re.split("[⟦⟧]", marked)):
        for piece in _PIECES.findall(part):
            ids.append(_VOCABULARY.index(_SPACES.get(piece, piece)))
            labels.append(ids[-1] if number % 2 else -100)
    return ids, labels


def encode(template: str, draft: ChatDraft, *, train_on_inputs: bool = False) -> Encoded | Unusable:
    tokenizer = cast(Tokenizer, tokenizer_of(template))
    with SampleEncoder(tokenizer, sequence_len=4096, train_on_inputs=train_on_inputs) as encoder:
        return encoder.encode([draft])[0]


def check(answer: Encoded | Unusable, marked: str) -> Sample:
    assert isinstance(answer, Encoded), str(answer)
    (sample,) = answer.samples
    assert (sample.input_ids.tolist(), sample.labels.tolist()) == ids_and_labels(marked)
    return sample


def chat(*contents: str, thoughts: tuple[str, ...] = ()) -> list[ChatMessage]:
    """Turns of a user and an assistant, whose reasoning is that of `thoughts`, where it has some."""
    messages: list[ChatMessage] = []
    for number, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[number % 2], "content": content})
        if number % 2 and thoughts and thoughts[number // 2]:
            messages[-1]["reasoning_content"] = thoughts[number // 2]
    return messages


ONE = chat("q", "a")
TWO = chat("q", "a", "r", "b")
THOUGHT = chat("q", "a", "r", "b", thoughts=("why", "how"))
CASES: dict[str, tuple[str, list[ChatMessage], str]] = {
    "two line ends are one token: the first whole token inside the turn": (
        OPENS,
        TWO,
        f"{U}q{E}{B}<think>\n\n⟦</think>\n\na{E}⟧{U}r{E}{B}<think>\n\n⟦</think>\n\nb{E}⟧",
    ),
    "the prompt without thinking, if there is one": (
        CHOOSES,
        TWO,
        f"{U}q{E}{B}<think>\n\n</think>\n\n⟦a{E}⟧{U}r{E}{B}<think>\n\n</think>\n\n⟦b{E}⟧",
    ),
    "reasoning has loss, behind the prompt that opens it": (
        CHOOSES,
        THOUGHT,
        f"{U}q{E}{B}<think>\n⟦why\n</think>\n\na{E}⟧{U}r{E}{B}<think>\n⟦how\n</think>\n\nb{E}⟧",
    ),
    "turns with and without reasoning": (
        CHOOSES,
        chat("q", "a", "r", "b", thoughts=("", "how")),
        f"{U}q{E}{B}<think>\n\n</think>\n\n⟦a{E}⟧{U}r{E}{B}<think>\n⟦how\n</think>\n\nb{E}⟧",
    ),
    "reasoning behind a prompt that opens none unless it is asked to": (
        QUIET,
        chat("q", "a", "r", "b", thoughts=("", "how")),
        f"{U}q{E}{B}<think>\n\n</think>\n\n⟦a{E}⟧{U}r{E}{B}<think>\n⟦how\n</think>\n\nb{E}⟧",
    ),
    "reasoning of the last answer only": (
        LAST_ONLY,
        THOUGHT,
        f"{U}q{E}{B}⟦a{E}⟧{U}r{E}{B}⟦<think>\nhow\n</think>\n\nb{E}⟧",
    ),
    "the empty reasoning of a template whose prompt opens none": (
        LAST_ONLY,
        ONE,
        f"{U}q{E}{B}⟦<think>\n\n</think>\n\na{E}⟧",
    ),
    "reasoning of the last answer only, which the prompt opens": (
        OPENS_LAST_ONLY,
        TWO,
        f"{U}q{E}{B}⟦a{E}⟧{U}r{E}{B}<think>\n\n⟦</think>\n\nb{E}⟧",
    ),
    "a prompt that no finished turn begins with": (
        DROPS,
        chat("q", "<think>why</think>a", "r", "b"),
        f"{U}q{E}{B}⟦a{E}⟧{U}r{E}{B}⟦b{E}⟧",
    ),
    "channels: an earlier turn ends with its own mark": (
        CHANNELS,
        THOUGHT,
        f"{U}q{E}{B}⟦<|channel|>fa<|end|>⟧{U}r{E}{B}⟦<|channel|>ahow<|end|>{B}<|channel|>fb<|stop|>⟧",
    ),
    "reasoning in the words of a message": (
        SPLITS,
        chat("q", "<think>why</think>a", "r", "how</think>b"),
        f"{U}q{E}{B}<think>\n⟦why\n</think>\n\na{E}⟧{U}r{E}{B}<think>\n⟦how\n</think>\n\nb{E}⟧",
    ),
    "reasoning in the words: the header is what the turn has of its prompt": (
        SPLITS.removesuffix("<think>\n{% endif %}") + "<think>now\n{% endif %}",
        chat("q", "<think>why</think>a"),
        f"{U}q{E}{B}<think>⟦\nwhy\n</think>\n\na{E}⟧",
    ),
    "an answer that begins with a line end": (
        _TURNS + "{{ m.content }}<|end|>\n" + _PROMPT + "{% endif %}",
        chat("q", "\na"),
        f"{U}q{E}<|bot|>\n\n⟦a{E}⟧",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_assistant_turns(name: str) -> None:
    template, messages, marked = CASES[name]
    answer = encode(template, ChatDraft(messages=messages, tools=None))
    sample = check(answer, marked)
    plain = cast(list[dict[str, str]], messages)
    assert sample.input_ids.tolist() == tokenizer_of(template).apply_chat_template(plain, return_dict=False)


@pytest.mark.parametrize(
    ("template", "messages", "marked"),
    [
        (OPENS, TWO, f"{U}q{E}{B}<think>\n\n</think>\n\na{E}{U}r{E}{B}<think>\n\n⟦</think>\n\nb{E}⟧"),
        (CHOOSES, ONE, f"{U}q{E}{B}<think>\n\n</think>\n\n⟦a{E}⟧"),
        (CHOOSES, chat("q", "a", thoughts=("why",)), f"{U}q{E}{B}<think>\n⟦why\n</think>\n\na{E}⟧"),
        (DROPS, ONE, f"{U}q{E}{B}⟦a{E}⟧"),
        (LAST_ONLY, TWO, f"{U}q{E}{B}a{E}{U}r{E}{B}⟦<think>\n\n</think>\n\nb{E}⟧"),
    ],
)
def test_a_completion_behind_its_prompt(template: str, messages: list[ChatMessage], marked: str) -> None:
    """TRL's prompt and completion: the completion begins where the prompt for it ends, with or without reasoning."""
    answer = encode(template, ChatDraft(messages=messages, tools=None, completion_from=len(messages) - 1))
    check(answer, marked)


@pytest.mark.parametrize(
    ("template", "messages", "marked"),
    [
        (OPENS, ONE, f"{U}q{E}{B}<think>\n\n</think>\n\n⟦a<|end|>⟧\n"),
        (OPENS, chat("q", "a", thoughts=("why",)), f"{U}q{E}{B}<think>\n⟦why\n</think>\n\na<|end|>⟧\n"),
        (SPLITS, chat("q", "<think>why</think>a"), f"{U}q{E}{B}<think>\n⟦why\n</think>\n\na<|end|>⟧\n"),
        (LAST_ONLY, THOUGHT, f"{U}q{E}{B}⟦a<|end|>⟧\n{U}r{E}{B}<think>\n⟦how\n</think>\n\nb<|end|>⟧\n"),
    ],
)
def test_words_and_reasoning(template: str, messages: list[ChatMessage], marked: str) -> None:
    """axolotl's mask: reasoning is among the words of a message, empty reasoning is not."""
    trained = tuple(range(1, len(messages), 2))
    answer = encode(template, ChatDraft(messages=messages, tools=None, trained=trained))
    check(answer, marked)


@pytest.mark.parametrize(
    ("template", "messages", "kinds"),
    [
        (OPENS, THOUGHT, []),
        (LAST_ONLY, chat("q", "a", "r", "b", thoughts=("because", "therefore")), [("reasoning", "earlier")]),
        (DROPS, chat("q", "a", thoughts=("because",)), [("reasoning", "last")]),
        (DROPS, chat("q", "<think>because</think>a", "r", "b"), [("reasoning", "earlier")]),
        (SPLITS, chat("q", "<think>\nbecause\n</think>\n\na", "r", "therefore</think>b"), []),
        (OPENS, chat("q", "because</think>a"), [("marks", "")]),
        (OPENS, chat("q", "<think>because</think>a"), [("marks", "")]),
        (LAST_ONLY, chat("q", "what is </b>?"), []),
    ],
)
def test_reasoning_that_is_lost_or_not_recognised(
    template: str, messages: list[ChatMessage], kinds: list[tuple[str, str]]
) -> None:
    answer = encode(template, ChatDraft(messages=messages, tools=None))
    assert isinstance(answer, Encoded), str(answer)
    assert list(answer.remarks) == kinds


def test_what_is_said_about_reasoning() -> None:
    counts = {("marks", ""): 2, ("reasoning", "earlier"): 1, ("reasoning", "last"): 3}
    marks, earlier, last = sentences(counts, 9)
    assert marks.startswith("the chat template takes `<think>` or `</think>` for words of an answer in 2 of 9 conv")
    assert marks.endswith("write the reasoning under the key `reasoning_content` of the message, without marks")
    assert earlier == (
        "the chat template leaves out the reasoning of earlier assistant turns in 1 of 9 conversations, as it does in "
        "a prompt"
    )
    assert last.startswith("the chat template leaves out the reasoning of the last assistant turn in 3 of 9 conv")
    assert last.endswith("`message_property_mappings` names yours: {reasoning_content: KEY}")


@pytest.mark.parametrize("has_prompt", [False, True])
def test_a_token_that_white_space_does_not_explain_is_rejected(has_prompt: bool) -> None:
    """The prompt ends in a letter that shares a token with the first letter of the answer."""
    merged = Backend(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "q": 3}, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}a{% endif %}{% endfor %}"
    draft = ChatDraft(messages=chat("q", "b"), tools=None, completion_from=1 if has_prompt else None)
    with SampleEncoder(cast(Tokenizer, tokenizer), sequence_len=64, train_on_inputs=False) as encoder:
        (answer,) = encoder.encode([draft])
    assert isinstance(answer, Unusable) and "one token contains text from inside and outside" in str(answer)
