"""Chat templates of the shapes that model families have, written for tests, with the tokens at which each model stops.

Most write `header, words, end` for each role and differ in their marks. The others have a shape of their own: the end
mark of a turn is the next message's header, or comes only if a message follows; the last turn ends otherwise; a prompt
follows whatever is asked for; the prompt has a thought that no conversation has; contents are lists of parts.
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
_THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_LATE_THOUGHT = "{% if loop.index0 > ns.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"

_NEXT_HEADER = _LAST_USER + _by_role(
    user="<|{{ m.role }}|>\n" + _WORDS,
    assistant="<|assistant|>\n" + _LATE_THOUGHT + "{% else %}<think></think>{% endif %}\n" + _WORDS + _CALLS,
    tool="<|observation|>\n" + _WORDS,
    prompt="<|assistant|>",
    start="[GATE]<sop>",
)
_FOLLOWED = (
    "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == 'assistant' %}<|assistant_end|>"
    "{% endif %}<|{{ m.role }}_start|>"
    + _WORDS
    + _CALLS
    + "{% if m.role != 'assistant' %}<|{{ m.role }}_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
_LAST_MARK = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' and m.tool_calls %} to={{ "
    "m.tool_calls[0].function.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}{% if loop.last and not "
    "add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% else %}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_EOS_AT_THE_END = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    + _WORDS
    + _CALLS
    + "<|end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
_ALWAYS_ASKS = (
    "{% for m in messages %}<|SOT|>{% if m.role == 'assistant' %}<|CHATBOT|>{% if m.tool_calls %}<|START_ACTION|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ m.tool_calls[0].function.name }}<|END_ACTION|>{% else %}"
    "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}{% else %}<|USER|>{{ m.content }}{% endif %}<|EOT|>"
    "{% endfor %}<|SOT|><|CHATBOT|>"
)
_ALWAYS_ASKS_TO_THINK = _ALWAYS_ASKS + "<|START_THINKING|>"
_EMPTY_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>{% else %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n" + _WORDS + "{% for c in m.tool_calls or [] %}<|tool_call>"
    "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}:{{ v }}{% endfor %}<tool_call|>"
    "{% endfor %}<turn|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
_CLOSED_THOUGHT = _by_role(
    user="<|User|>" + _WORDS,
    assistant="<|Assistant|>" + _WORDS + _CALLS + "<|eos|>",
    tool="<|tool|>" + _WORDS,
    prompt="<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}",
    start="<|bos|>",
)
_KEPT_THOUGHT = _CLOSED_THOUGHT.replace("<|Assistant|>{{", "<|Assistant|></think>{{")
_PARTS = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for line in m.content %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_FIRST_PART = _by_role(
    user="[INST] {% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %} [/INST]",
    assistant=" {{ m.content[0]['text'] + '</s> ' }}",
    tool="{{ raise_exception('no tools') }}",
    prompt="",
)
_BRACKETS = _by_role(
    user="<s>[INST] {{ m.content | trim }} [/INST]",
    assistant=" {{ m.content | trim }}" + _CALLS + "</s>",
    tool="[RESULT]{{ m.content }}[/RESULT]",
    prompt="",
)
_TEXT_ARGUMENTS = _CLOSED_THOUGHT.replace("c.function.arguments | tojson", "'' + c.function.arguments")
_THINKS_LATE = _LAST_USER + _by_role(
    user="<|im_start|>{{ m.role }}\n" + _WORDS + "<|im_end|>\n",
    assistant="<|im_start|>assistant\n" + _LATE_THOUGHT + "{% endif %}" + _WORDS + _CALLS + "<|im_end|>\n",
    tool="<|im_start|>tool\n" + _WORDS + "<|im_end|>\n",
    prompt="<|im_start|>assistant\n",
)
_OPENS_THOUGHT = _by_role(
    user="<|im_start|>{{ m.role }}\n" + _WORDS + "<|im_end|>\n",
    assistant="<|im_start|>assistant\n<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n" + _WORDS + _CALLS
    + "<|im_end|>\n",
    tool="<|im_start|>tool\n" + _WORDS + "<|im_end|>\n",
    prompt="<|im_start|>assistant\n<think>\n",
)  # fmt: skip
_CHATML = _plain("<|im_start|>{}\n", "<|im_end|>\n")

FAMILIES: dict[str, Family] = {
    "next header (GLM-4.5 to 5.2)": Family(
        template=_NEXT_HEADER,
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        adds={"user": "<|user|>", "tool": "<|observation|>"},
    ),
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
    "last turn ends otherwise (gpt-oss)": Family(
        template=_LAST_MARK, stops=("<|return|>", "<|call|>"), ends=("<|end|>",)
    ),
    "EOS at the end (Phi-3.5)": Family(template=_EOS_AT_THE_END, stops=("<|end|>", "<|endoftext|>")),
    "always a prompt (Command R7B)": Family(template=_ALWAYS_ASKS, stops=("<|EOT|>",)),
    "always a prompt that thinks (Command A)": Family(template=_ALWAYS_ASKS_TO_THINK, stops=("<|EOT|>",)),
    "empty thought in the prompt (Gemma 4)": Family(template=_EMPTY_THOUGHT, stops=("<turn|>",)),
    "closed thought in the prompt (DeepSeek V3.2)": Family(template=_CLOSED_THOUGHT, stops=("<|eos|>",)),
    "closed thought in prompt and turns (DeepSeek V3.1)": Family(template=_KEPT_THOUGHT, stops=("<|eos|>",)),
    "arguments are text (DeepSeek V3)": Family(template=_TEXT_ARGUMENTS, stops=("<|eos|>",)),
    "parts (SmolVLM, Idefics 3)": Family(template=_PARTS, stops=("<end_of_utterance>",)),
    "first part (LLaVA-NeXT)": Family(template=_FIRST_PART, stops=("</s>",), header=""),
    "brackets (Llama 2)": Family(template=_BRACKETS, stops=("</s>",), header=""),
    "late thoughts (Qwen3)": Family(template=_THINKS_LATE, stops=("<|im_end|>",)),
    "opened thoughts (Qwen3 Thinking)": Family(template=_OPENS_THOUGHT, stops=("<|im_end|>",)),
    "ChatML": Family(template=_CHATML, stops=("<|im_end|>",)),
    "ChatML behind BOS (Falcon-H1)": Family(template="<|begin|>" + _CHATML, stops=("<|im_end|>",)),
    "ChatML, EOS at the end (OLMo 3)": Family(
        template=_plain(
            "<|im_start|>{}\n", "<|im_end|>\n", answer_end="{{ eos_token if loop.last else '<|im_end|>\\n' }}"
        ),
        stops=("<|endoftext|>", "<|im_end|>"),
        variables={"eos_token": "<|endoftext|>"},
    ),
    "ChatML with a separator (Phi-4)": Family(
        template=_plain("<|im_start|>{}<|im_sep|>", "<|im_end|>"), stops=("<|im_end|>",)
    ),
    "ChatML with a middle (Kimi K2)": Family(
        template=_plain("<|im_{}|>{}<|im_middle|>", "<|im_end|>"), stops=("<|im_end|>",)
    ),
    "headers (Llama 3)": Family(
        template=_plain("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", start="<|begin_of_text|>"),
        stops=("<|eot_id|>", "<|eom_id|>"),
    ),
    "headers (Llama 4)": Family(
        template=_plain("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"), stops=("<|eot|>", "<|eom|>")
    ),
    "start and end of role (Granite)": Family(
        template=_plain("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"), stops=("<|end_of_text|>",)
    ),
    "square marks (EXAONE)": Family(template=_plain("[|{}|]", "[|endofturn|]\n"), stops=("[|endofturn|]",)),
    "turns of a model (Gemma)": Family(
        template=_plain("<start_of_turn>{}\n", "<end_of_turn>\n", name="model"), stops=("<end_of_turn>", "<eos>")
    ),
    "messages (Jamba)": Family(template=_plain("<|bom|><|{}|> ", "<|eom|>"), stops=("<|eom|>",)),
    "roles behind (GigaChat)": Family(
        template=_plain("{}<|role_sep|>\n", "<|message_sep|>\n\n"), stops=("<|message_sep|>",)
    ),
    "marks with colons (Seed-OSS)": Family(template=_plain("<seed:bos>{}\n", "<seed:eos>"), stops=("<seed:eos>",)),
    "odd brackets (MiniMax M2)": Family(template=_plain("]~b]{}\n", "[e~[\n", name="ai"), stops=("[e~[",)),
    "words (Vicuna)": Family(
        template=_by_role(
            user="USER: " + _WORDS + " ", assistant="ASSISTANT: " + _WORDS + _CALLS + "</s>",
            tool="TOOL: " + _WORDS + " ", prompt="ASSISTANT: ",
        ),
        stops=("</s>",),
    ),
    "words (ERNIE 4.5)": Family(
        template=_by_role(
            user="User: " + _WORDS + "\n", assistant="Assistant: " + _WORDS + _CALLS + "<|end_of_sentence|>",
            tool="Tool: " + _WORDS + "\n", prompt="Assistant: ", start="<|begin_of_sentence|>",
        ),
        stops=("<|end_of_sentence|>",),
    ),
    "EOS behind a line (Zephyr)": Family(template=_plain("<|{}|>\n", "</s>\n"), stops=("</s>",)),
    "EOS of the assistant alone (OLMo 2)": Family(
        template=_plain("<|{}|>\n", "\n", answer_end="<|endoftext|>\n"), stops=("<|endoftext|>",)
    ),
    "roles in words (OpenChat)": Family(
        template=_plain("GPT4 Correct {}: ", "<|end_of_turn|>"), stops=("<|end_of_turn|>",)
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
