"""Nothing that Ratel imports fetches code from the hub."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from ratel_cli.model.values.fetched_code import no_fetched_code
from tests.tiers import rotating

_KERNELS = """
import sys
def get_kernel(*arguments, **options):
    print("fetched", arguments, file=sys.stderr)
"""


IMPORTS = {
    "of adapters": "import ratel_cli.model.export.adapters",
    "of diffusers": "from ratel_cli.model.export.denoiser import denoiser_class; denoiser_class()",
}


@pytest.mark.parametrize(("imports", "with_kernels"), rotating(list(IMPORTS), [True, False], full_pairs=True))
def test_importing_what_imports_peft_fetches_nothing_and_says_nothing(
    tmp_path: Path, imports: str, with_kernels: bool
) -> None:
    """bitsandbytes asks for a kernel where the processor computes in bf16 with AVX-512."""
    if with_kernels:
        (tmp_path / "kernels.py").write_text(_KERNELS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {IMPORTS[imports]}"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_import_fails_within_and_all_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, logger = ModuleType("kernels"), logging.getLogger("bitsandbytes.backends.cpu.ops")
    for known in (theirs, None):
        if known is None:
            monkeypatch.delitem(sys.modules, "kernels")
        else:
            monkeypatch.setitem(sys.modules, "kernels", known)
        with no_fetched_code():
            assert logger.disabled and find_spec("kernels") is None
            with pytest.raises(ImportError):
                importlib.import_module("kernels")
        assert sys.modules.get("kernels") is known and not logger.disabled
