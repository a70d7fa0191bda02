"""What turns conversations into tokens: the interface of all ways to do it.

Invariant: the tokens before an assistant turn are those of the prompt for it, as far as the format allows it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratel_cli.closing import Closing
from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.samples.samples import TokenIds
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.drafts import ChatDraft, Unusable

IsWhole = Callable[[ChatDraft], bool]
"""Whether all tokens of a conversation have loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedChat:
    """The tokens of a whole conversation."""

    input_ids: TokenIds
    """Shape `[tokens]`."""
    labels: TokenIds
    """Shape `[tokens]`; not shifted, -100 where there is no loss."""
    remarks: tuple[Remark, ...] = ()
    """What the conversation has and the tokens have not."""
    skips_header: bool = False
    """Whether loss begins behind the headers of turns, because there is no prompt for a turn."""


FinishChats = Callable[[], Sequence[EncodedChat | Unusable]]
"""Waits for conversations that were begun, and gives the tokens of each, or why it has none. Raises BadInput."""


class ChatEncoder(Closing):
    """Encodes conversations, and owns what it needs for it."""

    @abstractmethod
    def begin(self, drafts: Sequence[ChatDraft]) -> FinishChats:
        """Begin to encode conversations, in the background if that is possible. Raises BadInput, EnvironmentFailure."""

    @abstractmethod
    def prompts(self, conversations: Sequence[list[ChatMessage]]) -> list[list[int] | Unusable]:
        """The tokens that the model continues with its next turn, for each conversation, or why it has none.

        Raises BadInput, EnvironmentFailure.
        """
