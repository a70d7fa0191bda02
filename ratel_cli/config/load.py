"""From a YAML file and `key=value` arguments to a RunConfig, with every error at its line and column.

    1. parse      the file's text into a tree that knows the place of every value        (`yaml_marks`)
    2. translate  other tools' names into ours, and reject unknown keys                  (`dialect`, `aliases`)
    3. override   values with the arguments, one argument after another                  (`overrides`)
    4. validate   every value, and then the rules about several keys                     (`schema`)

Invariant: all errors are reported at once, first those of the file and then those of the arguments, as one BadInput
that carries the others. Only a syntax error comes alone, because nothing after it can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ratel_cli.commands import command
from ratel_cli.config.dialect import Dialect
from ratel_cli.config.keys.messages import contradictions_in, finding_of
from ratel_cli.config.keys.relation import doubtful_keys
from ratel_cli.config.keys.schema import OWN_DATA, RunConfig
from ratel_cli.config.others.aliases import SECTIONS, TOP
from ratel_cli.config.others.other_tools import other_length, other_mask, other_switch, recognise_surely
from ratel_cli.config.others.torchtune import is_torchtune
from ratel_cli.config.overrides import apply_override
from ratel_cli.config.yaml.source import Location, is_written, keys_by_place, locate, place_of_keys, read_file
from ratel_cli.config.yaml.yaml_marks import (
    ConfigLoader,
    Finding,
    Marked,
    Plain,
    Resolvers,
    Where,
    plain,
    raise_all,
    read_text,
)
from ratel_cli.errors import BadInput, ConfigKey
from ratel_cli.input_files import uncompressed_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A run's config, and notices about how it was read."""

    config: RunConfig
    notices: tuple[str, ...]
    """Aliases, and keys that are ignored, each with its place. For the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a config says, although parts of it may be wrong."""

    config: RunConfig | None
    """The config without the keys in `left_out`; None if nothing can be made of it."""
    left_out: frozenset[str]
    """Top-level keys that are wrong or missing. They have their defaults in `config`, or a path that does not exist."""
    doubtful: frozenset[str]
    """These, and top-level keys with something wrong inside."""
    findings: tuple[Finding, ...]
    """What is wrong, by place; empty if the config is right."""
    notices: tuple[str, ...]
    _root: Marked
    _keys: Mapping[Where, str]

    @property
    def written(self) -> Mapping[str, Plain]:
        """The top-level keys that the user wrote, under our names, and their values."""
        values = plain(self._root)
        assert isinstance(values, dict)
        return values

    def place_of(self, key: ConfigKey) -> Where | None:
        """The place of a key's value; None if the user did not write it."""
        if not key or not is_written(self._root, key):
            return None
        return locate(self._root, key).value

    def key_at(self, where: Where) -> str | None:
        """The dotted key at a place, as the user wrote it."""
        return self._keys.get(where)


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config in a file, with `key=value` overrides. Raises BadInput with everything that is wrong."""
    return _accepted(examine_config(path, overrides))


def config_from(content: Mapping[str, Plain], overrides: Sequence[str], *, path: Path) -> LoadedConfig:
    """The config with these values and `key=value` overrides; `path` is what it is about. Raises BadInput."""
    return _accepted(examine_text(dump(content), path, overrides))


def config_of_caller(content: Mapping[str, object], names: Mapping[str, str]) -> RunConfig:
    """The config with these values of Python, for a caller that brings the data itself. Raises BadInput with everything
    that is wrong. `names`: what the caller calls a key, if it has another name."""
    try:
        return RunConfig.model_validate(content, context=OWN_DATA)
    except ValidationError as error:
        findings = error.errors(include_url=False)
    located = ((".".join(map(str, each["loc"])), each["msg"]) for each in findings)
    raise BadInput("; ".join(f"{names.get(key, key)}: {message}" for key, message in located))


def _accepted(reading: Reading) -> LoadedConfig:
    raise_all(list(reading.findings))
    assert reading.config is not None
    return LoadedConfig(config=reading.config, notices=reading.notices)


def examine_config(path: Path, overrides: Sequence[str] = ()) -> Reading:
    """Like `load_config`, but keeps what is wrong, and goes on. Raises BadInput if the file is no config at all."""
    return examine_text(read_file(path, "config"), path, overrides)


def examine_text(text: str, path: Path, overrides: Sequence[str] = ()) -> Reading:
    """`examine_config` for the text of a file, which need not exist; `path` is its name."""
    findings: list[Finding] = []
    dialect = Dialect(findings)
    root = read_text(text, str(path), findings)
    if not isinstance(root.content, dict):
        hint = "write `base_model: ...` and the other keys, one per line"
        raise Finding(where=root.where, message="a config consists of `key: value` lines", hint=hint).as_error()
    if is_torchtune(root):
        hint = f"translate it: {command('import', path, '-o', 'run.yaml')}"
        raise Finding(where=root.where, message="this is a config of torchtune", hint=hint).as_error()
    keys = keys_by_place(root)
    tool = recognise_surely(root)
    switch = other_switch(tool, root)
    dialect.translate(TOP, root)
    for number, argument in enumerate(overrides, start=1):
        apply_override(root, argument, number, dialect)
    dialect.finish()
    dialect.notices += filter(None, (switch, other_mask(tool, root), other_length(tool, root)))
    config, left_out = validate(root, dialect), frozenset[str]()
    if findings:
        config, left_out = _usable_part(root)
    else:
        assert config is not None
        for doubtful in doubtful_keys(config):
            where = place_of_keys(root, (), doubtful.keys)
            message = doubtful.message if doubtful.hint is None else f"{doubtful.message}; {doubtful.hint}"
            dialect.notices.append(Finding(where=where, message=message))
    notices = sorted(dialect.notices, key=lambda notice: notice.where)
    return Reading(
        config=None if config is None else config.resolved(uncompressed_name(path).stem),
        left_out=left_out,
        doubtful=left_out | {steps[0] for steps in dialect.doubtful},
        findings=tuple(sorted(findings, key=lambda finding: finding.where)),
        notices=tuple(f"{notice.where}: {notice.message}" for notice in notices),
        _root=root,
        _keys=keys,
    )


def dump(content: Mapping[str, Plain]) -> str:
    """Values as YAML text that our own reader reads as the same values."""
    return yaml.dump(dict(content), Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True, width=110)


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


def validate(root: Marked, dialect: Dialect) -> RunConfig | None:
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


_NO_PATH = "/dev/null/missing"
"""Path that stands for a file or model that is not named: no hub id, so that nothing is looked for on the hub."""


def _usable_part(root: Marked) -> tuple[RunConfig | None, frozenset[str]]:
    """The config without the top-level keys that are wrong, and these keys. The finding about each was made before."""
    data = plain(root)
    assert isinstance(data, dict)
    stand_ins: dict[str, Plain] = {"base_model": _NO_PATH, "datasets": [{"path": _NO_PATH}]}
    left_out: set[str] = set()
    while True:
        try:
            return RunConfig.model_validate(data), frozenset(left_out)
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
        wrong = {str(step) for error in errors for step in error["loc"][:1]}
        for error in errors:
            if error["type"] == "contradictions" and not error["loc"]:
                wrong.update(key for each in error["ctx"]["found"] for key in each.keys)
        if not wrong & data.keys():
            wrong = stand_ins.keys() - data.keys()
            if not wrong:
                return None, frozenset(left_out)
            data.update({key: stand_ins[key] for key in wrong})
        else:
            data = {key: value for key, value in data.items() if key not in wrong}
        left_out |= wrong


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
