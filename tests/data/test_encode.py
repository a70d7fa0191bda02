"""Token ids and loss masks, compared with independent computations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.drafts import ChatDraft, Draft, TextDraft, TokensDraft, Unusable
from ratel_cli.data.text.tokenizer import Tokenizer, tokenizer_hash
from ratel_cli.errors import BadInput
from ratel_cli.sizes import IGNORED_TARGET
from tests.data.conftest import MakeTokenizer
from tests.tiers import examples

Pair = tuple[list[int], list[int]]

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
)
EOS = 0
BOS = 3


def _encoder(tokenizer: object, *, sequence_len: int = 4096, train_on_inputs: bool = False) -> SampleEncoder:
    return SampleEncoder(cast(Tokenizer, tokenizer), sequence_len=sequence_len, train_on_inputs=train_on_inputs)


def _pairs(answer: Encoded | Unusable) -> list[Pair]:
    assert isinstance(answer, Encoded), str(answer)
    return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in answer.samples]


def _answer(tokenizer: object, draft: Draft, **settings_: bool | int) -> Encoded | Unusable:
    with _encoder(tokenizer, **settings_) as encoder:  # type: ignore[arg-type]
        return encoder.encode([draft])[0]


def _encode(tokenizer: object, draft: Draft, **settings_: bool | int) -> list[Pair]:
    return _pairs(_answer(tokenizer, draft, **settings_))


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return cast(list[int], tokenizer.encode(text, add_special_tokens=False))


def _chat_ids(tokenizer: PreTrainedTokenizerFast, messages: list[ChatMessage]) -> list[int]:
    plain = cast(list[dict[str, str]], messages)
    return cast(list[int], tokenizer.apply_chat_template(plain, return_dict=False))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def chat_encoder(make_tokenizer: MakeTokenizer) -> Iterator[SampleEncoder]:
    with _encoder(make_tokenizer()) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def marked_encoder(make_tokenizer: MakeTokenizer) -> Iterator[SampleEncoder]:
    with _encoder(make_tokenizer(chat_template=MARKED)) as encoder:
        yield encoder


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])


@examples(60)
@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6))
def test_chat_masks_equal_those_put_together_turn_by_turn(
    chat_encoder: SampleEncoder, tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]
) -> None:
    input_ids: list[int] = []
    labels: list[int] = []
    for role, content in turns:
        header, body = _ids(tokenizer, f"<|im_start|>{role}\n"), _ids(tokenizer, f"{content}<|im_end|>\n")
        input_ids += header + body
        labels += [IGNORED_TARGET] * len(header) + (body if role == "assistant" else [IGNORED_TARGET] * len(body))
    messages: list[ChatMessage] = [{"role": role, "content": content} for role, content in turns]
    (answer,) = chat_encoder.encode([ChatDraft(messages=messages, tools=None)])
    whole = _chat_ids(tokenizer, messages)
    if whole != input_ids:  # white space of a turn merged with the newline before it: either result is correct
        assert isinstance(answer, Unusable) or answer.samples[0].input_ids.tolist() == whole
    elif any(role == "assistant" for role, _ in turns):
        assert _pairs(answer) == [(input_ids, labels)]
    else:
        assert str(answer) == "all masked: no token has loss"


@examples(60)
@given(turns=st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=6))
def test_marked_templates_give_the_mask_of_transformers(
    marked_encoder: SampleEncoder, make_tokenizer: MakeTokenizer, turns: list[tuple[str, str]]
) -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    messages: list[ChatMessage] = [{"role": role, "content": content} for role, content in turns]
    plain = cast(list[dict[str, str]], messages)
    oracle = cast(
        dict[str, list[int]],
        tokenizer.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True),
    )
    pairs = list(zip(oracle["input_ids"], oracle["assistant_masks"], strict=True))
    (answer,) = marked_encoder.encode([ChatDraft(messages=messages, tools=None)])
    if any(mask for _, mask in pairs):
        labels = [token if mask else IGNORED_TARGET for token, mask in pairs]
        assert _pairs(answer) == [([token for token, _ in pairs], labels)]
    else:
        assert isinstance(answer, Unusable)


def test_train_on_inputs_has_loss_on_the_whole_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: list[ChatMessage] = [{"role": "user", "content": "only me"}]
    ids = _chat_ids(tokenizer, messages)
    assert _encode(tokenizer, ChatDraft(messages=messages, tools=None), train_on_inputs=True) == [(ids, ids)]


def test_tools_reach_the_template(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(chat_template="{{ tools | tojson }}{{ messages[0].content }}{{ eos_token }}")
    draft = ChatDraft(messages=[{"role": "user", "content": "x"}], tools=[{"name": "f"}])
    ids = _ids(tokenizer, '[{"name": "f"}]x<|endoftext|>')
    assert _encode(tokenizer, draft, train_on_inputs=True) == [(ids, ids)]


def test_a_turn_that_shares_a_token_with_its_header_is_rejected(make_tokenizer: MakeTokenizer) -> None:
    """ "lazy" is one token, so a header that ends in "la" hides where the turn begins."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
    tokenizer = make_tokenizer(chat_template=template)
    messages: list[ChatMessage] = [{"role": "user", "content": "the la"}, {"role": "assistant", "content": "zy dog"}]
    assert len(_ids(tokenizer, " lazy")) < len(_ids(tokenizer, " la")) + len(_ids(tokenizer, "zy"))
    answer = _answer(tokenizer, ChatDraft(messages=messages, tools=None))
    assert isinstance(answer, Unusable)
    assert "one token contains text from inside and outside an assistant turn" in str(answer)


