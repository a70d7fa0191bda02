"""Commands of Ratel in messages, quoted so that a user can paste them into a shell.

Code that does not know how the user called the run writes `CONFIG`: "`ratel restore CONFIG`". Where the message is
printed, the word becomes what the command line called the run. Invariant: texts that are stored keep the word.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ratel_cli.errors import RatelError

_PLACEHOLDER = re.compile(r"`ratel (\w+) CONFIG(?= |`)")
_TAKE_OVERRIDES = frozenset({"check", "data", "finetune", "plan", "restore"})

_named_run: ContextVar[tuple[str, ...]] = ContextVar("named_run", default=())
"""The RUN or CONFIG argument of this command line, and its overrides; empty: it named no run."""


def command(*words: object) -> str:
    """The words after `ratel` as a command to paste, in backquotes."""
    return f"`{shlex.join(['ratel', *map(str, words)])}`"


def pip_install(package: str) -> str:
    """The command that installs a package where Ratel itself is installed, to paste.

    The `pip` of the shell is another one where the environment is not activated.
    """
    python = Path(sys.executable)
    found = shutil.which("pip")
    if found is not None and Path(found).parent == python.parent:
        return shlex.join(["pip", "install", package])
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", "pip", "install", package])


def name_run(path: Path, overrides: Sequence[str] = ()) -> None:
    """From now on, messages call the run so, unless the command line has named another one before."""
    if not _named_run.get():
        _named_run.set((str(path), *overrides))


def forget_run() -> None:
    """From now on, messages keep `CONFIG`, until a run is named."""
    _named_run.set(())


@contextmanager
def errors_about(path: Path) -> Iterator[None]:
    """A context whose errors are about the run that `path` names, whatever the command line has named before."""
    try:
        yield
    except RatelError as error:
        error.hint = None if error.hint is None else _named(error.hint, (str(path),))
        raise


def with_run_named(text: str) -> str:
    """The text with the run's name, and the overrides of the command line, in commands about `CONFIG`."""
    words = _named_run.get()
    return _named(text, words) if words else text


def _named(text: str, words: Sequence[str]) -> str:
    def named(found: re.Match[str]) -> str:
        path, *overrides = words
        kept = overrides if found[1] in _TAKE_OVERRIDES else []
        return f"`{shlex.join(['ratel', found[1], path, *kept])}"

    return _PLACEHOLDER.sub(named, text)
