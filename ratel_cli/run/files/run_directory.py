"""A run's output directory: which run a path names, and the files that a run leaves there, apart from its export.

They are in `run/` of the output directory:

    config.yaml     the config that the run was started with
    hardware.json   the machine as the run measured it
    model.json      the model's blocks, and what their operators cost once a step was recorded
    plan.json       the plan that the run follows
    run.json        how many steps the run will have, with which software, and the process that trains
    wandb.json, …   what a tracker of `report_to` got; wandb.log: what it printed; tensorboard/: its files
    origin.json     the step of another run that this one started from, if it did
    metrics.jsonl   one line for each step
    report.html     what `ratel report` shows of the run
    trace.json      the spans of each step, if `trace` is set
    reference.bin   what the reference model gives to the answers, if `rl` has one: data/pairs/reference.py
    tokens/         the samples as tokens, so that a run with the same data finds them
    rejects.jsonl   the rows of the data that cannot be used; test-rejects.jsonl: those of `test_datasets`

`run_files` knows which of them are Ratel's, and which are files of the user's with such a name.

Invariant: this file imports nothing heavy, so a wrong path or a wrong config is answered at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

from ratel_cli.commands import name_run
from ratel_cli.config.keys.schema import RunConfig, StorageConfig
from ratel_cli.config.load import load_config
from ratel_cli.config.yaml.source import is_config_name, similar_path
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.launched import launched_rank, local_rank
from ratel_cli.errors import BadInput, RatelError
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.json_fields import JsonFields, hash_of
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.run.files.recorded_paths import as_written, located

CONFIG_NAME = "config.yaml"
HARDWARE_NAME = "hardware.json"
MODEL_NAME = "model.json"
PLAN_NAME = "plan.json"
METRICS_NAME = "metrics.jsonl"
REPORT_NAME = "report.html"
TRACE_NAME = "trace.json"
ORIGIN_NAME = "origin.json"
TOKENS_NAME = "tokens"
REFERENCE_NAME = "reference.bin"
NEW_REFERENCE_NAME = f"{REFERENCE_NAME}.new"
"""While it is written."""
EVENTS_NAME = "tensorboard"
"""The directory in `run/` with the files of tensorboard."""
EVENTS_SUFFIX = ".ratel"
"""Ends the names of the files that Ratel writes there. The user may add others."""
_DECAY = (("decayed", True), ("undecayed", False))
"""Keys of `run/model.json` with the names of parameters, by whether weight decay applies to them."""
_MAX_NAME_CHARS = 60
"""Most characters of `output_dir` in the name of the store's directory. File systems take 255 bytes."""


def run_directory(output_dir: Path) -> Path:
    """The directory of a run's own files."""
    return output_dir / "run"


def rank_directory(output_dir: Path, rank: int) -> Path:
    """What is the output directory of a rank that is not the first, in that of the run."""
    return run_directory(output_dir) / "ranks" / str(rank)


def record_name(tracker: str) -> str:
    """The name of the file in `run/` that says what the tracker got."""
    return f"{tracker}.json"


def log_name(tracker: str) -> str:
    """The name of the file in `run/` with what the tracker printed."""
    return f"{tracker}.log"


def store_at(config: RunConfig) -> str:
    """The store's directories, for messages."""
    return ", ".join(map(str, config.storage.paths))


def store_hint(config: RunConfig) -> str:
    """How to find the config's store, where there is none in `storage.paths`."""
    if all(path.is_absolute() for path in config.storage.paths):
        where = "connect the drive that it is on"
    else:
        where = "use the directory where the run was started, since relative paths in a config begin there"
    if config.storage.snapshot is None:
        return where
    return f"{where}; or restore a lost store from its snapshot with `ratel restore CONFIG`"


def config_file(path: Path) -> Path:
    """The file with the config of the run that `path` names: itself, or the one that the run left in that directory.

    Raises BadInput if there is nothing, and for a directory in which no run has left one.
    """
    if not os.path.isdir(path):  # is_dir raises for names that are too long
        check_exists(path)
        return path
    if not is_output_of_run(path):
        raise BadInput(
            f"{path}: not the output directory of a run: it has no run/{CONFIG_NAME}",
            "give the output directory of a run, or its config file",
        )
    return run_directory(path) / CONFIG_NAME


