"""`ratel init [MODEL]`: writes a config to begin with. Without a model, but with data, the model's place is kept.

Invariants: a file that exists is not replaced unless the user insists; nothing heavy is imported before that is known,
and that the keys of the command line are right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.commands import command, name_run
from ratel_cli.config.overrides import is_override
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.new_file import check_new, write_new
from ratel_cli.run.start.starting_text import starting_text

_NEXT = (
    ("check", "find all errors in it"),
    ("data", "show samples, with the tokens that have loss marked"),
    ("plan", "predict time, memory, disk and wear"),
    ("finetune", "train"),
    ("report", "write a page with the curves, while it trains or afterwards"),
)


def run(model: str | None, data: Sequence[str], output: Path, overrides: Sequence[str], *, overwrite: bool) -> None:
    """Write the config. Raises RatelError."""
    check_new(output, overwrite=overwrite)
    if model is not None and is_override(model) and not os.path.isdir(model):
        overrides, model = [model, *overrides], None
    if model is None and not data and not any(each.partition("=")[0].strip() == "base_model" for each in overrides):
        raise BadInput(
            "which model? `ratel init` needs the model that is to be trained",
            "name a directory with config.json and safetensors files, or a hub id: ratel init Qwen/Qwen3-8B",
        )
    name_run(output)
    log = RunLog()
    text = starting_text(model, data, output, overrides)
    from ratel_cli.run.start.init import starting_config

    start = starting_config(text, model, data, output, log)
    write_new(output, start.text, overwrite=overwrite)
    log.facts(start.rows)
    log.say(f"wrote {output}; now")
    width = max(len(name) for name, _ in _NEXT)
    for name, words in _NEXT:
        log.say(f"  {command(name, output).strip('`')}{' ' * (width - len(name))}  {words}")
