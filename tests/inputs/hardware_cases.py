"""Hardware files that are no YAML, or describe no machine, given to `ratel plan`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.inputs.cases import Case, Inputs, quietly

_NUMBERS = {
    "gpu": ("memory_bytes", "flops_per_second"),
    "link": ("to_gpu_bytes_per_second", "from_gpu_bytes_per_second"),
    "nvme": ("num_devices", "read_bytes_per_second", "write_bytes_per_second", "free_bytes"),
    "host": ("memory_bytes", "available_bytes", "adam_parameters_per_second", "memory_bytes_per_second", "num_cores"),
}
"""What `Inputs.healthy_hardware` has, beside names and comments."""
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
    "1: 2": "a key must be text",
    "x: *nowhere": "not valid YAML",
    "x: !!python/name:os.system y": "the tag .* is not allowed here",
    "\tx: 1": "a tab where only spaces are allowed",
    "x: 1\x1b": "the character U\\+001B is not allowed",
}


def cases() -> Iterator[Case]:
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
    for text, told in _MORE.items():
        yield _added(text, told)
    yield from _files()


def _value(section: str, key: str, value: str) -> Case:
    """Another value for a key that is there."""

    def damage(inputs: Inputs) -> int:
        lines = inputs.healthy_hardware.read_text().splitlines()
        at = _line_of(lines, section, key)
        lines[at] = f"  {key}: {value}"
        inputs.plan_for("\n".join(lines).encode())
        return at + 1

    return Case(name=f"hardware with {section}.{key}: {value}", damage=damage, told=rf"`({section}\.)?{key}(\.\w+)*`")


def _without(section: str, key: str) -> Case:
    def damage(inputs: Inputs) -> None:
        lines = inputs.healthy_hardware.read_text().splitlines()
        del lines[_line_of(lines, section, key)]
        inputs.plan_for("\n".join(lines).encode())

    told = rf":\d+:\d+: `{section}\.{key}` is missing"
    return Case(name=f"hardware without {section}.{key}", damage=quietly(damage), told=told)


def _line_of(lines: list[str], section: str, key: str) -> int:
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{section}:"))
    return next(number for number in range(start, len(lines)) if lines[number].startswith(f"  {key}:"))


def _added(text: str, told: str) -> Case:
    def damage(inputs: Inputs) -> int:
        healthy = inputs.healthy_hardware.read_bytes()
        inputs.plan_for(healthy + text.encode() + b"\n")
        return healthy.count(b"\n") + 1

    return Case(name=f"hardware with {text!r}", damage=damage, told=told)


def _files() -> Iterator[Case]:
    for name, content, told in (
        ("empty", b"", "the file is empty"),
        ("a list", b"[1, 2]", "a hardware file consists of `key: value` lines"),
        ("JSON that is cut", b'{"gpu": {"name": ', "the text ends too early"),
        ("not UTF-8", b"gpu: \xff", "not UTF-8 text"),
        ("nested deeply", b"[" * 10_000, "nested more than 20 deep|not valid YAML"),
        ("300 KiB", b"# " + b"a" * (300 << 10), "larger than 256 KiB; this is not a hardware file"),
        ("a zip archive", b"PK\x03\x04" + bytes(100), "not allowed in YAML|not UTF-8"),
    ):
        yield Case(
            name=f"hardware that is {name}",
            damage=quietly(lambda inputs, content=content: inputs.plan_for(content)),
            told=f"hardware.yaml.*({told})",
        )

    def directory(inputs: Inputs) -> None:
        path = inputs.plan_for(b"")
        os.unlink(path)
        path.mkdir()

    def gone(inputs: Inputs) -> None:
        os.unlink(inputs.plan_for(b""))

    yield Case(name="hardware that is a directory", damage=quietly(directory), told="hardware.yaml: is a directory")
    yield Case(name="hardware that is not there", damage=quietly(gone), told="hardware.yaml: no such file")
