"""The result of `ratel generate`, as text that a person reads and as JSON.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ratel_cli.units import counted, format_seconds, format_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model adds to one prompt."""

    prompt: object
    """The text, or the list of messages."""
    text: str
    """What the model adds, without special tokens."""
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    """The tokens of `text`, with the one that ends it if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """All completions of one command, and what they cost."""

    model: str
    """Whose weights they are, such as `outputs/my-run, step 40`."""
    completions: tuple[Completion, ...]
    batch_size: int
    """Prompts that get their next token in one pass over the blocks."""
    num_passes: int
    """Passes over all blocks. Each gives a token to every prompt of its batch."""
    num_resident_blocks: int
    """Blocks that were read once and stayed in memory."""
    seconds: float
    bytes_read: int
    """Bytes of weights that were read."""

    @property
    def seconds_per_pass(self) -> float:
        """What a token of every prompt of a batch takes."""
        return self.seconds / max(1, self.num_passes)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights that were read for it."""
        return self.bytes_read // max(1, self.num_passes)


def completion_lines(found: Completions) -> Iterator[str]:
    """The texts. Several of them have a line with their number above them."""
    for number, each in enumerate(found.completions, start=1):
        if len(found.completions) > 1:
            yield f"--- prompt {number}"
        yield each.text


def cost_line(found: Completions) -> str:
    """What the tokens cost, in one line."""
    num_tokens = sum(len(each.token_ids) for each in found.completions)
    together = f" for {found.batch_size} prompts at once" if found.batch_size > 1 else ""
    return (
        f"{counted(num_tokens, 'token')} in {format_seconds(found.seconds)}; a token{together} takes "
        f"{format_seconds(found.seconds_per_pass)} and reads {format_traffic(found.bytes_per_pass)} of weights"
    )


def completions_to_json(found: Completions) -> dict[str, object]:
    """The content that `ratel generate --json` prints."""
    costs = {"seconds_per_pass": found.seconds_per_pass, "bytes_per_pass": found.bytes_per_pass}
    return {**asdict(found), **costs}
