"""The base model and the data of the end-to-end tests, and their manners: one thread, deterministic kernels."""

from __future__ import annotations

from tests.e2e.conftest import _deterministic_like_a_run, _one_thread, base, rows

__all__ = ["_deterministic_like_a_run", "_one_thread", "base", "rows"]
