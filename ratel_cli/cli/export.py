"""`ratel export RUN -o DIR`: writes a Hugging Face directory from a saved step.

Invariant: nothing heavy is imported before the run's config is known to be right.
"""

from __future__ import annotations

from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.run.files.output import check_export_output, finish_export
from ratel_cli.run.files.run_directory import find_run


def run(path: Path, step: int | None, output: Path, *, overwrite: bool) -> None:
    """Export the saved step `step`, or the last one. Raises RatelError."""
    log = RunLog()
    config = find_run(path, log)
    check_export_output(config, output, step=step, overwrite=overwrite)
    finish_export(output, log, option="-o")
    from ratel_cli.model.card import library_of
    from ratel_cli.run.context import open_context
    from ratel_cli.run.train.open import open_run, write_export

    with open_context(config, log) as context:
        context.listen()
        opened = open_run(context)
        exported = write_export(opened, opened.generation(step), output, overwrite=overwrite)
    log.say(f"exported step {exported} to {output}; load it with {library_of(config.task)}' from_pretrained")
