"""Keeps packages that Ratel imports from fetching code.

Where the package `kernels` is installed, and the processor computes in bf16 with AVX-512, bitsandbytes (0.50) downloads
a compiled kernel from the hub and loads it, as soon as it is imported. PEFT imports it wherever it is installed. Ratel
has no use for that kernel. Without `kernels`, bitsandbytes warns that it could not.

Invariant: afterwards a caller's own code finds `kernels` and the logger as they were.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_FETCHES: Final = "kernels"
_WARNS: Final = "bitsandbytes.backends.cpu.ops"


@contextmanager
def no_fetched_code() -> Iterator[None]:
    """A context for imports of PEFT, and of what imports it."""
    logger, missing = logging.getLogger(_WARNS), object()
    module, was_disabled = sys.modules.get(_FETCHES, missing), logger.disabled
    sys.modules[_FETCHES] = None  # type: ignore[assignment]  # an import of it fails
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled
        if module is missing:
            del sys.modules[_FETCHES]
        else:
            sys.modules[_FETCHES] = module  # type: ignore[assignment]
