"""The environment that every test has, whatever the caller's is.

`fix` replaces the variables of this process, its time zone and its umask, and gives it an empty home.
tests/conftest.py calls it before anything imports torch or asks for a variable; processes that tests start inherit
what it set. `restored` undoes what a test changed, and gives each test a cache directory that no other has used.
Invariant: of the caller's variables, only those of `_KEPT` reach a test, and what one test changes no other test sees.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_KEPT = (
    "PATH", "LD_LIBRARY_PATH", "TMPDIR",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",  # without them, some processors compute wrong results
    "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID",
    "RATEL_SIMULATED_GPU", "RATEL_KEEP_RECORDINGS", "RATEL_STRESS_KILLS",
)  # fmt: skip
"""What programs need to run at all, and what asks for tests. Variables that Ratel itself reads are not kept."""
_FIXED = {
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
    "TZ": "UTC",
    # Models of tests are tiny: more threads only wait for each other, and the workers share the cores already.
    "OMP_NUM_THREADS": "1",
    # Listing the fonts takes seconds. They are the machine's, so that the list may outlive the tests.
    "MPLCONFIGDIR": str(Path(__file__).parents[1] / "build" / "matplotlib"),
}
_UMASK = 0o022
_numbers = itertools.count()


def fix() -> None:
    """Give this process the environment of tests, for as long as it lives."""
    home = tempfile.mkdtemp(prefix="ratel-tests-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    _replace({**kept, **_FIXED, "HOME": home})


@contextmanager
def restored() -> Iterator[None]:
    """A context whose changes of variables, umask and working directory end with it; with a cache directory of its own.

    The cache directory, which no other test has, is not there yet.
    """
    variables, directory = dict(os.environ), Path.cwd()
    cache = Path(os.environ["HOME"]) / f"cache-{next(_numbers)}"
    os.environ["XDG_CACHE_HOME"] = str(cache)
    yield
    _replace(variables)
    os.chdir(directory)
    shutil.rmtree(cache, ignore_errors=True)


def _replace(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    os.umask(_UMASK)
    time.tzset()
