"""What comes before a model is built: freed memory goes back to the system, and transformers is silent."""

from __future__ import annotations

from transformers.utils import logging as transformers_logging

from ratel_cli.hardware.host import return_large_buffers


def prepare_process() -> None:
    """Let freed memory go back to the system, and turn off what transformers would show."""
    return_large_buffers()
    silence_transformers()


def silence_transformers() -> None:
    """Turn off the messages and progress bars of transformers."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
