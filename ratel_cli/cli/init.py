"""`ratel init [MODEL]`: writes a config to begin with. Without a model, but with data, the model's place is kept.

Invariants: a file that exists is not replaced unless the user insists; nothing heavy is imported before that is known,
and that the keys of the command line are right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ratel_cli.commands import command, name_run
from ratel_cli.config.overrides import is_override
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.new_file import check_new, write_new
from ratel_cli.run.start.starting_text import starting_text

_MOST_MODELS = 5
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
    found = sorted(_models_here()) if model is None else []
    if (
        model is None
        and (not data or len(found) == 1)
        and not any(each.partition("=")[0].strip() == "base_model" for each in overrides)
    ):
        raise _which_model(found)
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


def _which_model(found: Sequence[str]) -> BadInput:
    hint = "name a directory with config.json and safetensors files, or a hub id: ratel init Qwen/Qwen3-8B"
    if found:
        hint = f"found here: {', '.join(found[:_MOST_MODELS])}; or name a hub id such as Qwen/Qwen3-8B"
    return BadInput("which model? `ratel init` needs the model that is to be trained", hint)


def _models_here() -> Iterator[str]:
    """Directories below this one, at most three levels deep, that hold a model."""
    for pattern in ("*/config.json", "*/*/config.json", "*/*/*/config.json"):
        for path in Path().glob(pattern):
            directory = path.parent
            if any(part.startswith(".") for part in directory.parts) or not any(directory.glob("*.safetensors")):
                continue
            if not os.path.isfile(path):
                continue
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if isinstance(values, dict) and "model_type" in values:
                yield str(directory)
