"""`ratel env [RUN|DIR ...]`: versions and hardware, for a report of a bug.

Invariant: nothing heavy is imported, so it works where torch does not; and nothing private is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ratel_cli.console import RunLog
from ratel_cli.hardware.environment import describe_environment
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.report.words.environment import environment_rows
from ratel_cli.run.files.places import find_places
from ratel_cli.run.files.user_cache import software_versions

_PACKAGES: Final = (
    "ratel-cli", "torch", "transformers", "tokenizers", "safetensors", "datasets", "huggingface-hub", "numpy",
    "rich", "pydantic", "flash-attn", "mistral-common",
)  # fmt: skip


def run(arguments: Sequence[Path], *, as_json: bool) -> None:
    """Print what this machine is. Raises BadInput."""
    places = find_places(arguments, RunLog())
    versions = zip(_PACKAGES, software_versions(*_PACKAGES), strict=True)
    found = describe_environment(places.paths, {name: version for name, version in versions if version}, SystemFiles())
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        RunLog(sys.stdout).facts(environment_rows(found))
