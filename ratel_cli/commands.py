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
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from ratel_cli.errors import RatelError

_PLACEHOLDER = re.compile(r"`ratel (\w+) CONFIG(?= |`)")
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)""")
"""In a requirement: the extra that it belongs to."""
_TAKE_OVERRIDES = frozenset({"check", "data", "finetune", "plan", "restore"})

_named_run: ContextVar[tuple[str, ...]] = ContextVar("named_run", default=())
"""The RUN or CONFIG argument of this command line, and its overrides; empty: it named no run."""


def command(*words: object) -> str:
    """The words after `ratel` as a command to paste, in backquotes."""
    return f"`{shlex.join(['ratel', *map(str, words)])}`"


def pip_install(*packages: str) -> str:
    """The command that installs packages where Ratel itself is installed, to paste.

    The `pip` of the shell is another one where the environment is not activated. What pipx and uv make has none.
    """
    python, prefix = Path(sys.executable), Path(sys.prefix)
    found = shutil.which("pip")
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    if (prefix / "pipx_metadata.json").is_file():
        installer = ["pipx", "runpip", prefix.name, "install"]
    elif find_spec("pip") is None and shutil.which("uv") is not None:
        installer = ["uv", "pip", "install", "--python", str(python)]
    elif found is not None and Path(found).parent == Path(sys.executable).parent:
        installer = ["pip", "install"]
    else:
        installer = [str(python), "-m", "pip", "install"]
    return shlex.join([*installer, *packages])


def install_extras(*extras: str) -> str:
    """The command that installs what these extras of Ratel need, to paste.

    It names the packages themselves, which any index has: Ratel may have come from a file or a clone. Where nothing is
    installed, so that no list of them is there, it names the clone that this file is in.
    """
    try:
        needed = requires("ratel-cli") or []
    except PackageNotFoundError:
        needed = []
    wanted = [each.partition(";")[0].strip() for each in needed if set(_EXTRA.findall(each)) & set(extras)]
    return pip_install(*(wanted or [f"{Path(__file__).parents[1]}[{','.join(extras)}]"]))


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
