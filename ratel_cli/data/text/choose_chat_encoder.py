"""Chooses what encodes the conversations of a tokenizer: its own library if it has one, else its chat template."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ratel_cli.data.text.chat_encoder import ChatEncoder, IsWhole
from ratel_cli.data.text.mistral_chats import MistralChats
from ratel_cli.data.text.mistral_tokenizer import MistralTokenizer
from ratel_cli.data.text.template_chats import TemplateChats
from ratel_cli.data.text.tokenizer import Tokenizer


def choose_chat_encoder(
    tokenizer: Tokenizer, *, is_whole: IsWhole, notice: Callable[[str], None], stop_ids: Collection[int] = ()
) -> ChatEncoder:
    """What encodes the conversations of a tokenizer. `notice` gets remarks for the user. `stop_ids`: tokens besides EOS
    with which a model stops."""
    if isinstance(tokenizer, MistralTokenizer):
        return MistralChats(tokenizer, is_whole=is_whole)
    return TemplateChats(tokenizer, is_whole=is_whole, notice=notice, stop_ids=stop_ids)
