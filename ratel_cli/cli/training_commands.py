"""Options of the commands from a first try to a trained model.

They are `demo`, `finetune`, `init`, `check`, `profile` and `plan`.

Each command imports its own file when it is called, so that `--help` and a wrong argument are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratel_cli.cli.arguments import (
    A_RUN,
    ConfigPath,
    Drives,
    Overrides,
    Overwrite,
    ReplaceFile,
    check_option,
    command_line,
)
from ratel_cli.errors import BadInput
from ratel_cli.run.train.start import start_of

commands = typer.Typer()

RunOrModel = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG|MODEL",
        help="A run (its config file, or its output directory); or a model: a directory with its config.json, a "
        "hub id whose config.json is in the hub's cache, or a name of configs/models.",
        show_default=False,
    ),
]


@commands.command(
    help="Try it without a model: make a small one and data for it, fine-tune it with all state on disk, and let it "
    "answer a question. Takes a few minutes; nothing is downloaded.",
    epilog="Example: ratel demo --keep demo",
)
def demo(
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            help="Make it all in DIR, a new directory, and leave it there. Default: a temporary one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    from ratel_cli.cli import demo as command

    command.run(keep)


@commands.command(
    help="Train the model that CONFIG describes. The result is a Hugging Face directory.",
    epilog="Example: ratel finetune configs/demo.yaml learning_rate=1e-5 storage.paths=[/mnt/a,/mnt/b]",
)
def finetune(
    context: typer.Context,
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|no|STEP",
            help="auto: resume from the last committed step, if there is one. no: start over. "
            "STEP: go back to that saved step.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop. Only caches are written.")
    ] = False,
    overwrite: Overwrite = False,
    overwrite_store: Annotated[
        bool, typer.Option("--overwrite-store", help="With --resume no: replace a store that another run made.")
    ] = False,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Begin a new run from the last step, or a saved step, of another run. Name that run by its output "
            "directory or its config file.",
            show_default=False,
        ),
    ] = None,
    fresh_optimizer: Annotated[
        bool, typer.Option("--fresh-optimizer", help="With --from: take the weights only, and begin at step 0.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="Train in N processes on this machine, each with a part of the state and its own batches.",
            show_default=False,
        ),
    ] = None,
) -> None:
    check_option("--overwrite-store", overwrite_store, only_with="--resume no", is_met=resume == "no")
    start = start_of(resume, overwrite_store=overwrite_store)
    from ratel_cli.cli import finetune as command

    command.run(
        config,
        overrides or [],
        start,
        dry_run=dry_run,
        overwrite=overwrite,
        origin=origin,
        fresh_optimizer=fresh_optimizer,
        ranks=None if ranks is None else (ranks, command_line(context, without="--ranks")),
    )


@commands.command(
    help="Write a config to begin with. It fits the model, the data and this machine.",
    epilog="Example: ratel init Qwen/Qwen3-8B --data train.jsonl -o my-run.yaml num_epochs=2",
)
def init(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model to train: a directory, or a hub id.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What to train on; repeat for each dataset.", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")] = Path(
        "run.yaml"
    ),
    overwrite: ReplaceFile = False,
) -> None:
    from ratel_cli.cli import init as command

    command.run(model, data or [], output, overrides or [], overwrite=overwrite)


@commands.command(
    help="Report all errors in config, model, data and machine at once. Only caches are written.",
    epilog="Example: ratel check my-run.yaml",
)
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the errors, or what would run, as JSON.")] = False,
) -> None:
    from ratel_cli.cli import check as command

    command.run(config, overrides or [], as_json=as_json)


@commands.command(
    help="Measure this machine: compute, memory and drives. With CONFIG, use its settings, and measure its model too.",
    epilog="Example: ratel profile --storage /mnt/a --storage /mnt/b -o hardware.json",
)
def profile(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help=A_RUN, show_default=False)] = None,
    storage: Drives = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the hardware file instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Also write the hardware file to FILE.", show_default=False
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if a profile is cached.")] = False,
    overwrite: ReplaceFile = False,
) -> None:
    from ratel_cli.cli import profile as command

    command.run(config, storage or [], output, as_json=as_json, refresh=refresh, overwrite=overwrite)


@commands.command(
    help="Predict whether a run fits and how long it takes. Explains why, and what would help.",
    epilog="Example: ratel plan Qwen/Qwen3-14B --gpu rtx4090 --ram 64GB --ssd 2x990pro adapter=lora",
)
def plan(
    config: RunOrModel,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for a machine with this GPU, such as rtx4090, instead of this one.",
            show_default=False,
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --gpu: its memory. Default: 64GB.", show_default=False),
    ] = None,
    ssd: Annotated[
        str | None,
        typer.Option(
            metavar="NxDRIVE",
            help="With --gpu: its drives by name, or by what each reads and writes: 2x7GB/s. Default: 2x990pro.",
            show_default=False,
        ),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The hardware file of the machine to plan for. Default: this machine, as an earlier run or "
            "`ratel profile` measured it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plot step time against offloaded bytes, or the curve of --rok, to FILE, .svg or .png.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with what other systems would offload.")] = False,
    direct: Annotated[
        bool, typer.Option("--direct", help="Print what reading weights in host memory would gain.")
    ] = False,
    largest: Annotated[bool, typer.Option("--largest", help="Print the largest model that fits.")] = False,
    prices: Annotated[
        bool, typer.Option("--prices", help="Print price and speed for different numbers of SSDs.")
    ] = False,
    rok: Annotated[
        bool, typer.Option("--rok", help="Print memory and speed when activations are recomputed, offloaded or kept.")
    ] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Plan for N ranks that share the state.")
    ] = 1,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="With --ranks: the number of machines like this one.")
    ] = 1,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="With --nodes: the rate at which a machine sends and receives at the same time, such as 25GB/s. "
            "Default: as the hardware file says.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --plot: replace FILE if it exists.")] = False,
) -> None:
    check_option("--nodes", nodes > 1, only_with="--ranks N", is_met=ranks > 1)
    check_option("--network", network is not None, only_with="--nodes N", is_met=nodes > 1)
    check_option("--ram", ram is not None, only_with="--gpu NAME", is_met=gpu is not None)
    check_option("--ssd", ssd is not None, only_with="--gpu NAME", is_met=gpu is not None)
    if gpu is not None and hardware is not None:
        raise BadInput("arguments '--gpu' and '--hardware': each describes the machine", "leave out one of them")
    from ratel_cli.cli import plan as command
    from ratel_cli.config.parts import Parts
    from ratel_cli.run.ask.plan_inputs import Cluster
    from ratel_cli.run.ask.plan_questions import Questions

    questions = Questions(compare=compare, direct=direct, largest=largest, prices=prices, rok=rok)
    cluster = Cluster(num_ranks=ranks, num_machines=nodes, network=network)
    parts = None if gpu is None else Parts(gpu=gpu, ram=ram, ssd=ssd)
    command.run(
        config, overrides or [], hardware, parts, plot, questions, cluster, as_json=as_json, overwrite=overwrite
    )
