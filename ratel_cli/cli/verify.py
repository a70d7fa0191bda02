"""`ratel verify RUN|DIR`: is every byte still what was written, and is the export what the store says?

Called by `cli.app`. Nothing heavy is imported before what is given is known to be a run or a model. The table goes to
stdout, everything else to stderr.

Invariant: everything that was found is told; if anything is wrong, the exit code is 4.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.verify import check_lines, checks_to_json, raise_if_wrong
from ratel_cli.run.find import find_run, is_output_of_run


def run(path: Path, *, as_json: bool) -> None:
    """Verify a run, or a directory with a model. Raises RatelError; IntegrityFailure after all was shown."""
    log = RunLog()
    config = None if path.is_dir() and not is_output_of_run(path) else find_run(path, log)
    from ratel_cli.run.verify import verify_directory, verify_run
    from ratel_cli.store.store import Store

    if config is None:
        checks = verify_directory(path, log)
    elif path.is_dir() and not Store.exists(config.storage.paths):
        log.notice(f"there is no store in {', '.join(map(str, config.storage.paths))}; only the export is verified")
        checks = verify_directory(path, log)
    else:
        checks = verify_run(config, log)
    if as_json:
        sys.stdout.write(json.dumps(checks_to_json(checks), indent=2) + "\n")
    else:
        page = RunLog(sys.stdout)
        for line in check_lines(checks):
            page.say(line)
    raise_if_wrong(checks)
