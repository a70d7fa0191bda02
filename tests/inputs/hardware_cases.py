"""Malformed hardware files for `ratel plan`: not YAML, or no description of a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.inputs.cases import MalformedInput, RunFiles, no_line

_NUMBERS = {
    "gpu": ("memory_bytes", "flops_per_second", "memory_bytes_per_second"),
    "link": ("to_gpu_bytes_per_second", "from_gpu_bytes_per_second"),
    "nvme": ("num_devices", "read_bytes_per_second", "write_bytes_per_second", "free_bytes"),
    "host": ("memory_bytes", "available_bytes", "adam_parameters_per_second", "memory_bytes_per_second", "num_cores"),
}
"""The keys of `RunFiles.healthy_hardware`, without names."""
_OPTIONAL = ("num_devices", "memory_bytes_per_second", "num_cores")
_WRONG = ("fast", "-1", "[1]", "{a: 1}", "true", "null", ".nan", "1e999", "3 parsecs", "12 bananas/s")
_MORE = {
    "gpu: [1]": "`gpu` appears twice",
    "gpu:": "`gpu` appears twice",
    "machine: fast": "unknown key `machine`",
    "format_version: 2": "`format_version` must be",
    "format_version: '1'": "`format_version` must be",
    "host: {}": "appears twice",
    "nvm: {}": "unknown key `nvm`",
    "1.5: 2": "a key must be text",
    "x: *nowhere": "not valid YAML",
    "x: !!python/name:os.system y": "the tag .* is not allowed here",
    "\tx: 1": "a tab where only spaces are allowed",
    "x: 1\x1b": "the character U\\+001B is not allowed",
}


def cases() -> Iterator[MalformedInput]:
    for section, keys in _NUMBERS.items():
        for key in keys:
            for value in _WRONG:
                if (key, value) != ("memory_bytes_per_second", "null"):
                    yield _value(section, key, value)
            if key not in _OPTIONAL:
                yield _without(section, key)
    yield _value("gpu", "name", "[1]")
    yield _value("gpu", "name", "''")
    yield _value("host", "available_bytes", "900000000000000")
    for text, message in _MORE.items():
        yield _added(text, message)
    yield from _files()


def _value(section: str, key: str, value: str) -> MalformedInput:
    """Another value for an existing key."""

    def damage(inputs: RunFiles) -> int:
        lines = inputs.healthy_hardware.read_text().splitlines()
        at = _line_of(lines, section, key)
        lines[at] = f"  {key}: {value}"
        inputs.plan_for("\n".join(lines).encode())
        return at + 1

    return MalformedInput(
        name=f"hardware with {section}.{key}: {value}", damage=damage, message=rf"`({section}\.)?{key}(\.\w+)*`"
    )


def _without(section: str, key: str) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        lines = inputs.healthy_hardware.read_text().splitlines()
        del lines[_line_of(lines, section, key)]
        inputs.plan_for("\n".join(lines).encode())

    message = rf":\d+:\d+: `{section}\.{key}` is missing"
    return MalformedInput(name=f"hardware without {section}.{key}", damage=no_line(damage), message=message)


def _line_of(lines: list[str], section: str, key: str) -> int:
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{section}:"))
    return next(number for number in range(start, len(lines)) if lines[number].startswith(f"  {key}:"))


def _added(text: str, message: str) -> MalformedInput:
    def damage(inputs: RunFiles) -> int:
        healthy = inputs.healthy_hardware.read_bytes()
        inputs.plan_for(healthy + text.encode() + b"\n")
        return healthy.count(b"\n") + 1

    return MalformedInput(name=f"hardware with {text!r}", damage=damage, message=message)


def _files() -> Iterator[MalformedInput]:
    for name, content, message in (
        ("empty", b"", "the file is empty"),
        ("a list", b"[1, 2]", "a hardware file consists of `key: value` lines"),
        ("JSON that is cut", b'{"gpu": {"name": ', "the text ends too early"),
        ("not UTF-8", b"gpu: \xff", "not UTF-8 text"),
        ("nested deeply", b"[" * 10_000, "nested more than 20 levels deep|not valid YAML"),
        ("300 KiB", b"# " + b"a" * (300 << 10), "larger than 256 KiB; this is not a hardware file"),
        ("a zip archive", b"PK\x03\x04" + bytes(100), "not allowed in YAML|not UTF-8"),
    ):
        yield MalformedInput(
            name=f"hardware that is {name}",
            damage=no_line(lambda inputs, content=content: inputs.plan_for(content)),
            message=f"hardware.yaml.*({message})",
        )

    def directory(inputs: RunFiles) -> None:
        path = inputs.plan_for(b"")
        os.unlink(path)
        path.mkdir()

    def gone(inputs: RunFiles) -> None:
        os.unlink(inputs.plan_for(b""))

    yield MalformedInput(
        name="hardware that is a directory", damage=no_line(directory), message="hardware.yaml: is a directory"
    )
    yield MalformedInput(name="hardware that is not there", damage=no_line(gone), message="hardware.yaml: no such file")
