"""Chat templates of the shapes that model families have, written for tests, with the tokens at which each model stops.

They have what no template of TRL's has: marks of other forms, or none; an end mark that comes only if a message
follows; a prompt whatever is asked for; a prompt with a thought that no conversation has; no prompt at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template and what its model stops at."""

    template: str
    stops: tuple[str, ...]
    """Marks at which the model stops."""
    ends: tuple[str, ...] = ()
    """Marks that end a turn in the middle of a conversation, at which the model does not stop."""
    adds: dict[str, str] = field(default_factory=dict)
    """By the role that comes next: the stop token that it begins with, where the last turn has none."""
    header: str | None = None
    """What stands before a turn, if the template has no generation prompt."""
    variables: dict[str, object] = field(default_factory=dict)


_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
)


def _plain(
    header: str, end: str, prompt: str | None = None, *, start: str = "", answer_end: str | None = None, name: str = ""
) -> str:
    """A template of turns that all look alike. `{}` in the header is the role; `name`: the assistant's, if another."""
    of_role = "{{ 'NAME' if m.role == 'assistant' else m.role }}".replace("NAME", name or "assistant")
    turn = header.replace("{}", of_role) + "{{ m.content or '' }}" + _CALLS
    ends = "{% if m.role == 'assistant' %}" + (answer_end or end) + "{% else %}" + end + "{% endif %}"
    asked = header.replace("{}", name or "assistant") if prompt is None else prompt
    tools = "{% if tools %}" + header.replace("{}", "system") + "{{ tools | tojson }}" + end + "{% endif %}"
    every = "{% for m in messages %}" + turn + ends + "{% endfor %}"
    return start + tools + every + "{% if add_generation_prompt %}" + asked + "{% endif %}"


def _by_role(*, user: str, assistant: str, tool: str, prompt: str, start: str = "", end: str = "") -> str:
    """A template of turns that look different. System prompts are a user's."""
    return (
        start + "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant
        + "{% elif m.role == 'tool' %}" + tool + "{% else %}" + user + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}" + prompt + "{% endif %}" + end
    )  # fmt: skip


_WORDS = "{{ m.content or '' }}"

_FOLLOWED = (
    "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}<|assistant_end|>"
    "{% endif %}<|{{ m.role }}_start|>"
    + _WORDS
    + _CALLS
    + "{% if m.role != 'assistant' %}<|{{ m.role }}_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
_ALWAYS_ASKS = (
    "{% for m in messages %}<|SOT|>{% if m.role == 'assistant' %}<|CHATBOT|>{% if m.tool_calls %}<|START_ACTION|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ m.tool_calls[0].function.name }}<|END_ACTION|>{% else %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}{% else %}<|USER|>{{ m.content }}{% endif %}<|EOT|>"
    "{% endfor %}<|SOT|><|CHATBOT|>"
)
_ALWAYS_ASKS_TO_THINK = _ALWAYS_ASKS + "<|START_THINKING|>"
_CLOSED_THOUGHT = _by_role(
    user="<|User|>" + _WORDS,
    assistant="<|Assistant|>" + _WORDS + _CALLS + "<|eos|>",
    tool="<|tool|>" + _WORDS,
    prompt="<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}",
    start="<|bos|>",
)
_KEPT_THOUGHT = _CLOSED_THOUGHT.replace("<|Assistant|>{{", "<|Assistant|></think>{{")
_BRACKETS = _by_role(
    user="<s>[INST] {{ m.content | trim }} [/INST]",
    assistant=" {{ m.content | trim }}" + _CALLS + "</s>",
    tool="[RESULT]{{ m.content }}[/RESULT]",
    prompt="",
)
FAMILIES: dict[str, Family] = {
    "next header without thoughts (GLM-4)": Family(
        template=_plain("<|{}|>\n", "", start="[GATE]<sop>").replace("<|tool|>", "<|observation|>"),
        stops=("<|user|>", "<|tool|>", "<|endoftext|>"),
        adds={"user": "<|user|>", "tool": "<|tool|>"},
    ),
    "end only if followed (Apertus)": Family(
        template=_FOLLOWED,
        stops=("<|assistant_end|>",),
        adds={"user": "<|assistant_end|>", "tool": "<|assistant_end|>"},
    ),
    "always a prompt (Command R7B)": Family(template=_ALWAYS_ASKS, stops=("<|EOT|>",)),
    "always a prompt that thinks (Command A)": Family(template=_ALWAYS_ASKS_TO_THINK, stops=("<|EOT|>",)),
    "closed thought in the prompt (DeepSeek V3.2)": Family(template=_CLOSED_THOUGHT, stops=("<|eos|>",)),
    "closed thought in prompt and turns (DeepSeek V3.1)": Family(template=_KEPT_THOUGHT, stops=("<|eos|>",)),
    "brackets (Llama 2)": Family(template=_BRACKETS, stops=("</s>",), header=""),
    "ChatML, EOS at the end (OLMo 3)": Family(
        template=_plain(
            "<|im_start|>{}\n", "<|im_end|>\n", answer_end="{{ eos_token if loop.last else '<|im_end|>\\n' }}"
        ),
        stops=("<|endoftext|>", "<|im_end|>"),
        variables={"eos_token": "<|endoftext|>"},
    ),
    "ChatML with a middle (Kimi K2)": Family(
        template=_plain("<|im_{}|>{}<|im_middle|>", "<|im_end|>"), stops=("<|im_end|>",)
    ),
    "square marks (EXAONE)": Family(template=_plain("[|{}|]", "[|endofturn|]\n"), stops=("[|endofturn|]",)),
    "roles behind (GigaChat)": Family(
        template=_plain("{}<|role_sep|>\n", "<|message_sep|>\n\n"), stops=("<|message_sep|>",)
    ),
    "odd brackets (MiniMax M2)": Family(template=_plain("]~b]{}\n", "[e~[\n", name="ai"), stops=("[e~[",)),
    "words (Vicuna)": Family(
        template=_by_role(
            user="USER: " + _WORDS + " ", assistant="ASSISTANT: " + _WORDS + _CALLS + "</s>",
            tool="TOOL: " + _WORDS + " ", prompt="ASSISTANT: ",
        ),
        stops=("</s>",),
    ),
    "EOS of the assistant alone (OLMo 2)": Family(
        template=_plain("<|{}|>\n", "\n", answer_end="<|endoftext|>\n"), stops=("<|endoftext|>",)
    ),
    "no generation prompt": Family(
        template=_plain("<|{}|>", "<|end|>", prompt=""), stops=("<|end|>",), header="<|assistant|>"
    ),
    "no generation prompt, last turn ends otherwise": Family(
        template=_plain("<|{}|>", "<|end|>", prompt="", answer_end="{{ '<|eos|>' if loop.last else '<|end|>' }}"),
        stops=("<|eos|>", "<|end|>"), header="<|assistant|>",
    ),
    "generation marks without the end": Family(
        template=_by_role(
            user="<|{{ m.role }}|>" + _WORDS + "<|end|>",
            assistant="<|assistant|>{% generation %}" + _WORDS + _CALLS + "{% endgeneration %}<|end|>",
            tool="<|tool|>" + _WORDS + "<|end|>", prompt="<|assistant|>",
        ),
        stops=("<|end|>",),
    ),
}  # fmt: skip
"""By the shape, with a family that has it."""
