"""From a YAML file and `key=value` arguments to a RunConfig, with every error at its line and column.

    1. parse      the file's text into a tree that knows the place of every value        (`yaml_marks`)
    2. translate  other tools' names into ours, and reject unknown keys                  (`dialect`, `aliases`)
    3. override   values with the arguments, one argument after another                  (`overrides`)
    4. validate   every value, and then the rules about several keys                     (`schema`)

Invariant: all errors are reported at once, first those of the file and then those of the arguments, as one BadInput
that carries the others. Only a syntax error comes alone, because nothing after it can be read.
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
from ratel_cli.config.messages import contradictions_in, finding_of
from ratel_cli.config.overrides import apply_override
from ratel_cli.config.schema import RunConfig, unused_keys
from ratel_cli.config.source import Location, is_written, locate, place_of_keys, read_file
from ratel_cli.config.yaml_marks import ConfigLoader, Finding, Marked, Plain, Resolvers, plain, raise_all, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A run's config, and notices about how it was read."""

    config: RunConfig
    notices: tuple[str, ...]
    """Aliases, and keys that are ignored, each with its place. For the log."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config in a file, with `key=value` overrides. Raises BadInput with everything that is wrong."""
    findings: list[Finding] = []
    dialect = Dialect(findings)
    root = read_text(read_file(path, "config"), str(path), findings)
    if not isinstance(root.content, dict):
        hint = "write `base_model: ...` and the other keys, one per line"
        raise Finding(where=root.where, message="a config consists of `key: value` lines", hint=hint).as_error()
    dialect.translate(TOP, root)
    for number, argument in enumerate(overrides, start=1):
        apply_override(root, argument, number, dialect)
    config = _validate(root, dialect)
    raise_all(findings)
    assert config is not None
    for unused in unused_keys(config):
        where = place_of_keys(root, (), unused.keys)
        dialect.notices.append(Finding(where=where, message=unused.message))
    notices = sorted(dialect.notices, key=lambda notice: notice.where)
    return LoadedConfig(
        config=config.resolved(path.stem), notices=tuple(f"{notice.where}: {notice.message}" for notice in notices)
    )


def to_yaml(config: RunConfig) -> str:
    """The config as YAML text. Loading it gives an equal config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True)


_BOTH_READINGS: Resolvers = {
    start: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(start, []),
        *ConfigLoader.yaml_implicit_resolvers.get(start, []),
    ]
    for start in {*yaml.SafeDumper.yaml_implicit_resolvers, *ConfigLoader.yaml_implicit_resolvers}
}


class _ConfigDumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or our own reader would read as something else."""

    yaml_implicit_resolvers = _BOTH_READINGS


def _validate(root: Marked, dialect: Dialect) -> RunConfig | None:
    """The config; None if it is not valid, with the reasons added to the findings.

    pydantic checks the rules about several keys only if every key is right by itself. To report them at once too,
    whatever is wrong is removed and the rest is validated again, until nothing new is found.
    """
    data = plain(root)
    assert isinstance(data, dict)
    is_first = True
    while True:
        try:
            config = RunConfig.model_validate(data)
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
        else:
            return config if is_first else None
        wrong: list[Location] = []
        for error in errors:
            if error["type"] == "contradictions":
                wrong.extend((*error["loc"], key) for key in _report_contradictions(error, root, dialect))
            else:
                wrong.append(error["loc"])
                if is_first:
                    _report(error, root, dialect)
        if errors[0]["type"] == "contradictions" and not errors[0]["loc"]:
            return None  # these are checked last: everything else is right
        dialect.doubtful.update(_keys_only(location) for location in wrong)
        for location in wrong:
            _remove(data, location)
        is_first = False


def _remove(data: dict[str, Plain], location: Location) -> None:
    """Remove the value at this location, or the whole top-level key around it."""
    mapping: Plain = data
    for step in location[:-1]:
        mapping = mapping.get(str(step)) if isinstance(mapping, dict) else None
    if isinstance(mapping, dict) and location[-1] in mapping:
        del mapping[str(location[-1])]
    else:
        data.pop(str(location[0]), None)


def _keys_only(location: Location) -> tuple[str, ...]:
    return tuple(step for step in location if isinstance(step, str))


def _report_contradictions(error: ErrorDetails, root: Marked, dialect: Dialect) -> Iterator[str]:
    """Add them to the findings, except for keys that already have one. Yields every key concerned."""
    for each, finding in contradictions_in(error, root):
        yield from each.keys
        if not _has_finding(root, error["loc"], each.keys, dialect):
            dialect.findings.append(finding)


def _has_finding(root: Marked, location: Location, keys: Sequence[str], dialect: Dialect) -> bool:
    """Whether a finding is about one of the keys, or about something inside its value."""
    places = {finding.where for finding in dialect.findings}
    for key in keys:
        path = (*_keys_only(location), key)
        if any(doubtful[: len(path)] == path for doubtful in dialect.doubtful):
            return True
        if is_written(root, (*location, key)) and locate(root, (*location, key)).value in places:
            return True
    return False


def _report(error: ErrorDetails, root: Marked, dialect: Dialect) -> None:
    place = locate(root, error["loc"])
    if error["input"] is None and any(finding.where == place.value for finding in dialect.findings):
        return  # the value could not be read; there is a finding about that
    dialect.findings.append(finding_of(error, root, default=_default(error["loc"])))


def _default(location: Location) -> object:
    if not location:
        return None
    section = SECTIONS.get(".".join(_keys_only(location[:-1])))
    field = section.model_fields.get(str(location[-1])) if section else None
    return field.default if field else None
