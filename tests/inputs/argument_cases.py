"""Malformed command lines: bad overrides, unknown options, and settings that differ from those of the store's run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.config.test_overrides import ERRORS, NESTED
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_OVERRIDES = {
    **{argument: re.escape((error or "").partition(" | ")[0]) for argument, error in ERRORS},
    "learning_rate=": "`learning_rate` has no value",
    "storage.=1": "not a `key=value` argument",
    "deepspeed.stage=3": "deepspeed",
    "seed=!!python/name:os.system x": "`seed` must be a whole number",
    "x" * 5_000: "not a `key=value` argument",
}
_OPTIONS: dict[tuple[str, ...], str] = {
    ("--resume", "maybe"): "must be `auto`, `no` or the number of a saved step",
    ("--resume", "-1"): "must be `auto`, `no` or the number of a saved step",
    ("--resume", "1.0"): "must be `auto`, `no` or the number of a saved step",
    ("--resume", "\u0663"): "must be `auto`, `no` or the number of a saved step",
    ("--resume", ""): "must be `auto`, `no` or the number of a saved step",
    ("--resume", "9" * 5_000): "must be `auto`, `no` or the number of a saved step",
    ("--resume",): "requires an argument",
    ("--resume", "3"): "that step is not saved",
    ("--no-such-option",): "no such option",
    ("--learning_rate=1",): "no such option",
    ("--dry-run=yes",): "does not take a value",
}
_CHANGES: dict[str, object] = {
    "seed": 7,
    "learning_rate": 0.5,
    "sequence_len": 32,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "adam_epsilon": 0.5,
    "dtype": "bfloat16",
    "sample_packing": False,
    "shuffle": False,
    "train_on_inputs": True,
    "weight_decay": 0.5,
    "max_grad_norm": 2.0,
    "lr_scheduler": "linear",
    "val_set_size": 2,
    "mlm_probability": 0.3,
    "adam_beta1": 0.5,
    "random_init": True,
}
"""Each of these makes the run differ from the run that the store belongs to."""


def cases() -> Iterator[MalformedInput]:
    for argument, message in _OVERRIDES.items():
        yield _arguments(f"override {argument[:40]!r}", ["--resume", "no", "--", argument], message, text=NESTED)
    for option, message in _OPTIONS.items():
        yield _arguments(f"option {' '.join(option)[:40]!r}", list(option), message)
    for key, value in _CHANGES.items():
        yield _another_run(key, value)
    yield _arguments("run on another model shape", ["--resume", "no", "model_shape={num_layers: 1}"], "model_shape")
    yield from _places()
    for command in ("", "finetun", "train", "--finetune", "plan "):

        def damage(inputs: RunFiles, command: str = command) -> None:
            inputs.command = command

        yield MalformedInput(name=f"command {command!r}", damage=no_line(damage), message="no such (command|option)")


def _arguments(name: str, arguments: list[str], message: str, text: str | None = None) -> MalformedInput:
    """Other arguments, and another config if there is a text."""

    def damage(inputs: RunFiles) -> None:
        inputs.arguments = arguments
        inputs.text = text.encode() if text else None

    return MalformedInput(name=name, damage=no_line(damage), message=message)


def _another_run(key: str, value: object) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        inputs.settings[key] = value
        inputs.arguments = ["--resume", "auto"]

    message = f"which has other settings: {key} was"
    return MalformedInput(name=f"resumed with another {key}", damage=no_line(damage), message=message)


def _places() -> Iterator[MalformedInput]:
    """Places that cannot be written to. The error must come before anything is written."""
    for key in ("output_dir", "storage.paths"):
        for name, place in {
            "a file": "HERE/run.yaml",
            "inside a file": "HERE/run.yaml/out",
            "a name too long": "HERE/" + "a" * 300,
            "a path too long": "HERE/" + "a/" * 3_000,
            "a device": "/dev/null",
            "in /proc": "/proc/out",
        }.items():

            def damage(inputs: RunFiles, key: str = key, place: str = place) -> None:
                path = place.replace("HERE", str(inputs.directory))
                inputs.arguments = [f"{key}={path}", *inputs.arguments]

            is_bad_input = key == "output_dir" and name in ("a file", "a device")
            yield MalformedInput(
                name=f"{key} that is {name}",
                damage=no_line(damage),
                message="is not a directory" if is_bad_input else "cannot be|needs .* 0 B available",
                code=2 if is_bad_input else 3,
            )
