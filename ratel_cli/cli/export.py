"""`ratel export RUN -o DIR`: a Hugging Face directory from a generation that a run's store keeps.

Called by `cli.app`. Nothing heavy is imported before the run's config is known to be good.
"""

from __future__ import annotations

from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.run.find import find_run


def run(path: Path, step: int | None, output: Path) -> None:
    """Export the generation of `step`, or the current one. Raises RatelError."""
    log = RunLog()
    config = find_run(path, log)
    from ratel_cli.run.context import open_context
    from ratel_cli.run.open import open_run, write_export

    with open_context(config, log) as context:
        context.listen()
        opened = open_run(context)
        exported = write_export(opened, opened.generation(step), output)
    log.say(f"saved step {exported} in {output}; load it with transformers' from_pretrained")
