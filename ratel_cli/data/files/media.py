"""Images, video and sound in rows: which columns, parts of messages and marks in texts stand for them.

Ratel trains on text. Invariant: a row that has them is used only if the user says that they may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_KINDS = ("image", "video", "audio")
_COLUMNS = tuple(f"{kind}{rest}" for kind in _KINDS for rest in ("", "s", "_path", "_url", "_file", "_paths", "_urls"))
_COLUMNS += ("pixel_values", "pixel_values_videos", "input_features")
_MARK = re.compile(r"<(?:image|video|audio)>")
_AT_AN_END = re.compile(r"\A\s*<(?:image|video|audio)>|<(?:image|video|audio)>\s*\Z")


def media_column(record: Mapping[str, object]) -> str | None:
    """The first column of a row that has an image, video or sound; None if there is none."""
    return next((each for each in _COLUMNS if record.get(each) not in (None, "", [], {}, False, True)), None)


def is_media(kind: str) -> bool:
    """Whether a part of a message with this type is an image, video or sound, such as `image_url` or `input_audio`."""
    return kind.removeprefix("input_").startswith(_KINDS)


def has_media_parts(record: Mapping[str, object]) -> bool:
    """Whether a message of a row has an image, video or sound among its parts."""
    columns = [column for column in record.values() if isinstance(column, list)]
    messages = [each for column in columns for each in column if isinstance(each, dict)]
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(isinstance(part, dict) and is_media(str(part.get("type"))) for content in contents for part in content)


def has_mark(text: str) -> bool:
    """Whether a text begins or ends with the mark of an image, as in LLaVA. Elsewhere `<image>` may be a tag."""
    return _AT_AN_END.search(text) is not None


def without_marks(text: str) -> str:
    """The text without marks of images, video and sound, and without the line ends that set them apart."""
    return _MARK.sub("", text).strip("\n") if _MARK.search(text) else text
