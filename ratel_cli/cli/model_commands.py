"""Options of the commands about trained models: `export`, `merge`, `verify`, `eval`, `generate`.

Each command imports its own file when it is called, so that `--help` and a wrong argument are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratel_cli.cli.arguments import ModelArgument, Overrides, Overwrite, RunPath, SavedStep
from ratel_cli.sizes import MergeBase

commands = typer.Typer()
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to write.", show_default=False)
]


@commands.command(
    help="Write a Hugging Face directory from a saved step of RUN.",
    epilog="Example: ratel export outputs/my-run --step 200 -o outputs/my-run-200",
)
def export(
    run: RunPath,
    output: Output,
    step: SavedStep = None,
    overwrite: Overwrite = False,
) -> None:
    from ratel_cli.cli import export as command

    command.run(run, step, output, overwrite=overwrite)


@commands.command(
    help="Merge the adapter of RUN into its base model, as PEFT does.",
    epilog="Example: ratel merge outputs/my-run -o outputs/my-run-merged",
)
def merge(
    run: RunPath,
    output: Output,
    step: SavedStep = None,
    base: Annotated[
        MergeBase,
        typer.Option(
            metavar="dequantised|original",
            help="For a run with load_in_4bit or load_in_8bit: merge into the dequantised base, with which the run "
            "computes, or into the original base.",
        ),
    ] = "dequantised",
    overwrite: Overwrite = False,
) -> None:
    from ratel_cli.cli import export as command

    command.run(run, step, output, overwrite=overwrite, merge_base=base)


@commands.command(
    help="Check every byte of a run, or of the model in a directory. Compares a run's store with its checksums, and "
    "its export with the store.",
    epilog="Example: ratel verify outputs/my-run",
)
def verify(
    run: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ratel_cli.cli import verify as command

    command.run(run, as_json=as_json)


@commands.command(
    "eval",
    help="Compute loss and perplexity of a model on rows of data. One block of the model is in memory at a time.",
    epilog="Example: ratel eval outputs/my-run test.jsonl datasets.0.type=alpaca",
)
def evaluate(
    run: ModelArgument,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="The rows: a file, a directory or a hub id.", show_default=False)
    ],
    overrides: Overrides = None,
    step: SavedStep = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ratel_cli.cli import evaluate as command

    command.run(run, data, overrides or [], step=step, as_json=as_json)


@commands.command(
    help="Generate text from one or more prompts. One block of the model is in memory at a time.",
    epilog='Example: ratel generate outputs/my-run "Why is the sky blue?" "And the sea?" --max-new-tokens 64',
)
def generate(
    run: ModelArgument,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT|-|KEY=VALUE",
            help="Texts to answer; without a chat template, or with --raw, texts to continue. - reads them from stdin, "
            "as from FILE. KEY=VALUE arguments change the config.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with one prompt in each line, or a .jsonl file with `prompt` or `messages` in each row. "
            "All arguments are KEY=VALUE then.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The most tokens to generate.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="T", help="0: always the most likely token. Above 0: tokens are sampled, with `seed`."
        ),
    ] = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the tokenizer's chat template.")] = False,
    classes: Annotated[
        list[int] | None,
        typer.Option(
            "--class",
            metavar="N",
            help="For a diffusion transformer: make an image of this class. Repeat it for more images.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="DIR", help="With --class: the directory of the images.", show_default=False),
    ] = None,
    denoising_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --class: steps from noise to an image.")
    ] = 50,
    guidance: Annotated[
        float,
        typer.Option(min=0.0, metavar="G", help="With --class: the scale of classifier-free guidance; 1: none."),
    ] = 1.0,
    step: SavedStep = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the texts and their cost as JSON.")] = False,
) -> None:
    from ratel_cli.cli import generate as command

    of_text = {"--prompts": prompts, "--temperature": temperature, "--raw": raw, "--json": as_json}
    of_images = {"-o": output, "--denoising-steps": denoising_steps != 50, "--guidance": guidance != 1.0}
    command.check_options(of_text if classes else of_images, makes_images=bool(classes))
    if classes:
        command.run_images(run, texts or [], classes, output, num_steps=denoising_steps, guidance=guidance, step=step)
        return
    command.run(
        run,
        texts or [],
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        raw=raw,
        step=step,
        as_json=as_json,
    )
