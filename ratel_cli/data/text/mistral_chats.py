"""Encodes conversations with mistral-common, and finds by its own blocks of tokens which of them have loss.

A conversation is a row of runs: messages of one role that follow each other. mistral-common joins those of a user or of
the assistant to one block, sorts the results of tools, and below version 7 writes system prompts into a user's block.

Invariant: loss is limited to what the draft asks for; a run whose messages ask for different things is unusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.samples.samples import TokenIds
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.chat_encoder import ChatEncoder, EncodedChat, FinishChats, IsWhole
from ratel_cli.data.text.drafts import ChatDraft, Unusable, unless_unusable
from ratel_cli.data.text.mistral_messages import request_of
from ratel_cli.data.text.mistral_tokenizer import Block, MistralTokenizer
from ratel_cli.sizes import IGNORED_TARGET

Span = tuple[int, int]
"""Tokens [first, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Messages of one role that follow each other."""

    role: str
    messages: range
    spans: Sequence[Span]
    """The tokens of each of its blocks. No block: its text is in a user's."""


class MistralChats(ChatEncoder):
    """Encodes one conversation after another, when it is finished: that takes a millisecond for 800 tokens."""

    def __init__(self, tokenizer: MistralTokenizer, *, is_whole: IsWhole) -> None:
        self._tokenizer = tokenizer
        self._is_whole = is_whole

    def begin(self, drafts: Sequence[ChatDraft]) -> FinishChats:
        """See ChatEncoder."""
        return lambda: [unless_unusable(partial(self._encode, draft)) for draft in drafts]

    def prompts(self, conversations: Sequence[list[ChatMessage]]) -> list[list[int] | Unusable]:
        """See ChatEncoder."""
        return [unless_unusable(partial(self._prompt, messages)) for messages in conversations]

    def close(self) -> None:
        """See Closing. Nothing is owned."""

    def _prompt(self, messages: list[ChatMessage]) -> list[int]:
        return self._tokenizer.encode_prompt(request_of(messages, None))

    def _encode(self, draft: ChatDraft) -> EncodedChat:
        request = request_of(draft.messages, draft.tools)
        tokens, blocks = self._tokenizer.encode_chat(request)
        input_ids = np.array(tokens, dtype=np.int32)
        runs = _runs(draft.messages, blocks, first=len(tokens) - sum(len(block.tokens) for block in blocks))
        labels = np.full_like(input_ids, IGNORED_TARGET)
        for first, end in self._with_loss(draft, runs, input_ids):
            labels[first:end] = input_ids[first:end]
        if draft.trained is None:
            for first, end in _muted(draft, runs):
                labels[first:end] = IGNORED_TARGET
        return EncodedChat(input_ids=input_ids, labels=labels, remarks=(*request.remarks, *_remarks(draft, runs)))

    def _with_loss(self, draft: ChatDraft, runs: Sequence[_Run], input_ids: TokenIds) -> Iterable[Span]:
        """The tokens that have loss, whether they are muted or not."""
        if self._is_whole(draft):
            return [(0, len(input_ids))]
        if draft.trained is not None:
            return self._words(draft, runs, input_ids)
        if draft.completion_from is None:
            return [span for run in runs if run.role == "assistant" for span in run.spans]
        for run in runs:
            if run.messages.start == draft.completion_from and run.spans:
                return [(run.spans[0][0], len(input_ids))]
        raise Unusable("mistral-common joins the end of the prompt and the beginning of the completion")

    def _words(self, draft: ChatDraft, runs: Sequence[_Run], input_ids: TokenIds) -> list[Span]:
        """The words of the trained messages, without the marks around them, and EOS tokens: `roles_to_train`."""
        trained = {run.messages: _agreed(run, draft.trained or ()) for run in runs}
        _check_system_prompts(runs, trained)
        found: list[Span] = []
        last_eos: Span | None = None
        for run in runs:
            is_muted = _agreed(run, draft.muted)
            for first, end in run.spans:
                if run.role != "assistant":
                    found += [self._between_marks(input_ids, (first, end), run.role)] if trained[run.messages] else []
                    continue
                has_eos = first < end and input_ids[end - 1] == self._tokenizer.eos_token_id
                found += [(first, end - has_eos)] if trained[run.messages] else []
                if has_eos:
                    last_eos = None if is_muted else (end - 1, end)
                    wanted = draft.train_on_eos == "all" or (draft.train_on_eos == "turn" and trained[run.messages])
                    found += [last_eos] if last_eos is not None and wanted else []
        return [*found, last_eos] if draft.train_on_eos == "last" and last_eos is not None else found

    def _between_marks(self, input_ids: TokenIds, span: Span, role: str) -> Span:
        """What stands between the last two control tokens of a block: what comes before them is an id, or tools."""
        first, end = span
        if first == end:
            return span
        marks = [at for at in range(first, end) if self._tokenizer.is_control(int(input_ids[at]))]
        if len(marks) < 2 or marks[-1] != end - 1:
            raise Unusable(f"this version of the tokenizer has no marks around {role} turns, so they cannot have loss")
        return marks[-2] + 1, marks[-1]


def _runs(messages: Sequence[ChatMessage], blocks: Sequence[Block], *, first: int) -> list[_Run]:
    """The runs of a conversation, whose blocks begin with token `first`. Raises Unusable."""
    spans: list[tuple[str, Span]] = []
    for block in blocks:
        spans.append((block.role, (first, first + len(block.tokens))))
        first += len(block.tokens)
    numbered = groupby(range(len(messages)), key=lambda index: messages[index]["role"])
    parts = [(str(role), list(indices)) for role, indices in numbered]
    first_role = next((role for role, _ in parts if role != "system"), "")
    if spans and spans[0][0] == "user" != first_role:
        del spans[0]  # versions below 7 begin with a user's turn, if need be an empty one
    runs = []
    for role, indices in parts:
        most = len(indices) if role in ("system", "tool") else 1
        num_blocks = next((at for at, (each, _) in enumerate(spans[:most]) if each != role), len(spans[:most]))
        if num_blocks < most and role != "system":
            break
        own = [span for _, span in spans[:num_blocks]]
        del spans[:num_blocks]
        runs.append(_Run(role=role, messages=range(indices[0], indices[-1] + 1), spans=own))
    if spans or len(runs) < len(parts):
        raise Unusable("the messages cannot be located in what mistral-common makes of the conversation")
    return runs


def _agreed(run: _Run, chosen: Sequence[int]) -> bool:
    """Whether all messages of a run are chosen; False if none is. Raises Unusable otherwise."""
    flags = {index in chosen for index in run.messages}
    if len(flags) > 1:
        first, last = run.messages[0] + 1, run.messages[-1] + 1
        raise Unusable(f"mistral-common joins the messages {first} to {last}, so all of them have loss or none has")
    return flags == {True}


def _check_system_prompts(runs: Sequence[_Run], trained: dict[range, bool]) -> None:
    """Raise Unusable if a system prompt is in a user's block, and only one of the two has loss."""
    if any(run.role == "system" and not run.spans for run in runs):
        flags = {trained[run.messages] for run in runs if run.role in ("system", "user")}
        if len(flags) > 1:
            raise Unusable(
                "this version of the tokenizer writes the system prompt into a user's turn: both have loss or neither"
            )


def _muted(draft: ChatDraft, runs: Sequence[_Run]) -> list[Span]:
    """The tokens of assistant turns with a weight of 0."""
    turns = [run for run in runs if run.role == "assistant" and _agreed(run, draft.muted)]
    return [span for run in turns for span in run.spans]


def _remarks(draft: ChatDraft, runs: Sequence[_Run]) -> tuple[Remark, ...]:
    """What the conversation has and the tokens have not."""
    is_cut = any(first == end for run in runs for first, end in run.spans)
    found = [("calls", "")] if is_cut else []
    if draft.variables:
        found.append(("unread", "chat_template_kwargs; mistral-common has no chat template"))
    return tuple(found)