def test_a_turn_that_changes_the_tokens_before_it_is_rejected() -> None:
    """At inference two line ends before an answer are one token. With the answer behind them they are two."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["\n\n"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert [len(_ids(tokenizer, text)) for text in ("x\n\n", "x\n\ny")] == [2, 4]
    messages: list[ChatMessage] = [{"role": "user", "content": "x\n\n"}, {"role": "assistant", "content": "y"}]
    answer = _answer(tokenizer, ChatDraft(messages=messages, tools=None))
    assert isinstance(answer, Unusable), "it would be trained after tokens that no prompt has"


def test_finding_turns_needs_a_fast_tokenizer(make_tokenizer: MakeTokenizer) -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    backend = make_tokenizer().backend_tokenizer
    tokenizer = Slow(tokenizer_object=backend, eos_token="<|endoftext|>")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = MARKED
    draft = ChatDraft(messages=[{"role": "user", "content": "x"}], tools=None)
    with _encoder(tokenizer) as encoder, pytest.raises(BadInput, match="a fast tokenizer is needed"):
        encoder.encode([draft])
    assert len(tokenizer_hash(cast(Tokenizer, tokenizer))) == 64
    assert _encode(tokenizer, TextDraft(prompt="", answer="a b"))


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("train_on_inputs", [False, True])
def test_prompt_and_answer(make_tokenizer: MakeTokenizer, adds_bos: bool, train_on_inputs: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    prompt, answer = _ids(tokenizer, "the quick "), _ids(tokenizer, "brown fox")
    head = [BOS] * adds_bos + prompt
    labels = (head if train_on_inputs else [IGNORED_TARGET] * len(head)) + [*answer, EOS]
    draft = TextDraft(prompt="the quick ", answer="brown fox")
    assert _encode(tokenizer, draft, train_on_inputs=train_on_inputs) == [([*head, *answer, EOS], labels)]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("text", ["the fox", "<s>the fox", "the fox<|endoftext|>", "<s>the fox<|endoftext|>"])
def test_bos_and_eos_are_never_doubled(make_tokenizer: MakeTokenizer, adds_bos: bool, text: str) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    ((ids, labels),) = _encode(tokenizer, TextDraft(prompt="", answer=text, splittable=True))
    assert ids == [BOS] * (adds_bos or "<s>" in text) + _ids(tokenizer, "the fox") + [EOS]
    assert labels == ids


@examples(50)
@given(num_words=st.integers(1, 60), sequence_len=st.integers(2, 30))
def test_split_text_predicts_every_token_once(
    tokenizer: PreTrainedTokenizerFast, num_words: int, sequence_len: int
) -> None:
    text = "the quick fox " * num_words
    whole = [*_ids(tokenizer, text), EOS]
    draft = TextDraft(prompt="", answer=text, splittable=True)
    pieces = _encode(tokenizer, draft, sequence_len=sequence_len)
    assert all(2 <= len(ids) <= sequence_len and ids == labels for ids, labels in pieces)
    assert pieces[0][0][:1] + [token for ids, _ in pieces for token in ids[1:]] == whole
    assert all(len(ids) == sequence_len for ids, _ in pieces[:-1])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_tokens_are_taken_as_they_are_and_cut(tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    ids = [5 + index for index in range(length)]
    labels = [IGNORED_TARGET] * (length // 2) + [9] * (length - length // 2)  # labels need not be the ids
    answer = _answer(tokenizer, TokensDraft(input_ids=ids, labels=labels), sequence_len=8)
    if length == 1:
        assert str(answer) == "all masked: no token has loss"
    else:
        assert _pairs(answer) == [(ids[:8], labels[:8])]
        assert isinstance(answer, Encoded)
        assert answer.excess_tokens == (length == 9)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (TokensDraft(input_ids=[], labels=[]), "the row has no tokens"),
        (TokensDraft(input_ids=[1, 9999], labels=[1, 2]), "'input_ids' contains 9999; the tokenizer has ids 0 to "),
        (TokensDraft(input_ids=[1, -100], labels=[1, 2]), "'input_ids' contains -100; the tokenizer has ids 0 to "),
        (TokensDraft(input_ids=[1, 2], labels=[1, -1]), "'labels' contains -1; the tokenizer has ids 0 to "),
        (TokensDraft(input_ids=[1, 2], labels=[1, IGNORED_TARGET]), "all masked: no token has loss"),
        (
            TokensDraft(input_ids=[1] * 9, labels=[IGNORED_TARGET] * 8 + [1]),
            "all masked: no token has loss within the first 8 tokens",
        ),
        (TextDraft(prompt="a", answer=""), "the text to train on is empty"),
        (TextDraft(prompt="", answer=" \n", splittable=True), "the text to train on is empty"),
        (
            TextDraft(prompt="the quick brown fox " * 9, answer="b"),
            "all masked: no token has loss within the first",
        ),
    ],
)
def test_reasons(tokenizer: PreTrainedTokenizerFast, draft: Draft, reason: str) -> None:
    answer = _answer(tokenizer, draft, sequence_len=8)
    assert isinstance(answer, Unusable)
    assert str(answer).startswith(reason)


def test_the_last_token_of_the_vocabulary_is_accepted_and_the_next_one_rejected(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    last = len(tokenizer) - 1
    drafts = [TokensDraft(input_ids=[1, token], labels=[1, token]) for token in (last, last + 1)]
    with _encoder(tokenizer) as encoder:
        accepted, rejected = encoder.encode(drafts)
    assert _pairs(accepted) == [([1, last], [1, last])]
    assert isinstance(rejected, Unusable) and f"'input_ids' contains {last + 1}" in str(rejected)


def test_one_token_without_eos_is_all_masked(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with _encoder(tokenizer) as encoder:
        one, two = encoder.encode([TextDraft(prompt="", answer=text, splittable=True) for text in ("a", "a b")])
    assert str(one).startswith("all masked")
    assert _pairs(two)


def test_answers_keep_the_order_of_mixed_drafts(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatDraft(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], tools=None)
    masked = ChatDraft(messages=[{"role": "user", "content": "q"}], tools=None)
    text, tokens = TextDraft(prompt="", answer="b"), TokensDraft(input_ids=[7, 7], labels=[7, 7])
    drafts: list[Draft] = [text, masked, chat, tokens, TextDraft(prompt="", answer=""), chat, text]
    with _encoder(tokenizer) as encoder:
        together = encoder.encode(drafts)
        apart = [encoder.encode([draft])[0] for draft in drafts]
        assert encoder.encode([]) == []
    for one, other in zip(together, apart, strict=True):
        assert str(one) == str(other) if isinstance(one, Unusable) else _pairs(one) == _pairs(other)


def test_the_hash_follows_what_changes_ids(make_tokenizer: MakeTokenizer) -> None:
    def of(tokenizer: PreTrainedTokenizerFast) -> str:
        return tokenizer_hash(cast(Tokenizer, tokenizer))

    plain = make_tokenizer()
    assert of(plain) == of(make_tokenizer())
    plain(["a", "longer text"], padding=True, truncation=True, max_length=4)  # leaves settings in the backend
    assert of(plain) == of(make_tokenizer())
    more = make_tokenizer()
    more.add_tokens(["another"])
    no_end = make_tokenizer()
    no_end.eos_token = None
    others = [make_tokenizer(adds_bos=True), make_tokenizer(chat_template=MARKED), more, no_end]
    assert len({of(tokenizer) for tokenizer in (plain, *others)}) == 5


def test_a_token_without_a_row_is_in_no_sample(tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever the form of the row; what is cut off may have it."""
    drafts = [
        TextDraft(prompt="", answer="one two", splittable=True),
        TextDraft(prompt="one two", answer="three"),
        ChatDraft(messages=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], tools=None),
        TokensDraft(input_ids=[1, 2], labels=[1, 2]),
    ]
    for draft in drafts:
        [(ids, _), *_] = _encode(tokenizer, draft)
        for num_embeddings, is_usable in ((max(ids) + 1, True), (max(ids), False)):
            with SampleEncoder(
                cast(Tokenizer, tokenizer), num_embeddings=num_embeddings, sequence_len=99, train_on_inputs=True
            ) as encoder:
                [answer] = encoder.encode([draft])
            assert isinstance(answer, Encoded) == is_usable
            if not is_usable:
                assert str(max(ids)) in str(answer) and ("rows" in str(answer) or "ids 0 to" in str(answer))