def check_exists(path: Path) -> None:
    """Raise BadInput if there is nothing at `path`, which a RUN argument names."""
    try:
        os.lstat(path)
    except FileNotFoundError as exc:
        similar = similar_path(path, lambda other: is_config_name(other) or is_output_of_run(other))
        is_config = path.suffix in (".yaml", ".yml")
        new = "check the path; `ratel init` writes a config" if is_config else None
        hint = similar or new or "`ratel status` lists the runs below this directory"
        raise BadInput(f"{path}: no such file or directory", hint) from exc
    except (OSError, ValueError):
        return  # what reads the file says why it cannot be read


def read_config(
    path: Path, log: RunLog, overrides: Sequence[str] = (), *, ranks: tuple[int, int] | None = None
) -> RunConfig:
    """The config that `path` names, with `KEY=VALUE` overrides: a file, or what a run left in its output directory.

    `ranks`: as which rank of all, and of its machine, the paths are read; None: as this process.

    The directory may have moved since. Prints notices, none about a file that Ratel wrote itself, and messages call the
    run `path` from then on. Raises BadInput with all that is wrong.
    """
    name_run(path, overrides)
    file = config_file(path)
    loaded = load_config(file, overrides)
    for notice in (each for each in loaded.notices if file == path or not each.startswith(f"{file}:")):
        log.notice(notice)
    config = _of_rank(loaded.config, *(ranks or (launched_rank(), local_rank())))
    return with_own_store(config) if file == path else as_of_run(config, path, overrides)


def stores_on_machine(path: Path, overrides: Sequence[str], number: int) -> list[tuple[Path, ...]]:
    """By rank, the directories of the stores that the first `number` ranks of the config that `path` names have, or
    would have, if they are on this machine. Raises BadInput as `read_config`."""
    file = config_file(path)
    config = load_config(file, overrides).config
    if file != path:
        config = as_of_run(config, path, overrides)
        return [store_of_rank(config, rank) for rank in range(number)]
    return [paths_in(with_own_store(_of_rank(config, rank, rank)).storage.paths, rank) for rank in range(number)]


def store_of_rank(config: RunConfig, rank: int) -> tuple[Path, ...]:
    """The directories of a rank's store, as it has recorded them; `config`: that of the run."""
    recorded = recorded_config(rank_directory(config.output_dir, rank)) if rank else config
    return paths_in(config.storage.paths, rank) if recorded is None else recorded.storage.paths


def paths_in(paths: Sequence[Path], rank: int) -> tuple[Path, ...]:
    """The directories of a rank's store in those of the run."""
    return tuple(path / f"rank-{rank}.store" for path in paths) if rank else tuple(paths)


def _of_rank(config: RunConfig, rank: int, on_machine: int) -> RunConfig:
    """The config with what a rank has for `{rank}`, `{local_rank}` and `{host}` in `storage.paths`."""
    values = {"rank": str(rank), "local_rank": str(on_machine), "host": gethostname()}
    paths = list(map(str, config.storage.paths))
    for name, value in values.items():
        paths = [path.replace(f"{{{name}}}", value) for path in paths]
    return config.model_copy(update={"storage": config.storage.model_copy(update={"paths": tuple(map(Path, paths))})})


def as_of_run(config: RunConfig, path: Path, overrides: Sequence[str]) -> RunConfig:
    """The config that the run in the directory `path` has left, with `overrides`, for that directory.

    Relative paths that the run has recorded begin where it was started. Raises BadInput if the overrides name another
    output directory.
    """
    file = run_directory(path) / CONFIG_NAME
    recorded = load_config(file).config
    if config.output_dir != recorded.output_dir:
        raise BadInput(
            f"output_dir: it cannot be changed for the run in {path}",
            f"a new run needs a config file; {file} is the one of this run, with its storage.paths",
        )
    is_own = config.storage.paths == recorded.storage.paths
    config = located(config, recorded, path, overrides).model_copy(update={"output_dir": path})
    return config if is_own else with_own_store(config)


def recorded_config(directory: Path) -> RunConfig | None:
    """The config that the run in `directory` has left, for the current directory; None if it cannot be read."""
    try:
        recorded = load_config(run_directory(directory) / CONFIG_NAME).config
    except RatelError:
        return None
    return located(recorded, recorded, directory)


def as_recorded_by_run(config: RunConfig) -> RunConfig:
    """The config with its paths as the run in its `output_dir` has recorded them; as it is if there is none."""
    try:
        return as_written(config, load_config(run_directory(config.output_dir) / CONFIG_NAME).config)
    except RatelError:
        return config


