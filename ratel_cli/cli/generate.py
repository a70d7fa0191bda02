"""`ratel generate RUN|DIR PROMPT...`: texts from prompts; with `--class`, images of a diffusion transformer.

The texts go to stdout, everything else to stderr. Invariant: nothing heavy is imported before the path is known to name
a model, and torch not before the prompts are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ratel_cli.config.overrides import is_override
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.report.words.completions import completion_lines, completions_to_json, cost_line
from ratel_cli.run.inputs.named_model import find_model

_OPTIONS = {"temperature": "--temperature", "max_new_tokens": "--max-new-tokens", "step": "--step"}
"""What people write as keys of the config, and is an option."""
_STDIN = "-"
_HINT = 'write it after the model: ratel generate DIR "..."; or name a file with --prompts, or stdin with -'


def run(
    path: Path,
    arguments: Sequence[str],
    prompts_file: Path | None,
    *,
    max_new_tokens: int,
    temperature: float,
    raw: bool,
    step: int | None,
    as_json: bool,
) -> None:
    """Print what the model that `path` names adds to each prompt. `arguments`: prompts, and keys of the config.

    Raises RatelError.
    """
    texts, overrides = _divided(arguments, has_file=prompts_file is not None)
    for override in overrides:
        name, _, value = override.partition("=")
        option = _OPTIONS.get(name.strip())
        if option is not None:
            raise BadInput(f"argument '{override}': this is no key of a config", f"write {option} {value.strip()}")
    log = RunLog()
    named = find_model(path, log, overrides)
    from ratel_cli.data.text.prompts import read_prompts

    if texts == [_STDIN]:
        prompts_file = Path(_STDIN)
    prompts = list(texts) if prompts_file is None else read_prompts(prompts_file)
    from ratel_cli.run.ask.generate import GenerationRequest, generate

    request = GenerationRequest(
        prompts=tuple(prompts),
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


def check_options(others: Mapping[str, object], *, makes_images: bool) -> None:
    """Raise BadInput for an option that is given and is for the other kind of what a model makes."""
    wrong = next((name for name, value in others.items() if value), None)
    if wrong is not None:
        reason = "is for texts, and --class makes images" if makes_images else "is for images, which --class makes"
        raise BadInput(f"option '{wrong}' {reason}", f"leave {wrong} out")


def run_images(
    path: Path,
    overrides: Sequence[str],
    classes: Sequence[int],
    output: Path | None,
    *,
    num_steps: int,
    guidance: float,
    step: int | None,
) -> None:
    """Write what the diffusion transformer that `path` names makes of noise for each class. Raises RatelError."""
    prompts = [each for each in overrides if not is_override(each)]
    if prompts:
        raise BadInput("arguments 'PROMPT' and '--class': a model makes texts or images", "leave out one of them")
    if output is None:
        raise BadInput("--class needs -o DIR, the directory of the images")
    log = RunLog()
    named = find_model(path, log, overrides)
    from ratel_cli.run.ask.generate_images import ImageRequest, generate_images

    request = ImageRequest(classes=tuple(classes), num_steps=num_steps, guidance=guidance, step=step, directory=output)
    for file in generate_images(named, request, log):
        log.say(f"wrote {file}")


def _divided(arguments: Sequence[str], *, has_file: bool) -> tuple[list[str], list[str]]:
    """The prompts among the arguments, and those that change the config. `has_file`: a file has the prompts.

    If all look like `KEY=VALUE`, and no file has the prompts, the first is one. Raises BadInput.
    """
    texts = [each for each in arguments if not is_override(each)]
    others = [each for each in arguments if is_override(each)]
    if not texts and not has_file:
        texts, others = others[:1], others[1:]
    if has_file and texts:
        raise BadInput("arguments 'PROMPT' and '--prompts': both name prompts", "leave out one of them")
    if _STDIN in texts and len(texts) > 1:
        raise BadInput("arguments 'PROMPT' and '-': both name prompts", "leave out one of them")
    if not has_file and not texts:
        raise BadInput("there is no prompt", _HINT)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise BadInput("the prompt is empty" if len(texts) == 1 else f"prompt {number} is empty", _HINT)
    return texts, others
