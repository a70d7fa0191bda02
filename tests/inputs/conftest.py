"""The base model and the data of the end-to-end tests, and deterministic kernels as they have them."""

from __future__ import annotations

from tests.e2e.conftest import _deterministic_like_a_run, base, rows

__all__ = ["_deterministic_like_a_run", "base", "rows"]
