"""What a config's model is, without its weights: its blocks, and what its layers compute with.

`model_shape` is described at once. A base model is described by its skeleton, the one that a run builds, which takes
seconds of imports. So a description is cached, in a file named by everything that it depends on.

Invariant: a description equals what a run of the same config finds in its skeleton. A cached one that cannot be read
is made again, and no code that comes with a model is ever run.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ratel_cli.config.keys.key_groups import OF_RATES
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.yaml.source import read_file
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.json_fields import JsonFields
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.planning.profile.analytic import gpt_activations, gpt_norm, spec_from_shape
from ratel_cli.run.files.user_cache import software_versions, user_cache_file, write_user_cache
from ratel_cli.run.inputs.settings import CHOOSES_PARAMETERS, rules_in
from ratel_cli.schedule.rules import ALL_ADAMW
from ratel_cli.sizes import DtypeName

FORMAT_VERSION = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model without its weights."""

    spec: ModelSpec
    traits: LayerTraits


def describe_model(config: RunConfig, *, name: str, log: RunLog) -> ModelDescription:
    """The model that `config` names; `name` is for a `model_shape`, which has none. Downloads nothing.

    Raises BadInput for a model that cannot be trained.
    """
    shape = config.model_shape
    if shape is None:
        return _base_model(config, log)
    spec = spec_from_shape(
        name=name,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_parameters=shape.num_parameters,
        dtype=config.dtype,
        gradient_dtype=config.resolved_gradient_dtype,
        rules=rules_in(config),
    )
    compute_bytes = spec.dtype_bytes
    traits = LayerTraits(
        num_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        activations=gpt_activations(
            num_heads=shape.num_heads, hidden_size=shape.hidden_size, compute_bytes=compute_bytes
        ),
        norm=gpt_norm(hidden_size=shape.hidden_size, compute_bytes=compute_bytes),
    )
    return ModelDescription(spec=spec, traits=traits)


def describe_if_possible(config: RunConfig, log: RunLog) -> ModelDescription | None:
    """The model that the config's `base_model` names; None if it cannot be trained so, which is cached as well."""
    file = description_file(config)
    if _was_rejected(file):
        return None
    try:
        return _base_model(config, log)
    except BadInput:
        with contextlib.suppress(OSError):
            write_user_cache(file, json.dumps({"format_version": FORMAT_VERSION, "is_rejected": True}) + "\n")
        return None


def description_file(config: RunConfig) -> Path:
    """Where the description of the config's base model is cached: by everything that `find_blocks` takes, but for the
    dtype of gradients, which is set afterwards. Raises BadInput."""
    assert config.base_model is not None
    content = _config_text(config.base_model)
    with_peft = ["peft"] if config.adapter is not None else []
    software = software_versions("ratel-cli", "torch", "transformers", *with_peft)
    of_task = [] if config.task == "causal_lm" else [config.task, *(config.labels or ())]
    rules = rules_in(config)
    rule_names = [] if rules == ALL_ADAMW else [each.name for each in rules.rules]
    chosen = [*(getattr(config, key) for key in (*CHOOSES_PARAMETERS, *OF_RATES)), *rule_names]
    looks_at_files = (
        config.base_storage == "in_place" or '"quantization_config"' in content or '"compression_config"' in content
    )
    of_files: list[object] = []
    if looks_at_files:
        of_files += [config.base_storage, _files(config.base_model, "*.safetensors*")]
    of_files += _files(config.base_model, "*") if config.can_grow else []
    known = [content, config.dtype, config.attn_implementation, software, chosen, *of_task, *of_files]
    if config.revision_of_model is not None:
        known.append(config.revision_of_model)
    return user_cache_file("model", known)


def _files(base_model: str, pattern: str) -> list[tuple[str, int, int]]:
    """The name, the size and the time of change of each file of weights, or of the tokenizer: what it has may decide
    where blocks lie, or how many rows there are."""
    paths = sorted(Path(os.path.expanduser(base_model)).glob(pattern))
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]


def _base_model(config: RunConfig, log: RunLog) -> ModelDescription:
    assert config.base_model is not None
    file, path = description_file(config), Path(config.base_model)
    # In the hub's cache a directory is named after a revision, and its repository's is models--OWNER--NAME.
    name = path.parents[1].name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name
    cached = _read(file, name, config.resolved_gradient_dtype)
    if cached is not None:
        return cached
    from ratel_cli.engine.steps.footprint import measured_traits
    from ratel_cli.run.inputs.base_kinds import build_model
    from ratel_cli.run.inputs.process import silence_transformers

    silence_transformers()
    model = build_model(config)
    description = ModelDescription(spec=replace(model.spec, name=name), traits=measured_traits(model))
    content = {
        "format_version": FORMAT_VERSION,
        "spec": description.spec.to_json(),
        "traits": description.traits.to_json(),
    }
    try:
        write_user_cache(file, json.dumps(content) + "\n")
    except OSError as error:
        log.notice(f"{file}: the model's description cannot be cached ({error.strerror}); the next plan makes it again")
    return _read(file, name, config.resolved_gradient_dtype) or description


def _was_rejected(file: Path) -> bool:
    try:
        fields = JsonFields(json.loads(file.read_text(encoding="utf-8")))
        return fields.integer("format_version") == FORMAT_VERSION and fields.value("is_rejected") is True
    except (OSError, ValueError, RecursionError):
        return False


def _read(file: Path, name: str, gradient_dtype: DtypeName) -> ModelDescription | None:
    """The cached description; None if there is none, or if it cannot be used."""
    try:
        return _parsed(file.read_text(encoding="utf-8"), name, gradient_dtype)
    except (OSError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=8)
def _parsed(text: str, name: str, gradient_dtype: DtypeName) -> ModelDescription | None:
    """What this text describes, and for the same text the very same: what the planner remembers of a spec is found by
    comparing specs, which takes no time where both are one."""
    fields = JsonFields(json.loads(text))
    if fields.integer("format_version") != FORMAT_VERSION:
        return None
    spec = replace(ModelSpec.from_json(fields.value("spec")), name=name)
    return ModelDescription(
        spec=spec.with_gradients(gradient_dtype), traits=LayerTraits.from_json(fields.value("traits"))
    )


def _config_text(base_model: str) -> str:
    """The model's config.json, checked as far as that is possible without transformers. Raises BadInput."""
    directory = Path(os.path.expanduser(base_model))
    if not os.path.isdir(directory):  # is_dir raises for names that are too long
        raise BadInput(
            f"base_model: there is no directory {base_model}; `ratel plan` downloads nothing",
            "give a directory with the model's config.json, or `model_shape`",
        )
    path = directory / "config.json"
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: not a regular file")  # opening a FIFO would wait for a writer
    text = read_file(path, "model's config")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be parsed: {error}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: must contain an object, `{{...}}`")
    if "_class_name" not in values and not isinstance(values.get("model_type"), str):  # else it is of diffusers
        raise BadInput(f"{path}: `model_type` is missing or is not text")
    return text
