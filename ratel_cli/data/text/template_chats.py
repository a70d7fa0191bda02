"""Encodes conversations with a chat template: its text is tokenised, and labels are found by characters.

Invariant: prompt and answer have the tokens that they will have at inference; a turn that would be trained behind other
tokens than those of its prompt is unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt

from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.samples.samples import TokenIds
from ratel_cli.data.text.chat import ChatRenderer, RenderedChat, located_messages
from ratel_cli.data.text.chat_child import ChatMessage, has_generation_tag
from ratel_cli.data.text.chat_encoder import ChatEncoder, EncodedChat, FinishChats, IsWhole
from ratel_cli.data.text.chat_pool import ChatPool, Rendering
from ratel_cli.data.text.drafts import ChatDraft, Unusable, unless_unusable
from ratel_cli.data.text.prompt_tokens import PromptTokens
from ratel_cli.data.text.tokenise import token_ids, tokenised
from ratel_cli.data.text.tokenizer import Tokenizer, tool_template
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import num_cores
from ratel_cli.sizes import IGNORED_TARGET


class TemplateChats(ChatEncoder):
    """Owns the processes that render conversations, and starts the first with the first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        is_whole: IsWhole,
        notice: Callable[[str], None],
        stop_ids: Collection[int] = (),
    ) -> None:
        """`notice` gets remarks for the user. `stop_ids`: tokens besides EOS with which a model stops."""
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self._stop_ids = frozenset(stop_ids if own is None else (*stop_ids, own))
        self._is_whole = is_whole
        self._notice = notice
        self._pool: ChatPool | None = None
        self._prompts: PromptTokens | None = None

    def begin(self, drafts: Sequence[ChatDraft]) -> FinishChats:
        """See ChatEncoder. The text of each is rendered while others are finished."""
        return partial(self._finish, drafts, self._render(drafts))

    def prompts(self, conversations: Sequence[list[ChatMessage]]) -> list[list[int] | Unusable]:
        """See ChatEncoder."""
        with self._renderer(notice=self._notice) as renderer:
            texts = [unless_unusable(partial(renderer.render_prompt, messages)) for messages in conversations]
        ids = iter(token_ids(self._tokenizer, [text for text in texts if isinstance(text, str)]))
        return [next(ids) if isinstance(text, str) else text for text in texts]

    def close(self) -> None:
        """End the processes that render conversations, if there are any. Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _renderer(
        self,
        *,
        notice: Callable[[str], None],
        begun: Callable[[ChatRenderer], None] = lambda renderer: None,
    ) -> ChatRenderer:
        tokenizer = self._tokenizer
        marks = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        return ChatRenderer(
            tokenizer.get_chat_template(),
            tokenizer.special_tokens_map,
            tool_template=tool_template(tokenizer),
            marks=[mark for mark in marks.values() if mark.strip()],
            stops=[marks[number] for number in sorted(self._stop_ids & marks.keys())],
            notice=notice,
            begun=begun,
        )

    def _finish(self, drafts: Sequence[ChatDraft], rendering: Rendering) -> Sequence[EncodedChat | Unusable]:
        rendered = rendering.answers()
        answered = zip(drafts, rendered, strict=True)
        chats = [(draft, chat) for draft, chat in answered if isinstance(chat, RenderedChat)]
        encoded = iter(self._encode_rendered(chats))
        return [next(encoded) if isinstance(chat, RenderedChat) else chat for chat in rendered]

    def _render(self, drafts: Sequence[ChatDraft]) -> Rendering:
        if not self._tokenizer.is_fast and any(draft.muted or not self._is_whole(draft) for draft in drafts):
            raise BadInput(
                "a fast tokenizer is needed to find the assistant turns, and this model has none",
                hint="set train_on_inputs: true, or use a dataset of type tokens",
            )
        if self._pool is None:
            self._pool = ChatPool(self._renderer, most=min(_MOST_CHILDREN, num_cores()), notice=self._notice)
        return self._pool.start(drafts, locate=lambda draft: not self._is_whole(draft))

    def _encode_rendered(self, chats: list[tuple[ChatDraft, RenderedChat]]) -> Iterator[EncodedChat | Unusable]:
        if all(self._is_whole(draft) and not chat.muted for draft, chat in chats):
            tokens = token_ids(self._tokenizer, [chat.text for _, chat in chats])
            for (draft, chat), ids in zip(chats, tokens, strict=True):
                input_ids = np.array(ids, dtype=np.int32)
                yield self._encoded(draft, chat, input_ids, input_ids)
            return
        marked = self._have_tags() if chats else (False, False)
        batch = tokenised(self._tokenizer, [chat.text for _, chat in chats], special=False, offsets=True)
        ids_of = [np.array(ids, dtype=np.int32) for ids in cast(list[list[int]], batch["input_ids"])]
        spans_of = [_as_array(spans) for spans in cast(list[list[tuple[int, int]]], batch["offset_mapping"])]
        ends = [self._prompt_ends(draft, chat, has_marks=marked[draft.tools is not None]) for draft, chat in chats]
        texts = [(chat.text, ids, spans) for (_, chat), ids, spans in zip(chats, ids_of, spans_of, strict=True)]
        if self._prompts is None:
            self._prompts = PromptTokens(self._tokenizer, partial(token_ids, self._tokenizer))
        prefixes_of = self._prompts.of_beginnings(list(zip(texts, ends, strict=True)))
        found = zip(chats, texts, ends, prefixes_of, strict=True)
        for (draft, chat), (_, input_ids, char_spans), places, tokens in found:
            prefixes = dict(zip(places, tokens, strict=True))
            try:
                if self._is_whole(draft):
                    labels = input_ids.copy()
                elif draft.trained is not None:
                    labels = self._label_words(draft, chat, input_ids, char_spans)
                else:
                    labels = _label_turns(chat, input_ids, char_spans, prefixes)
                for span in chat.muted:
                    first, last = _tokens_of(char_spans, span)
                    labels[first:last] = IGNORED_TARGET
                end = self._tokenizer.eos_token_id
                is_open = draft.is_closed and end is not None and input_ids[-1:].tolist() != [end]
                tail = np.array([end] if is_open else [], dtype=np.int32)
                yield self._encoded(draft, chat, np.append(input_ids, tail), np.append(labels, tail))
            except Unusable as unusable:
                yield unusable

    def _have_tags(self) -> tuple[bool, bool]:
        """Whether the template marks what the assistant wrote, without and with tools."""
        template = self._tokenizer.get_chat_template()
        return has_generation_tag(template), has_generation_tag(tool_template(self._tokenizer) or template)

    def _prompt_ends(self, draft: ChatDraft, chat: RenderedChat, *, has_marks: bool) -> list[int]:
        """The character where each turn begins, if the prompt for it has to have the same tokens at inference."""
        is_whole = self._is_whole(draft)
        if is_whole or draft.trained is not None or (has_marks and draft.completion_from is None):
            return []
        starts = {span[0] for span in chat.spans if span is not None} | {at for at in chat.quiet if at is not None}
        return sorted(starts)

    def _label_words(
        self, draft: ChatDraft, chat: RenderedChat, input_ids: TokenIds, char_spans: npt.NDArray[np.int64]
    ) -> TokenIds:
        """The labels of the words of the trained messages, and of EOS tokens: axolotl's `roles_to_train`.

        `char_spans`: `[tokens, 2]`. A message's EOS token is the first stop token within a few behind its words.
        """
        assert draft.trained is not None
        labels = np.full_like(input_ids, IGNORED_TARGET)
        last_eos: int | None = None
        for index, span in zip(located_messages(draft), chat.spans, strict=True):
            is_trained = index in draft.trained
            if span is None:
                if is_trained:
                    raise Unusable(f"message {index + 1} cannot be located in the rendered conversation")
                continue
            first, last = _tokens_of(char_spans, span)
            if is_trained:
                labels[first:last] = input_ids[first:last]
            behind = np.flatnonzero(self._are_stops(input_ids[last : last + _MOST_BEFORE_EOS + 1]))
            if first < last and len(behind):
                last_eos = None if index in draft.muted else last + int(behind[0])
                if last_eos is None:
                    continue
                if draft.train_on_eos == "all" or (draft.train_on_eos == "turn" and is_trained):
                    labels[last_eos] = input_ids[last_eos]
        if draft.train_on_eos == "last" and last_eos is not None:
            labels[last_eos] = input_ids[last_eos]
        return labels

    def _are_stops(self, ids: TokenIds) -> npt.NDArray[np.bool_]:
        return np.isin(ids, list(self._stop_ids))

    def _encoded(self, draft: ChatDraft, chat: RenderedChat, input_ids: TokenIds, labels: TokenIds) -> EncodedChat:
        return EncodedChat(
            input_ids=input_ids,
            labels=labels,
            remarks=(*chat.remarks, *self._on_its_end(draft, chat, labels)),
            skips_header=chat.skips_header,
        )

    def _on_its_end(self, draft: ChatDraft, chat: RenderedChat, labels: TokenIds) -> tuple[Remark, ...]:
        """What a conversation teaches instead, if no stop token has loss: a token that ends its last turn, or nothing.

        A call's own mark is no such token: another call may follow.
        """
        trained = np.flatnonzero(labels != IGNORED_TARGET)
        if self._is_whole(draft):  # a stop token behind a question teaches nothing
            trained = trained[-_MOST_BEFORE_EOS - 1 :]
        is_wanted = draft.trained is None or draft.train_on_eos != "none"
        if not (len(trained) and is_wanted) or self._are_stops(labels[trained]).any():
            return ()
        last, written = draft.messages[-1], chat.text.rstrip()
        if last["role"] == "assistant" and not last.get("tool_calls"):
            for number in labels[trained[-_MOST_BEFORE_EOS - 1 :]].tolist():
                mark = self._tokenizer.added_tokens_decoder.get(number)
                if mark is not None and mark.content.strip() and written.endswith(mark.content):
                    return (("ends", mark.content),)
        return (("open", ""),)


_MOST_CHILDREN = 16  # that render; each takes 60 MB, and one thread tokenises what they make
_MOST_BEFORE_EOS = 3  # tokens that a template may write between a message and its EOS token, as in axolotl
_NOT_SEPARATE = (
    "one token contains text from inside and outside an assistant turn, so loss cannot be limited to the turn; "
    "the chat template must separate turns, for example with special tokens"
)


def _as_array(char_spans: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """The characters of each token `[tokens, 2]`. One by one: an array of tuples takes numpy four times as long."""
    return np.fromiter(chain.from_iterable(char_spans), np.int64, 2 * len(char_spans)).reshape(-1, 2)


def _label_turns(
    chat: RenderedChat, input_ids: TokenIds, char_spans: npt.NDArray[np.int64], prefixes: Mapping[int, list[int]]
) -> TokenIds:
    """The labels of whole turns. `char_spans`: `[tokens, 2]`. `prefixes`: by number of characters, the tokens of the
    text up to there.

    Without prefixes the template has marked the turns. Raises Unusable if a turn would be trained after other tokens
    than those of its prompt.
    """
    labels = np.full_like(input_ids, IGNORED_TARGET)
    for span, quiet in zip(chat.spans, chat.quiet, strict=True):
        assert span is not None
        first, last = _tokens_of(char_spans, span)
        if prefixes and first < last:
            if char_spans[last - 1, 1] > span[1]:
                raise Unusable(_NOT_SEPARATE)
            first = _first_of_turn(chat.text, (span[0], quiet), input_ids, char_spans, prefixes)
        labels[first:last] = input_ids[first:last]
    return labels


def _first_of_turn(
    text: str,
    starts: tuple[int, int | None],
    input_ids: TokenIds,
    char_spans: npt.NDArray[np.int64],
    prefixes: Mapping[int, list[int]],
) -> int:
    """The first token of a turn behind the same tokens as those of its prompt. Raises Unusable if there is none.

    The turn begins at one of `starts`. If the end of its prompt shares a token with white space of the turn, it begins
    with the next token: `<think>` and a line end, before a turn that has no reasoning and begins with a line end.
    """
    for start in starts:
        if start is not None and start < len(text):
            first = int(np.flatnonzero(char_spans[:, 1] > start)[0])
            if char_spans[first, 0] >= start and input_ids[:first].tolist() == prefixes[start]:
                return first
    first = int(np.flatnonzero(char_spans[:, 1] > starts[0])[0])
    shared, end = (int(at) for at in char_spans[first])
    is_same_before = input_ids[:first].tolist() == prefixes[starts[0]][:first]
    if shared < starts[0] and text[starts[0] : end].isspace() and is_same_before:
        return first + 1
    raise Unusable(_NOT_SEPARATE)


def _tokens_of(char_spans: npt.NDArray[np.int64], span: tuple[int, int]) -> tuple[int, int]:
    """The tokens [first, last) that cover the characters of a span. `char_spans`: `[tokens, 2]`."""
    touched = np.flatnonzero((char_spans[:, 0] < span[1]) & (char_spans[:, 1] > span[0]))
    return (int(touched[0]), int(touched[-1]) + 1) if len(touched) else (0, 0)
