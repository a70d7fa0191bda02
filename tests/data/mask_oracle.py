"""The ids and labels that a text must give, written out by hand: the oracle for every form of data.

A test writes the text of a sample with the part that has loss in brackets: `<|im_start|>user\\nhi<|im_end|>⟦yes⟧`. Each
character and each special token is one token, and its id is its place in a list, so no tokenizer is needed to know
them.
"""

from __future__ import annotations

import re
import string

SPECIAL = ["<eos>", "<bos>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
OPENED, CLOSED = "⟦", "⟧"
NO_LOSS = -100

_ALL = [*SPECIAL, *CHARACTERS]
_PIECES = re.compile("|".join(map(re.escape, [*SPECIAL, OPENED, CLOSED])) + r"|[\s\S]")


def vocabulary() -> dict[str, int]:
    """Every token with its id."""
    return {token: place for place, token in enumerate(_ALL)}


def ids_and_labels(marked: str) -> tuple[list[int], list[int]]:
    """The ids of a marked text, and its labels: the id where there is loss, -100 elsewhere."""
    ids, labels, has_loss = [], [], False
    for piece in _PIECES.findall(marked):
        if piece in (OPENED, CLOSED):
            has_loss = piece == OPENED
            continue
        ids.append(_ALL.index(piece))
        labels.append(ids[-1] if has_loss else NO_LOSS)
    return ids, labels


def marked_samples(*texts: str) -> list[tuple[list[int], list[int]]]:
    """The samples of marked texts; nothing predicts the first token."""
    return [(ids, [NO_LOSS, *labels[1:]]) for ids, labels in map(ids_and_labels, texts)]
