"""Chat templates: where assistant turns are, and that no template can hang the run or exhaust its memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from ratel_cli.data.text.chat import ChatRenderer
from ratel_cli.data.text.chat_child import ChatMessage, Prompt, RenderFailure, find_turns, has_generation_tag
from ratel_cli.data.text.drafts import ChatDraft, Unusable
from ratel_cli.errors import BadInput, EnvironmentFailure
from tests.forked_chat import forked_chat_children
from tests.tiers import thinned

HEADED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
PLAIN = HEADED + "{% if add_generation_prompt %}<assistant>{% endif %}"
# As Qwen3 does: only the answer to the last user message shows its reasoning, which is empty here.
REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}{{ m.content }}</>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As DeepSeek-R1 does: the generation prompt begins the reasoning, which finished turns do not show.
OPENED = HEADED + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
# As Llama 2 does: user turns in brackets, no header for the assistant, trimmed text.
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
# Only the last turn has an end mark.
ONE_END = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
REVERSED = "{% for m in messages | reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{{ messages | length }}"


@pytest.fixture(autouse=True, scope="module")
def _chat_children() -> None:
    """The children start as in a run: no forks."""


@pytest.fixture
def forks() -> Iterator[None]:
    """Children that are forks, for what does not depend on how they start."""
    with forked_chat_children():
        yield


def _turns(*contents: str) -> list[ChatMessage]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]


FOUR = _turns("hello", "one", "again", "two")


def _located(template: str, messages: list[ChatMessage]) -> list[str]:
    compiled = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(template)

    def render(some: list[ChatMessage], prompt: Prompt) -> str:
        if not some:
            raise RenderFailure("no messages")
        thinks = {"enable_thinking": prompt == "thinks"} if prompt in ("quiet", "thinks") else {}
        return compiled.render(messages=some, add_generation_prompt=prompt != "none", **thinks)

    found = find_turns(render, messages)
    assert found.text == render(messages, "none")
    return [found.text[span[0] : span[1]] for span in found.spans if span is not None]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, FOUR, ["one</>\n", "two</>\n"]),
        (REASONING, FOUR, ["one</>\n", "<think></think>two</>\n"]),
        (OPENED, FOUR, ["one</>\n", "two</>\n"]),
        (BRACKETS, FOUR, [" one</s>", " two</s>"]),
        (ONE_END, FOUR, ["one", "two</s>"]),
        # Turns that look like each other, or like the stand-in.
        (PLAIN, _turns(*"xxxxx"), ["x</>\n", "x</>\n"]),
        (REASONING, _turns(*"xxxxx"), ["x</>\n", "x</>\n"]),
        (REASONING, [*_turns("TextOfOneAssistantTurn"), *FOUR[1:]], ["one</>\n", "<think></think>two</>\n"]),
        # The assistant begins, speaks twice, and not at all.
        (PLAIN, FOUR[1:], ["one</>\n", "two</>\n"]),
        (PLAIN, [*FOUR[:2], FOUR[3]], ["one</>\n", "two</>\n"]),
        (PLAIN, FOUR[:1], []),
    ],
)
def test_turns_are_found_in_templates_and_conversations_of_every_kind(
    template: str, messages: list[ChatMessage], expected: list[str]
) -> None:
    assert _located(template, messages) == expected


@pytest.mark.parametrize("template", [REVERSED, SILENT])
def test_a_template_that_hides_turns_is_rejected(template: str) -> None:
    with pytest.raises(RenderFailure, match=r"assistant turn \d cannot be located"):
        _located(template, _turns("a", "one", "b", "two", "c"))


def test_a_turn_without_text_out_of_place() -> None:
    """Only the last answer shows reasoning, so the conversation up to an earlier call is no prefix of the whole."""
    messages = _turns("a", "one", "b", "two")
    messages[1] = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    template = REASONING.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}[call]{% endfor %}")
    assert _located(template, messages) == ["[call]</>\n", "<think></think>two</>\n"]
    assert _located(REASONING, messages) == ["</>\n", "<think></think>two</>\n"]


def test_a_turn_before_which_nothing_stands() -> None:
    """There is no conversation before it whose prompt it could follow: the header is that behind a question."""
    end = "{{ '<return>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<end>' }}"
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<final>{% endif %}{{ m.content }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert _located(template, _turns("a", "one", "b", "two")[1:]) == ["<final>one<end>", "<final>two<return>"]


@pytest.mark.parametrize(
    ("template", "found"),
    [("{% generation %}", True), ("{%- generation -%}", True), ("{{ generation }}", False), ("", False)],
)
def test_generation_tag(template: str, found: bool) -> None:
    assert has_generation_tag(template) == found


def children_of_all_threads() -> set[str]:
    """The processes that this one has started."""
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found |= {*(task / "children").read_text().split()}
    return found


@pytest.fixture
def no_child_left() -> Iterator[set[str]]:
    """The processes from before the test. Checks that the rendering process is gone afterwards."""
    before = children_of_all_threads()
    yield before
    assert children_of_all_threads() == before


def _draft(*contents: str) -> ChatDraft:
    return ChatDraft(messages=_turns(*contents), tools=None)


@pytest.mark.usefixtures("no_child_left")
def test_rendering_in_the_child() -> None:
    with ChatRenderer(PLAIN.replace("</>", "{{ end }}"), {"end": "<e>"}) as renderer:
        chat = renderer.render(_draft("a\u00e9\n", "b\U0001f600"), locate=True)
        assert chat.text == "<user>a\u00e9\n<e>\n<assistant>b\U0001f600<e>\n"
        assert [chat.text[start:end] for start, end in chat.spans] == ["b\U0001f600<e>\n"]
        assert renderer.render(_draft("a", "b"), locate=False).spans == ()
        long = "long " * 100_000  # more than a pipe holds
        assert renderer.render(_draft(long, long), locate=True).text.count("long ") == 200_000
        unfit: list[ChatMessage] = [{"role": "user", "content": "a", "raw": b"x"}]
        with pytest.raises(Unusable, match="a message contains a value that JSON cannot represent"):
            renderer.render(ChatDraft(messages=unfit, tools=None), locate=True)
        renderer.close()
        renderer.close()


BAD_WAYS = {
    "{{ raise_exception('roles must alternate') }}": "TemplateError: roles must alternate",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{% set x = 'y' * 10 ** 11 %}{{ x }}": "too much memory",
    "{{ 'xy' * (20 * 1024 * 1024) * (messages | length) }}": "renders more than 67108864 characters",
    "{{ undefined.field }}": "UndefinedError",
    "<assistant>fine": "",
}


@pytest.mark.full
@pytest.mark.usefixtures("forks")
def test_what_a_template_may_not_do_costs_one_row() -> None:
    """The first message selects what the template does. The child survives every case."""
    branches = (f"{{% if way == {index} %}}{way}" for index, way in enumerate(BAD_WAYS))
    template = "{% set way = messages[0].content | int %}" + "{% endif %}".join(branches) + "{% endif %}"
    with ChatRenderer(template, {}, limit_seconds=100.0) as renderer:  # 40 MB take seconds on a busy machine
        for index, reason in enumerate(BAD_WAYS.values()):
            if reason:
                with pytest.raises(Unusable, match=reason):
                    renderer.render(_draft(str(index), "b"), locate=False)
            else:
                assert renderer.render(_draft(str(index), "b"), locate=False).text == "<assistant>fine"


@pytest.mark.usefixtures("forks")
def test_a_template_with_bad_syntax() -> None:
    with ChatRenderer("{% for %}", {}) as renderer, pytest.raises(Unusable, match="TemplateSyntaxError"):
        renderer.render(_draft("a", "b"), locate=True)


@pytest.mark.usefixtures("no_child_left")
def test_an_endless_template_ends_the_run() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with (
        ChatRenderer(endless, {}, limit_seconds=0.3) as renderer,
        pytest.raises(BadInput, match=r"did not finish one conversation within 0\.3 s"),
    ):
        renderer.render(_draft("a"), locate=True)


@pytest.mark.usefixtures("forks")
def test_a_slow_template_says_so_once() -> None:
    loops = "{% for i in range(100) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    slow = "{% if messages | length > 1 %}" + loops + "{% endif %}"
    said: list[str] = []
    with ChatRenderer(slow, {}, notice=said.append, limit_seconds=60, slow_seconds=0.001) as renderer:
        for _ in range(2):
            renderer.render(_draft("a", "b"), locate=False)
    assert said == ["the chat template takes long for one conversation; it is stopped after 60 s, and the run with it"]


LOSSES = {
    "words": ({"role": "user", "content": "two\nlines"}, None, "text of user messages"),
    "calls": ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, None, "tool calls"),
    "tools": ({"role": "user", "content": "x"}, [{"type": "function", "function": {"name": "f"}}], "tools"),
}


@pytest.mark.full
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("case", LOSSES)
def test_what_a_template_leaves_out_is_reported(case: str) -> None:
    message, tools, lost = LOSSES[case]
    draft = ChatDraft(messages=[message], tools=tools)
    everything = "{{ messages | tojson }}{{ tools | tojson }}"
    with ChatRenderer("{{ messages | length }}", {}) as drops, ChatRenderer(everything, {}) as writes:
        assert ("lost", lost) in drops.render(draft, locate=False).remarks
        assert writes.render(draft, locate=False).remarks == ()


@pytest.mark.usefixtures("forks")
def test_words_may_be_trimmed_by_the_template() -> None:
    with ChatRenderer("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {}) as renderer:
        assert renderer.render(_draft(" a \n", "", "b"), locate=False).remarks == ()


@pytest.mark.parametrize("locate", thinned([False, True], every=2, offset=1))
def test_a_child_that_dies_ends_the_run(no_child_left: set[str], locate: bool) -> None:
    with ChatRenderer(PLAIN, {}) as renderer:
        (child,) = children_of_all_threads() - no_child_left
        os.kill(int(child), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(BadInput, match="the process that renders chat templates ended: killed by SIGKILL"):
                renderer.render(_draft("a", "b"), locate=locate)


def test_ctrl_c_does_not_reach_the_child(no_child_left: set[str]) -> None:
    """A child in the terminal's process group would die of Ctrl-C, and its death could hide why the run ends."""
    with ChatRenderer(PLAIN, {}):
        (child,) = children_of_all_threads() - no_child_left
        assert os.getpgid(int(child)) != os.getpgid(0)


@pytest.mark.usefixtures("no_child_left")
def test_a_child_that_cannot_start() -> None:
    with pytest.raises(EnvironmentFailure, match="did not start: OverflowError"):
        ChatRenderer(PLAIN, {}, limit_bytes=1 << 80)
