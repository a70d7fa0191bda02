"""Malformed configs: the healthy run's `run.yaml`, damaged.

Here every key gets values of a wrong kind, and the file gets wrong contents and wrong places. The exact messages are
in `tests/config/rejections.txt`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ratel_cli.config.others.aliases import SECTIONS, TOP
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_SECTIONS = [name for name in SECTIONS if name != TOP]
_FOREIGN = ("batch_size", "load_in_4bit", "lora_r", "adapter", "rl", "neftune_noise_alpha", "rope_scaling", "tokens")
_TYPOS = {
    "learning_rte: 1": "unknown key `learning_rte`",
    "bse_model: x": "unknown key `bse_model`",
    "storage: {engin: threads}": "unknown key `engin` in `storage`",
    "limits: {host_memry: 1GiB}": "unknown key `host_memry` in `limits`",
    "Seed: 1": "unknown key `Seed`",
    '"": 1': "unknown key",
    '"seed ": 1': "unknown key",
}
_VALUES = {
    "seed: 1.5": "`seed` must be a whole number",
    "seed: 9223372036854775808": "`seed` must be less than",
    "learning_rate: .inf": "`learning_rate` must be a finite number",
    "learning_rate: .nan": "`learning_rate` must be a finite number",
    "learning_rate: 1e999": "`learning_rate` must be a finite number",
    "learning_rate: -1e-5": "`learning_rate` must be at least 0",
    "learning_rate: '1e-5'": "`learning_rate` must be a number",
    "learning_rate: 1e-5e": "`learning_rate` must be a number",
    "learning_rate: 2024-01-01": "`learning_rate` must be a number",
    "micro_batch_size: 0": "`micro_batch_size` must be `auto` or a whole number of at least 1",
    "micro_batch_size: 1_": "`micro_batch_size` must be `auto` or a whole number of at least 1",
    "shuffle: yes": "`shuffle` must be true or false",
    "dtype: int8": "`dtype` must be",
    "limits: {host_memory: 24 elephants}": "`limits.host_memory` must be a size",
    "limits: {host_memory: 1e400}": "`limits.host_memory` must be a size",
    "limits: {host_memory: 12}": "`limits.host_memory` must be at least 1MiB",
    "storage: {paths: ['']}": "`storage.paths.0` must not be empty",
    "output_dir: ''": "`output_dir` must not be empty",
    'output_dir: "a\\0b"': "must not contain a NUL character",
    "output_dir: ~nobody-here/x": "there is no such home directory",
    "datasets: []": "`datasets` is empty",
    "datasets: [{path: x, type: nosuch}]": "`datasets.0.type` must be",
    "datasets: [{type: alpaca}]": "`datasets.0.path` is missing",
    "activations: 1.5": "`activations` must be",
}
_BROKEN = {
    "seed: [1, 2": "the text ends too early",
    "seed: {a: 1": "the text ends too early",
    "seed: 'abc": "the text ends too early",
    "\tseed: 1": "a tab where only spaces are allowed",
    "seed: a: b": "unexpected `:`",
    "   seed: 1": "not valid YAML",
    "- seed": "not valid YAML",
    "---\nseed: 1": "a second document",
    "seed: *nowhere": "not valid YAML",
    "seed: &a [*a]": "nested more than 20 levels deep",
    "seed: %x": "not valid YAML",
    "seed: @x": "not valid YAML",
    "seed: `x`": "not valid YAML",
    "? [a, b]\n: 1": "a key must be text",
    "1.5: 2": "a key must be text",
    "null: 2": "a key must be text",
    'seed: "\\xZZ"': "not valid YAML",
    'seed: "\\U00FFFFFF"': "an escape or number is out of range",
    'dtype: "\\ud800"': "half of a surrogate pair",
    "seed: 1\x00": "the character U\\+0000 is not allowed",
    "seed: 1\x1b[2J": "the character U\\+001B is not allowed",
    "seed: 1\x7f": "the character U\\+007F is not allowed",
}
_TAGS = (
    "!!python/object/apply:os.system ['true']",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!!timestamp 2024-01-01",
    "!mine 3",
)


def cases() -> Iterator[MalformedInput]:
    yield from _kinds()
    for text, message in (_TYPOS | _VALUES | _BROKEN).items():
        yield _lines(text, message)
    for key in _FOREIGN:
        yield _lines(f"{key}: 1", f"`{key}` is not a key of Ratel")
    for tag in _TAGS:
        yield _lines(f"seed: {tag}", "the tag .* is not allowed here")
    yield from _doubles()
    yield from _bombs()
    yield from _files()


def _lines(text: str, message: str, *, name: str | None = None) -> MalformedInput:
    """Lines appended to the healthy config. The first of them has the error."""
    key = text.split(":", 1)[0]

    def damage(inputs: RunFiles) -> int:
        inputs.settings.pop(key, None)
        return inputs.add_lines(text)

    # An unclosed bracket is reported at the end of the file. PyYAML reports no place for a bad escape.
    at_end = message.startswith(("the text ends", "a second", "an escape")) or "\n:" in text
    chosen = no_line(damage) if at_end else damage
    return MalformedInput(name=name or f"line {text[:60]!r}", damage=chosen, message=message)


def _kinds() -> Iterator[MalformedInput]:
    """A list and a mapping as the value of every key."""
    for key in SECTIONS[TOP].model_fields:
        yield _lines(f"{key}: [7]", rf"`{key}(\.\w+)*`", name=f"a list as {key}")
        yield _lines(f"{key}: {{no_such: 7}}", rf"`{key}(\.\w+)*`|`no_such`", name=f"a mapping as {key}")
    for section in _SECTIONS:
        for key in SECTIONS[section].model_fields:
            outer, *inner = section.split(".")
            value = f"{{{key}: [[7]]}}"
            for name in reversed(inner):
                value = f"{{{name}: {value}}}"
            value = f"[{value}]" if section == "datasets" else value
            message = rf"`{re.escape(section)}(\.\d)?\.{key}(\.\w+)*`"
            yield _lines(f"{outer}: {value}", message, name=f"a list as {section}.{key}")


def _doubles() -> Iterator[MalformedInput]:
    for first, second, message in (
        ("seed: 1", "seed: 1", r"`seed` appears twice \(first on line \d+\)"),
        ("lr: 1", "learning_rate: 1", "are both set and mean the same"),
        ("storage: {engine: threads}", "storage: {}", "`storage` appears twice"),
        ('"se\\u0065d": 1', "seed: 2", "`seed` appears twice"),
    ):

        def damage(inputs: RunFiles, first: str = first, second: str = second) -> int:
            for key in ("seed", "learning_rate", "storage"):
                inputs.settings.pop(key, None)
            inputs.add_lines(first)
            return inputs.add_lines(second)

        yield MalformedInput(name=f"lines {first!r} and {second!r}", damage=damage, message=message)


def _bombs() -> Iterator[MalformedInput]:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
    )
    merges = "m0: &m0 {a: 1}\n" + "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 30))
    yield _whole("a bomb of aliases", laughs.encode(), "more than 10000 values")
    yield _whole(
        "a bomb of merges", merges.encode(), "more than 10000 values|nested more than 20 levels deep|unknown key"
    )
    for opening in ("[", "{", "- ", "a: {"):
        yield _whole(
            f"10000 times {opening!r}", (opening * 10_000).encode(), "nested more than 20 levels deep|not valid YAML"
        )
    yield _whole("20000 keys", "".join(f"k{i}: 1\n" for i in range(20_000)).encode(), "more than 10000 values")
    yield _whole("a number of 10000 digits", b"seed: " + b"1" * 10_000, "cannot be read as int")
    yield _whole("300 KiB of spaces", b" " * (300 << 10), "larger than 256 KiB")
    yield _whole("a binary file", bytes(range(256)) * 8, "")


def _whole(name: str, content: bytes, message: str) -> MalformedInput:
    """Another content of the config file."""

    def damage(inputs: RunFiles) -> None:
        inputs.text = content

    return MalformedInput(name=f"config that is {name}", damage=no_line(damage), message=f"run.yaml.*({message})")


def _files() -> Iterator[MalformedInput]:
    for name, content, message in (
        ("empty", b"", "the file is empty"),
        ("a comment", b"# nothing\n", "the file is empty"),
        ("a list", b"- a\n- b\n", "a config consists of `key: value` lines"),
        ("a text", b"hello\n", "a config consists of `key: value` lines"),
        ("a number", b"7\n", "a config consists of `key: value` lines"),
        ("null", b"null\n", "a config consists of `key: value` lines"),
        ("two documents", b"seed: 1\n---\nseed: 2\n", "a second document"),
        ("Latin-1", b"base_model: caf\xe9\n", r":1:16: not UTF-8 text \(byte 0xe9\)"),
        ("UTF-16", "base_model: x\n".encode("utf-16"), "not UTF-8 text|not allowed in YAML"),
        ("UTF-8 cut in a letter", "base_model: \u00e9".encode()[:-1], "not UTF-8 text"),
        ("without a model", b"datasets: a.jsonl\n", "`base_model` is missing"),
        ("without data", b"base_model: a\n", "`datasets` is missing"),
    ):
        yield _whole(name, content, message)

    def directory(inputs: RunFiles) -> None:
        inputs.config.mkdir()

    def missing(inputs: RunFiles) -> None:
        inputs.arguments = [str(inputs.directory / "run.yml"), *inputs.arguments]

    def loop(inputs: RunFiles) -> None:
        os.symlink("loop.yaml", inputs.directory / "loop.yaml")
        _ask_for(inputs, "loop.yaml")

    yield MalformedInput(
        name="config that is a directory",
        damage=no_line(directory),
        message="run.yaml: not the output directory of a run",
    )
    yield MalformedInput(
        name="config in the place of an override", damage=no_line(missing), message="not a `key=value` argument"
    )
    yield MalformedInput(
        name="config that is a link to itself", damage=no_line(loop), message="loop.yaml: cannot be read"
    )
    for file_name, message in {
        "gone.yaml": "gone.yaml: no such file",
        "a\x1b[2Jb.yaml": r"a\\x1b\[2Jb.yaml: no such file",
        "a" * 300: "cannot be read: File name too long",
        "a/" * 3000: "cannot be read: File name too long",
        "run.yaml/x": "cannot be read: Not a directory",
        "\udcff.yaml": r"\\udcff.yaml: no such file",
    }.items():
        shown = repr(file_name[:20])
        yield MalformedInput(
            name=f"config called {shown}",
            damage=no_line(lambda inputs, file_name=file_name: _ask_for(inputs, file_name)),
            message=message,
        )


def _ask_for(inputs: RunFiles, file_name: str) -> None:
    inputs.asks_for = inputs.directory / file_name
