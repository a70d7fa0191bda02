"""`ratel generate RUN|DIR PROMPT`: what a model adds to prompts.

The texts go to stdout, everything else to stderr. Invariant: nothing heavy is imported before the path is known to name
a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.config.overrides import is_override
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.report.completions import completion_lines, completions_to_json, cost_line
from ratel_cli.run.named_model import find_model

_OPTIONS = {"temperature": "--temperature", "max_new_tokens": "--max-new-tokens", "step": "--step"}
"""What people write as keys of the config, and is an option."""


def run(
    path: Path,
    prompt: str | None,
    overrides: Sequence[str],
    prompts_file: Path | None,
    *,
    max_new_tokens: int,
    temperature: float,
    raw: bool,
    step: int | None,
    as_json: bool,
) -> None:
    """Print what the model that `path` names adds to each prompt. Raises RatelError."""
    if prompts_file is not None and prompt is not None:
        if not is_override(prompt):
            raise BadInput("arguments 'PROMPT' and '--prompts': both name prompts", "leave out one of them")
        overrides, prompt = [prompt, *overrides], None  # the prompts are in the file, so this is a key
    if prompts_file is None and not (prompt or "").strip():
        raise BadInput(
            "there is no prompt" if prompt is None else "the prompt is empty",
            'write it after the model: ratel generate DIR "..."; or name a file with --prompts',
        )
    for override in overrides:
        name, _, value = override.partition("=")
        option = _OPTIONS.get(name.strip())
        if option is not None:
            raise BadInput(f"argument '{override}': this is no key of a config", f"write {option} {value.strip()}")
    log = RunLog()
    named = find_model(path, log, overrides)
    from ratel_cli.run.generate import GenerationRequest, generate

    request = GenerationRequest(
        prompt=prompt,
        prompts_file=prompts_file,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        raw=raw,
        step=step,
    )
    found = generate(named, request, log)
    if as_json:
        sys.stdout.write(json.dumps(completions_to_json(found), indent=2) + "\n")
    else:
        page = RunLog(sys.stdout)
        for line in completion_lines(found):
            page.say(line)
    log.say(cost_line(found))
