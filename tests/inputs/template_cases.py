"""Chat templates that break, walk about, or never end: the base model's, replaced.

A template is a program of the model's author. It runs in a process of its own; what that may cost is
bounded, and so is what it may say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ratel_cli.data.chat import LIMIT_SECONDS
from tests.inputs.cases import Case, Inputs, quietly

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
    "{% include '/etc/passwd' %}": "refuses it",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% set x = 'y' * 10 ** 11 %}{{ x }}": "too much memory",
    "{{ 'xy' * (40 * 1024 * 1024) }}": "renders more than 67108864 characters",
    "{% for i in range(10 ** 9) %}{% endfor %}": "OverflowError",
    "nothing of it": "cannot be located|all masked",
}
_ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def cases() -> Iterator[Case]:
    for template, told in _TEMPLATES.items():
        yield _template(repr(template), template, rf"rows.jsonl:1: .*({told})")
    told = f"the chat template did not finish one conversation within {LIMIT_SECONDS:g} s"
    yield _template("that never ends", _ENDLESS, told, seconds=LIMIT_SECONDS + 3)
    yield _file("not UTF-8", b"{{ '\xff' }}", "no usable tokenizer")
    yield _file("empty", b"", "no chat template|cannot be located|all masked")

    def remove(inputs: Inputs) -> None:
        (inputs.base / "chat_template.jinja").unlink()
        inputs.data(_ROW.encode(), type="chat_template")

    yield Case(name="template that is not there", damage=quietly(remove), told="the tokenizer has no chat template")

    def nameless(inputs: Inputs) -> None:
        """Several templates, none of which is the usual one."""
        directory = inputs.base / "additional_chat_templates"
        directory.mkdir()
        (inputs.base / "chat_template.jinja").rename(directory / "tool_use.jinja")
        inputs.data(_ROW.encode(), type="chat_template")

    yield Case(name="template that is not the default", damage=quietly(nameless), told="no chat template")


def _template(name: str, template: str, told: str, *, seconds: float = 2.0) -> Case:
    case = _file(name, template.encode(), told)
    return Case(name=case.name, damage=case.damage, told=case.told, seconds=seconds)


def _file(name: str, content: bytes, told: str) -> Case:
    def damage(inputs: Inputs) -> None:
        (inputs.base / "chat_template.jinja").write_bytes(content)
        inputs.data(_ROW.encode(), type="chat_template")

    return Case(name=f"template {name}", damage=quietly(damage), told=told)
