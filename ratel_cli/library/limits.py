"""How much memory a model may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most memory that an open model may take, each as bytes or as a text such as "48GiB"."""

    host_memory: int | str | None = None
    """RAM. None: what is free when the model is opened, less a margin."""
    gpu_memory: int | str | None = None
    """GPU memory. None: what is free, less 5 %."""