def with_own_store(config: RunConfig) -> RunConfig:
    """The config with the directory of the run's own store in each of `storage.paths`.

    It is named after `output_dir`, with a hash of its place, so that the same command finds it again and no other run
    does. The default path next to `output_dir` is the run's own already, and so is what a run has recorded.
    """
    place = Path(os.path.realpath(config.output_dir))
    own = f"{place.name[:_MAX_NAME_CHARS]}-{hash_of(str(place))[:8]}.store"
    given = config.storage.paths
    if os.path.realpath(given[0]) == os.path.realpath(default_store(config)) or all(path.name == own for path in given):
        return config
    paths = tuple(path / own for path in given)
    return config.model_copy(update={"storage": config.storage.model_copy(update={"paths": paths})})


def default_store(config: RunConfig) -> Path:
    """The directory of the run's store if the config names none."""
    return config.model_copy(update={"storage": StorageConfig()}).resolved("").storage.paths[0]


def is_output_of_run(path: Path) -> bool:
    """True if a run has left its config in this directory."""
    return os.path.isfile(run_directory(path) / CONFIG_NAME)  # unlike Path.is_file, also for a name too long


def find_run(
    path: Path, log: RunLog, overrides: Sequence[str] = (), *, ranks: tuple[int, int] | None = None
) -> RunConfig:
    """Like `read_config`, for what only a run has: raises BadInput too if no model can be trained with the config."""
    config = read_config(path, log, overrides, ranks=ranks)
    if config.base_model is None:
        raise BadInput(f"{path}: `model_shape` is only for `ratel plan`; no model was trained with this config")
    return config


class CachedProfile:
    """What an earlier run recorded of a model's operators, in `run/model.json`.

    A profile that comes from here was recorded with these layers and this batch, on this machine.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, hardware: HardwareProfile) -> None:
        self.path = run_directory(config.output_dir) / MODEL_NAME
        blocks = [
            (block.dtype, block.rule.name, [(each.name, each.shape) for each in block.parameters])
            for block in spec.blocks
        ]
        dropout = (
            config.lora_dropout if config.adapter is not None and config.has_dropout else 0.0
        )  # saved for backward
        values = [
            blocks,
            dropout,
            config.dtype,
            config.attn_implementation,
            config.micro_batch_size,
            config.sequence_len,
            *([] if config.rl is None else [config.rl, config.has_dropout]),
        ]
        machine = [hardware.gpu.name, hardware.host.num_cores, config.deterministic]
        self._made_for = hash_of([values, machine])

    def read(self) -> ModelProfile | None:
        """The profile; None if there is none, if it was made for something else, or if it cannot be read."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))["profile"]
            if content["made_for"] != self._made_for:
                return None
            return ModelProfile.from_json(content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def content(self, spec: ModelSpec, profile: ModelProfile | None) -> dict[str, object]:
        """The content of the file, with `profile` if there is one, and with the names that weight decay applies to."""
        recorded = {} if profile is None else {"profile": {"made_for": self._made_for, **profile.to_json()}}
        decay = {name: [each for each, is_one in decay_of(spec).items() if is_one is wanted] for name, wanted in _DECAY}
        return {**decay, **spec.to_json(), **recorded}


def decay_of(spec: ModelSpec) -> dict[str, bool]:
    """For each parameter whether weight decay applies to it."""
    return {each.name: each.decay for block in spec.blocks if block.is_trained for each in block.parameters}


def recorded_decay(output_dir: Path) -> dict[str, bool]:
    """Whether weight decay applies to each parameter of the run that was here, from its `run/model.json`; empty if
    nothing says it."""
    try:
        content = JsonFields(json.loads((run_directory(output_dir) / MODEL_NAME).read_bytes()))
        blocks = [JsonFields(each) for each in content.items("blocks")]
        parameters = [JsonFields(each) for block in blocks for each in block.items("parameters")]
        return {each.text("name"): each.flag("decay") for each in parameters}
    except (OSError, ValueError, RecursionError):
        return {}


def same_places(paths: Sequence[Path], others: Sequence[Path]) -> bool:
    """Whether these are the same directories, perhaps by other names."""
    return list(map(os.path.realpath, paths)) == list(map(os.path.realpath, others))
