"""Malformed chat templates: they fail, leave their sandbox, take all memory, or never end.

A template is a program of the model's author. It runs in a child process with limits on time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ratel_cli.data.text.chat import LIMIT_SECONDS
from tests.inputs.cases import MalformedInput, RunFiles, no_line

_ROW = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"
_TEMPLATES = {
    "{% for %}": "TemplateSyntaxError",
    "{{ messages": "TemplateSyntaxError",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ ''.format.__globals__ }}": "all masked",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ undefined.field }}": "UndefinedError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ raise_exception('no\x1b[2J') }}": r"TemplateError: no\\x1b\[2J",
    "{% include '/etc/passwd' %}": "fails on this conversation",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% set x = 'y' * 10 ** 11 %}{{ x }}": "too much memory",
    "{{ 'xy' * (40 * 1024 * 1024) }}": "renders more than 67108864 characters",
    "{% for i in range(10 ** 9) %}{% endfor %}": "OverflowError",
    "nothing of it": "cannot be located|all masked",
}
_ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def cases() -> Iterator[MalformedInput]:
    for template, message in _TEMPLATES.items():
        yield _template(repr(template), template, rf"rows.jsonl:1: .*({message})")
    yield _file("not UTF-8", b"{{ '\xff' }}", "no usable tokenizer")
    yield _file("empty", b"", "no chat template|cannot be located|all masked")

    def remove(inputs: RunFiles) -> None:
        (inputs.base / "chat_template.jinja").unlink()
        inputs.data(_ROW.encode(), type="chat_template")

    yield MalformedInput(
        name="template that is not there", damage=no_line(remove), message="the tokenizer has no chat template"
    )

    message = f"the chat template did not finish one conversation within {LIMIT_SECONDS:g} s"
    yield _template("that is endless", _ENDLESS, message, seconds=LIMIT_SECONDS + 10)

    def nameless(inputs: RunFiles) -> None:
        """Named templates only, none of them the default."""
        directory = inputs.base / "additional_chat_templates"
        directory.mkdir()
        (inputs.base / "chat_template.jinja").rename(directory / "tool_use.jinja")
        inputs.data(_ROW.encode(), type="chat_template")

    yield MalformedInput(name="template that is not the default", damage=no_line(nameless), message="no chat template")


def _template(name: str, template: str, message: str, *, seconds: float = 10.0) -> MalformedInput:
    case = _file(name, template.encode(), message)
    return MalformedInput(name=case.name, damage=case.damage, message=case.message, seconds=seconds)


def _file(name: str, content: bytes, message: str) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        (inputs.base / "chat_template.jinja").write_bytes(content)
        inputs.data(_ROW.encode(), type="chat_template")

    return MalformedInput(name=f"template {name}", damage=no_line(damage), message=message)
