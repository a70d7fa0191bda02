"""Options of the commands about configs: `explain`, `schema`, `import`.

Each command imports its own file when it is called, so that `--help` and a wrong argument are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratel_cli.cli.arguments import ReplaceFile

commands = typer.Typer()


def _keys_from(incomplete: str) -> list[str]:
    """For completion in the shell: the keys of a config that begin like this."""
    from ratel_cli.config.describe import all_keys

    return [key for key in all_keys() if key.startswith(incomplete)]


@commands.command(
    help="Explain a key of the config. Prints its type, default, other names and meaning. Without KEY: what to ask.",
    epilog="Example: ratel explain storage.durability",
)
def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="A key, such as learning_rate or storage.paths; a key of another trainer, or a word such as qlora.",
            show_default=False,
            autocompletion=_keys_from,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    from ratel_cli.cli import explain as command

    command.run(key, as_json=as_json)


@commands.command(
    help="Print the JSON schema of a config. With it an editor completes keys, explains them and marks what is wrong.",
    epilog="Example: ratel schema -o ratel.schema.json",
)
def schema(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file to write. Default: print it.", show_default=False
        ),
    ] = None,
    overwrite: ReplaceFile = False,
) -> None:
    from ratel_cli.cli import schema as command

    command.run(output, overwrite=overwrite)


@commands.command(
    "import",
    help="Translate another trainer's config into one of Ratel's. It may be of axolotl, LLaMA-Factory, TRL, "
    "torchtune or transformers.",
    epilog="Example: ratel import llama3_full_sft.yaml -o run.yaml",
)
def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The other trainer's config, YAML or JSON.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The config to write. Default: print it.", show_default=False
        ),
    ] = None,
    overwrite: ReplaceFile = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of each key as JSON.")] = False,
) -> None:
    from ratel_cli.cli import import_config as command

    command.run(file, output, overwrite=overwrite, as_json=as_json)
