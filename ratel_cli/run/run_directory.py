"""A run's output directory: which run a path names, and the files that a run leaves there, apart from its export.

They are in `run/` of the output directory:

    config.yaml     the config that the run was started with
    hardware.json   the machine as the run measured it
    model.json      the model's blocks, and what their operators cost once a step was recorded
    plan.json       the plan that the run follows
    metrics.jsonl   one line for each step
    trace.json      the spans of each step, if `trace` is set
    tokens/         the samples as tokens, so that a run with the same data finds them
    rejects.jsonl   the rows of the data that cannot be used

Invariant: this file imports nothing heavy, so a wrong path or a wrong config is answered at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.json_fields import hash_of
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.model_profile import ModelProfile

CONFIG_NAME = "config.yaml"


def run_directory(output_dir: Path) -> Path:
    """The directory of a run's own files."""
    return output_dir / "run"


def read_config(path: Path, log: RunLog, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a file, with `KEY=VALUE` overrides. Prints its notices. Raises BadInput with all that is wrong."""
    loaded = load_config(path, overrides)
    for notice in loaded.notices:
        log.notice(notice)
    return loaded.config


def is_output_of_run(path: Path) -> bool:
    """True if a run has left its config in this directory."""
    return (run_directory(path) / CONFIG_NAME).is_file()


def find_run(path: Path, log: RunLog, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the run that `path` names: its config file, or its output directory, which may have moved since.

    Raises BadInput if the path names no run.
    """
    is_directory = path.is_dir()
    if is_directory and not is_output_of_run(path):
        raise BadInput(
            f"{path}: not the output directory of a run: it has no run/config.yaml",
            "give the output directory of a run, or its config file",
        )
    config = read_config(run_directory(path) / CONFIG_NAME if is_directory else path, log, overrides)
    if config.base_model is None:
        raise BadInput(f"{path}: `model_shape` is only for `ratel plan`; no model was trained with this config")
    return config.model_copy(update={"output_dir": path}) if is_directory else config


def write_run_files(config: RunConfig, contents: Mapping[str, object], *, log: RunLog) -> None:
    """Write the config, and each of `contents` as JSON under its file name. Warns if that is not possible."""
    directory = run_directory(config.output_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_NAME).write_text(to_yaml(config), encoding="utf-8")
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warn(f"{directory}: cannot be written ({error.strerror}); training continues without it")


class CachedProfile:
    """What an earlier run recorded of a model's operators, in `run/model.json`.

    A profile that comes from here was recorded with these layers and this batch, on this machine.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, hardware: HardwareProfile) -> None:
        self.path = run_directory(config.output_dir) / "model.json"
        shapes = [(parameter.name, parameter.shape) for block in spec.blocks for parameter in block.parameters]
        values = [shapes, config.dtype, config.attn_implementation, config.micro_batch_size, config.sequence_len]
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
        """The content of the file, with `profile` if there is one."""
        recorded = {} if profile is None else {"profile": {"made_for": self._made_for, **profile.to_json()}}
        return {**spec.to_json(), **recorded}
