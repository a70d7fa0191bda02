"""Remarks on rows that are used, though not all of what they have: what was left out, how often, and what to do.

Invariant: what changes the meaning of a row in another tool and is not used here has a remark. A notice counts the rows
with the same remark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Remark = tuple[str, str]
"""A kind, and what it is about."""

_SENTENCES = {
    "muted": "messages with `weight: 0` have no loss {where}",
    "calls": (
        "this version of the tokenizer leaves out tool calls, and what they return, before the last user turn {where}, "
        "as it does in a prompt"
    ),
    "marks": (
        "the chat template takes `<think>` or `</think>` for words of an answer {where}; write the reasoning under the "
        "key `reasoning_content` of the message, without marks"
    ),
    "ends": (
        "answers end with {what} {where}, at which the model does not stop yet: the generation_config.json of an "
        "exported or merged model lists it; with an adapter, pass it as `eos_token_id` when you generate"
    ),
    "open": (
        "the answers teach no stop token {where}, so the model does not learn where to end: `eot_tokens` names the "
        "token that ends a turn, and `chat_template` or `chat_template_jinja` sets a template that writes one"
    ),
    "ids": "ids of tool calls are replaced {where}: mistral-common takes those of nine letters and digits",
    "lost": "the chat template leaves out {what} {where}; `chat_template_jinja` sets a template that writes them",
    "lost text": (
        "the chat template leaves out {what} {where}; `roles` gives its turns a role that the template knows"
    ),
    **dict.fromkeys(
        (f"lost text of {role} messages" for role in ("user", "assistant", "system", "tool")),
        "the chat template leaves out {what} {where}; `ratel data` shows what is trained, and `chat_template_jinja` "
        "sets another template",
    ),
    "reasoning earlier": (
        "the chat template leaves out the reasoning of earlier assistant turns {where}, as it does in a prompt"
    ),
    "reasoning": (
        "the chat template leaves out the reasoning of the last assistant turn {where}; if it reads another key, "
        "`message_property_mappings` names yours: {{reasoning_content: KEY}}"
    ),
    "unread": "the column {name} {whose} is not read: {way}",
    "key": "the key {name} of messages is not read {where}: {way}",
    "media": "{what} {whose} are left out, because of `media: ignore`",
}
"""By kind, some with what it is about, or how that begins. Of a column or a key, that is its name and the way to have
it read."""


def sentences(counts: Mapping[Remark, int], num_rows: int) -> Iterator[str]:
    """A notice for each remark, with the number of rows that have it."""
    for (kind, what), number in sorted(counts.items()):
        name, _, way = what.partition("; ")
        keys = (f"{kind} {what}", f"{kind} {what.partition(' of ')[0]}", kind)
        form = next(_SENTENCES[key] for key in keys if key in _SENTENCES)
        where, whose = f"in {number} of {num_rows} conversations", f"of {number} of {num_rows} rows"
        yield form.format(what=what, name=name, way=way, where=where, whose=whose)
