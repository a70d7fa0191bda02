"""`ratel schema`: the JSON schema of a config, for editors."""

from __future__ import annotations

import sys
from pathlib import Path

from ratel_cli.cli.arguments import check_option
from ratel_cli.config.json_schema import schema_text
from ratel_cli.console import RunLog
from ratel_cli.run.files.new_file import write_new


def run(output: Path | None, *, overwrite: bool) -> None:
    """Print the schema, or write it to `output`. Raises BadInput, EnvironmentFailure."""
    check_option("--overwrite", overwrite, only_with="-o FILE", is_met=output is not None)
    if output is None:
        sys.stdout.write(schema_text())
        return
    write_new(output, schema_text(), overwrite=overwrite)
    RunLog().say(f"wrote {output}; a config names it in its first line: # yaml-language-server: $schema={output}")
