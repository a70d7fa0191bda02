"""A user's YAML file: its text, and the places in it that pydantic's findings are about.

Invariant: a file that cannot be read gives one BadInput with the file's name, whatever the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ratel_cli.config.yaml.yaml_marks import MAX_TEXT_BYTES, Marked, Where
from ratel_cli.errors import BadInput
from ratel_cli.input_files import open_to_read, uncompressed_name
from ratel_cli.units import format_bytes

Location = tuple[int | str, ...]
"""A path into nested values, as in pydantic's errors: keys and list positions, from the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPlace:
    """Where a location is in the file. If the user did not write it, the innermost mapping around it."""

    name: str
    """The dotted key, as the user wrote it."""
    key: Where
    """Where the key is."""
    value: Where
    """Where its value is."""
    node: Marked
    """The value."""


def read_file(path: Path, what: str) -> str:
    """The text of a file, which may be compressed. `what` it should be ("config") is for messages.

    Raises BadInput, also if it is too large.
    """
    try:
        with open_to_read(path) as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError as exc:
        raise BadInput(f"{path}: no such file", similar_path(path, is_config_name)) from exc
    except IsADirectoryError as exc:
        raise BadInput(f"{path}: is a directory", "write the path of the YAML file") from exc
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise BadInput(f"{path}: not a valid file name") from exc
    if len(content) > MAX_TEXT_BYTES:
        raise BadInput(f"{path}: larger than {format_bytes(MAX_TEXT_BYTES)}; this is not a {what}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = exc.object[: exc.start].decode("utf-8-sig", errors="replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"{path}:{line}:{column}: not UTF-8 text (byte 0x{exc.object[exc.start]:02x})"
        raise BadInput(message, "save the file as UTF-8") from exc


def locate(root: Marked, location: Location) -> KeyPlace:
    """The place of a location, or of the innermost mapping around it that the user wrote."""
    names: list[str] = []
    node, key = root, root.where
    for step in location:
        content = node.content
        if isinstance(content, dict) and step in content:
            entry = content[str(step)]
            names.append(entry.written or (str(step) if step == location[-1] else ""))
            node, key = entry.value, entry.where
        elif isinstance(content, list) and isinstance(step, int):
            names.append(str(step))
            node = content[step]
            key = node.where
        else:
            names.append(str(step))
    return KeyPlace(name=".".join(filter(None, names)), key=key, value=node.where, node=node)


def is_written(root: Marked, location: Location) -> bool:
    """True if the user wrote this key."""
    around = locate(root, location[:-1]).node.content
    return isinstance(around, dict) and location[-1] in around


def keys_by_place(root: Marked) -> dict[Where, str]:
    """The dotted key at each place: where it stands, and where its value does. As the user wrote it, with positions."""
    found: dict[Where, str] = {}
    waiting: list[tuple[tuple[str, ...], Marked]] = [((), root)]
    while waiting:
        above, node = waiting.pop()
        inner: list[tuple[str, Where, Marked]] = []
        if isinstance(node.content, dict):
            inner = [(entry.written, entry.where, entry.value) for entry in node.content.values()]
        elif isinstance(node.content, list):
            inner = [(str(number), each.where, each) for number, each in enumerate(node.content)]
        for name, where, value in inner:
            steps = (*above, name)
            for place in (where, value.where):
                found.setdefault(place, ".".join(steps))
            waiting.append((steps, value))
    return found


def place_of_keys(root: Marked, location: Location, keys: Sequence[str]) -> Where:
    """Where the first of these keys is that the user wrote; if none, where their mapping is."""
    for key in keys:
        if is_written(root, (*location, key)):
            return locate(root, (*location, key)).key
    return locate(root, location).value


def similar_path(path: Path, is_meant: Callable[[Path], bool]) -> str | None:
    """A hint with a name like that of `path` among what is next to it and may be meant; None without one."""
    try:
        names = [each.name for each in path.parent.iterdir() if is_meant(each)]
    except (OSError, ValueError):
        return None
    # Without what all names of configs end in: `nope.yaml` is not like `typo.yaml`.
    stems = {Path(name).stem: name for name in names}
    close = get_close_matches(path.stem, stems, n=1)
    return f"did you mean {path.with_name(stems[close[0]])}?" if close else None


def is_config_name(path: Path) -> bool:
    """Whether a file of this name may be a config."""
    return uncompressed_name(path).suffix in (".yaml", ".yml", ".json")
