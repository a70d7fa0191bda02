"""What tests show a person: screens of terminals and pictures of pages, kept if somebody asks for them.

`RATEL_KEEP_RECORDINGS` names a directory, which is made. Without it nothing is kept.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "RATEL_KEEP_RECORDINGS"


def keep(name: str, content: bytes) -> None:
    """Write a recording under this file name, if recordings are kept."""
    place = os.environ.get(VARIABLE)
    if place:
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / name).write_bytes(content)
