"""`ratel eval RUN|DIR DATA`: the loss of a model on the rows of a file.

The result goes to stdout, everything else to stderr. Invariant: nothing heavy is imported before the path is known to
name a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.words.evaluation import evaluation_rows, evaluation_to_json
from ratel_cli.run.inputs.named_model import find_model


def run(path: Path, data: str, overrides: Sequence[str], *, step: int | None, as_json: bool) -> None:
    """Evaluate the model that `path` names on the rows of `data`. Raises RatelError."""
    log = RunLog()
    named = find_model(path, log, overrides)
    from ratel_cli.run.ask.evaluate import evaluate

    found = evaluate(named, data, log, overrides=tuple(overrides), step=step)
    if as_json:
        sys.stdout.write(json.dumps(evaluation_to_json(found), indent=2) + "\n")
    else:
        RunLog(sys.stdout).facts(evaluation_rows(found))
