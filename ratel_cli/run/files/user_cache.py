"""The user's cache directory: what it takes time to find out, and what it depends on.

Invariant: nothing needs a cached file. Any of them may be missing, damaged or made by other software, and each is
written whole or not at all, because another command may be reading it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ratel_cli.json_fields import hash_of
from ratel_cli.neighbours import version_of


def user_cache_directory() -> Path:
    """The directory of all that Ratel caches for the user, whether it exists or not."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "ratel"


def user_cache_file(kind: str, depends_on: object) -> Path:
    """The file of this kind for `depends_on`: any value of JSON that holds everything which the content depends on."""
    return user_cache_directory() / f"{kind}-{hash_of(depends_on)[:16]}.json"


def write_user_cache(file: Path, text: str) -> None:
    """Write the whole file or none of it. Raises OSError."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def software_versions(*packages: str) -> tuple[str, ...]:
    """The version of each package; an empty string for one that is not installed."""
    return tuple(map(version_of, packages))


def ratel_version() -> str:
    """The version of Ratel itself."""
    return version_of("ratel-cli") or "(not installed)"
