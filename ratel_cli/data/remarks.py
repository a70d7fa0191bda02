"""Remarks on rows that are used, though not all of what they have: what was left out, how often, and what to do.

Invariant: what changes the meaning of a row in another tool and is not used here has a remark. A notice counts the rows
with the same remark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Remark = tuple[str, str]
"""A kind, and what it is about."""

_OTHER_TEMPLATE = "`chat_template_jinja` sets a template that writes them"
_OF_CONVERSATIONS = {
    "muted": "messages with `weight: 0` have no loss {}",
    "calls": (
        "this version of the tokenizer leaves out tool calls, and what they return, before the last user turn {}, as "
        "it does in a prompt"
    ),
    "marks": (
        "the chat template takes `<think>` or `</think>` for words of an answer {}; write the reasoning under the key "
        "`reasoning_content` of the message, without marks"
    ),
    "ends": (
        "answers end with {what} {}, at which the model does not stop yet: the generation_config.json of an exported "
        "or merged model lists it; with an adapter, pass it as `eos_token_id` when you generate"
    ),
    "open": (
        "the answers teach no stop token {}, so the model does not learn where to end: `eot_tokens` names the token "
        "that ends a turn, and `chat_template` or `chat_template_jinja` sets a template that writes one"
    ),
    "ids": "ids of tool calls are replaced {}: mistral-common takes those of nine letters and digits",
}
"""By kind, where all remarks of it say the same."""


def sentences(counts: Mapping[Remark, int], num_rows: int) -> Iterator[str]:
    """A notice for each remark, with the number of rows that have it."""
    for (kind, what), number in sorted(counts.items()):
        yield _sentence(kind, what, f"in {number} of {num_rows} conversations", f"of {number} of {num_rows} rows")


def _sentence(kind: str, what: str, where: str, whose: str) -> str:
    match kind:
        case "lost" if what.startswith("text of "):
            role = what.removeprefix("text of ").removesuffix(" messages")
            known = "`roles` gives its turns a role that the template knows"
            if role in ("user", "assistant", "system", "tool"):
                known = "`ratel data` shows what is trained, and `chat_template_jinja` sets another template"
            return f"the chat template leaves out {what} {where}; {known}"
        case "lost":
            return f"the chat template leaves out {what} {where}; {_OTHER_TEMPLATE}"
        case "reasoning" if what == "earlier":
            return (
                f"the chat template leaves out the reasoning of earlier assistant turns {where}, as it does in a prompt"
            )
        case "reasoning":
            return (
                f"the chat template leaves out the reasoning of the last assistant turn {where}; if it reads another "
                "key, `message_property_mappings` names yours: {reasoning_content: KEY}"
            )
        case _ if kind in _OF_CONVERSATIONS:
            return _OF_CONVERSATIONS[kind].format(where, what=what)
        case "unread":
            column, _, way = what.partition("; ")
            return f"the column {column} {whose} is not read: {way}"
        case "key":
            key, _, way = what.partition("; ")
            return f"the key {key} of messages is not read {where}: {way}"
        case _:
            assert kind == "media"
            return f"{what} {whose} are left out, because of `media: ignore`"
