"""From a YAML file and `key=value` arguments to a RunConfig, with every error at its line and column.

Called by the commands in `cli`. The way of a config:

1. the file's text becomes a tree that knows places            (`yaml_marks`)
2. other tools' names become ours, strangers are refused       (`dialect`, `aliases`)
3. the arguments are laid over it, one after another           (`overrides`)
4. the values are validated, together with their contradictions (`schema`)

Invariant: all errors are told at once, in the order of the file and then of the arguments, as one
BadInput that carries the others; only a syntax error comes alone, since nothing is known beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ratel_cli.config.aliases import SECTIONS, TOP
from ratel_cli.config.dialect import Dialect
from ratel_cli.config.messages import explain_error
from ratel_cli.config.overrides import apply_override
from ratel_cli.config.schema import RunConfig, unused_keys
from ratel_cli.config.sections import Contradiction
from ratel_cli.config.source import Location, is_written, locate, place_of_keys, read_file
from ratel_cli.config.yaml_marks import (
    ConfigLoader,
    Finding,
    Marked,
    Plain,
    Resolvers,
    plain,
    read_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A run's config, and what its reader should be told about how it was read."""

    config: RunConfig
    notices: tuple[str, ...]


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, translate, override and validate. Raises BadInput with all there is to correct."""
    findings: list[Finding] = []
    dialect = Dialect(findings)
    root = read_text(read_file(path, "config"), str(path), findings)
    if not isinstance(root.content, dict):
        hint = "write `base_model: ...` and the other keys, one a line"
        raise Finding(where=root.where, message="a config is `key: value` lines", hint=hint).as_error()
    dialect.translate(TOP, root)
    for number, argument in enumerate(overrides, start=1):
        apply_override(root, argument, number, dialect)
    config = _validate(root, dialect)
    if findings or config is None:
        first, *others = sorted(findings, key=lambda finding: finding.where)
        raise first.as_error(tuple(other.as_error() for other in others))
    for unused in unused_keys(config):
        where = place_of_keys(root, (), unused.keys)
        dialect.notices.append(Finding(where=where, message=unused.message))
    notices = sorted(dialect.notices, key=lambda notice: notice.where)
    return LoadedConfig(
        config=config.resolved(path.stem), notices=tuple(f"{notice.where}: {notice.message}" for notice in notices)
    )


def to_yaml(config: RunConfig) -> str:
    """The config as YAML that loads again to an equal one."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True)


_BOTH_READINGS: Resolvers = {
    start: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(start, []),
        *ConfigLoader.yaml_implicit_resolvers.get(start, []),
    ]
    for start in {*yaml.SafeDumper.yaml_implicit_resolvers, *ConfigLoader.yaml_implicit_resolvers}
}


class _ConfigDumper(yaml.SafeDumper):
    """Quotes every text that either YAML 1.1 or our own reading would take for something else."""

    yaml_implicit_resolvers = _BOTH_READINGS


def _validate(root: Marked, dialect: Dialect) -> RunConfig | None:
    """The config; None where it is not valid, and then findings say why.

    pydantic looks for contradictions only where every key is right by itself. So that they are told
    at once too, what is wrong is taken out and the rest looked at again, until nothing new is found.
    """
    data = plain(root)
    assert isinstance(data, dict)
    first_look = True
    while True:
        try:
            config = RunConfig.model_validate(data)
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
        else:
            return config if first_look else None
        wrong: list[Location] = []
        for error in errors:
            if error["type"] == "contradictions":
                wrong.extend((*error["loc"], key) for key in _tell_contradictions(error, root, dialect))
            else:
                wrong.append(error["loc"])
                if first_look:
                    _tell(error, root, dialect)
        if errors[0]["type"] == "contradictions" and not errors[0]["loc"]:
            return None  # found last of all: everything else is right
        dialect.doubtful.update(_keys_only(location) for location in wrong)
        for location in wrong:
            _remove(data, location)
        first_look = False


def _remove(data: dict[str, Plain], location: Location) -> None:
    """Take out the value there, or the whole top-level key around it."""
    mapping: Plain = data
    for step in location[:-1]:
        mapping = mapping.get(str(step)) if isinstance(mapping, dict) else None
    if isinstance(mapping, dict) and location[-1] in mapping:
        del mapping[str(location[-1])]
    else:
        data.pop(str(location[0]), None)


def _keys_only(location: Location) -> tuple[str, ...]:
    return tuple(step for step in location if isinstance(step, str))


def _tell_contradictions(error: ErrorDetails, root: Marked, dialect: Dialect) -> Iterator[str]:
    """Tell them, but for those about keys that are in doubt already; yields every key concerned."""
    location = error["loc"]
    for each in error["ctx"]["found"]:
        assert isinstance(each, Contradiction)
        yield from each.keys
        if not _in_doubt(root, location, each.keys, dialect):
            where = place_of_keys(root, location, each.keys)
            dialect.findings.append(Finding(where=where, message=each.message, hint=each.hint))


def _in_doubt(root: Marked, location: Location, keys: Sequence[str], dialect: Dialect) -> bool:
    """Whether a finding is about one of the keys, or about something in it."""
    told = {finding.where for finding in dialect.findings}
    for key in keys:
        path = (*_keys_only(location), key)
        if any(doubt[: len(path)] == path for doubt in dialect.doubtful):
            return True
        if is_written(root, (*location, key)) and locate(root, (*location, key)).value in told:
            return True
    return False


def _tell(error: ErrorDetails, root: Marked, dialect: Dialect) -> None:
    location = error["loc"]
    place = locate(root, location)
    if error["input"] is None and any(finding.where == place.value for finding in dialect.findings):
        return  # the value could not be read, and that has been told
    message, hint = explain_error(error, place.name, _default(location))
    where = place.key if error["input"] is None else place.value
    dialect.findings.append(Finding(where=where, message=message, hint=hint))


def _default(location: Location) -> object:
    if not location:
        return None
    section = SECTIONS.get(".".join(_keys_only(location[:-1])))
    field = section.model_fields.get(str(location[-1])) if section else None
    return field.default if field else None
