"""Ten configs that each of axolotl, LLaMA-Factory, TRL and torchtune ships, on rows of the kind that each asks for,
with a tiny model of its family: the tokens with loss are those of the tool, adapters have the modules that it adapts,
and three steps run.

TRL and PEFT are asked themselves. What axolotl, LLaMA-Factory and torchtune make of a row is written here from their
sources, which are named. `TOLD` has the configs whose rows become other tokens here; there `ratel import` says so.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    Lfm2Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import dump, load_config
from ratel_cli.config.yaml.yaml_marks import Plain
from ratel_cli.engine.replay.loss import MeanLoss
from tests.e2e.ported_configs import PORTED
from tests.e2e.runs import Config, save_base
from tests.e2e.test_shipped_rates import CONFIGS, TEN
from tests.engine.architectures import tiny_config
from tests.tiers import sample

LENGTH = 1024
ADAPTED = [name for name, config in PORTED.items() if {config.get("adapter"), config.get("finetuning_type")} & {"lora"}]
NAMES = list(dict.fromkeys([*TEN, *ADAPTED]))
OF_TRL = Path(trl.__file__).with_name("chat_templates")
"""The families' own chat templates, as TRL keeps them."""
_OTHERS: dict[str, Callable[[int], PretrainedConfig]] = {
    "lfm2": lambda size: Lfm2Config(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=LENGTH,
        block_multiple_of=8,
    ),
    "glm4_moe": lambda size: Glm4MoeConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, max_position_embeddings=LENGTH,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model's architecture, and what its tokenizer writes."""

    architecture: str
    eos: str
    bos: str | None = None
    template: str | None = None
    """The name of its chat template in TRL; None: it has none."""


_QWEN = {"eos": "<|im_end|>"}
FAMILIES: Mapping[str, Family] = {
    "A22B-Instruct-2507": Family(architecture="qwen3_moe", template="qwen3_instruct_2507", **_QWEN),
    "Instruct-2507": Family(architecture="qwen3", template="qwen3_instruct_2507", **_QWEN),
    "Qwen3-": Family(architecture="qwen3", template="qwen3", **_QWEN),
    "qwen3": Family(architecture="qwen3", template="qwen3", **_QWEN),
    "Qwen2": Family(architecture="qwen2", template="qwen2_5", **_QWEN),
    "qwen2": Family(architecture="qwen2", template="qwen2_5", **_QWEN),
    "Nanbeige": Family(architecture="llama", template="qwen3_instruct_2507", **_QWEN),
    "Llama-3-8B-Instruct": Family(
        architecture="llama", eos="<|eot_id|>", bos="<|begin_of_text|>", template="llama3"
    ),
    "Llama-3": Family(architecture="llama", eos="<|end_of_text|>", bos="<|begin_of_text|>"),
    "llama3": Family(architecture="llama", eos="<|end_of_text|>", bos="<|begin_of_text|>"),
    "Llama-2": Family(architecture="llama", eos="</s>", bos="<s>"),
    "llama2": Family(architecture="llama", eos="</s>", bos="<s>"),
    "TinyLlama": Family(architecture="llama", eos="</s>", bos="<s>"),
    "SmolLM": Family(architecture="llama", eos="<|endoftext|>"),
    "mpt": Family(architecture="mpt", eos="<|endoftext|>"),
    "LFM2": Family(architecture="lfm2", eos="<|im_end|>", bos="<|startoftext|>", template="lfm2"),
    "GLM-4.5": Family(architecture="glm4_moe", eos="<|endoftext|>", template="glm4moe"),
    "phi3": Family(architecture="phi3", eos="<|endoftext|>", bos="<s>"),
    "Phi-3": Family(architecture="phi3", eos="<|endoftext|>", bos="<s>"),
    "Mistral": Family(architecture="mistral", eos="</s>", bos="<s>"),
    "mistral": Family(architecture="mistral", eos="</s>", bos="<s>"),
    "starcoder2": Family(architecture="starcoder2", eos="<|endoftext|>"),
    "gpt2": Family(architecture="gpt2", eos="<|endoftext|>"),
    "gemma2": Family(architecture="gemma2", eos="<eos>", bos="<bos>"),
}  # fmt: skip
"""By a part of a model's name; the first that fits."""
SPECIAL = [
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|finetune_right_pad_id|>", "<|im_start|>", "<|im_end|>",
    "<|startoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>",
]  # fmt: skip
SAID = [("Which number is even?", "Two is."), ("And odd?", "Three is odd indeed.")]
CHATS = [SAID[:1], SAID, [("Is it 7?", "No.")]]
Row = dict[str, object]


def _chats(key: str, role: str, content: str, user: str = "user", assistant: str = "assistant") -> list[Row]:
    names = (user, assistant)
    return [
        {key: [{role: name, content: said} for pair in chat for name, said in zip(names, pair, strict=True)]}
        for chat in CHATS
    ]


ALPACA: list[Row] = [
    {"instruction": "Add one.", "input": "41", "output": "42"},
    {"instruction": "Name a number.", "input": "", "output": "Seven, for example."},
    {"instruction": "Which number is even?", "input": "3 or 4", "output": "4"},
]
TEXTS: list[Row] = [{"text": "one two three four", "chapter": "five six"}, {"text": "seven", "chapter": "8 and 9"}]
MESSAGES, SHAREGPT = _chats("messages", "role", "content"), _chats("conversations", "from", "value", "human", "gpt")
THOUGHTS = _chats("conversations", "from", "value")
ROWS: Mapping[str, list[Row]] = {
    "alpaca": ALPACA, "GPT4-LLM": ALPACA, "c4": TEXTS, "Long-Data": TEXTS, "TextbookChapters": TEXTS, "imdb": TEXTS,
    "identity": ALPACA, "FineTome": SHAREGPT, "traces": SHAREGPT, "OpenThoughts": THOUGHTS, "": MESSAGES,
}  # fmt: skip
"""By a part of a set's name, its kind of rows; the first that fits."""
INFO = {
    **{name: {"file_name": "alpaca.jsonl"} for name in ("identity", "alpaca_en_demo", "alpaca_en")},
    "tbench_traces_sharegptv1": {"file_name": "traces.jsonl", "formatting": "sharegpt"},
}
"""LLaMA-Factory's description of its sets."""

MARKED = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""A template that marks what the assistant writes, as TRL wants it for `assistant_only_loss`."""
Labels = list[int]
Encoded = tuple[list[int], Labels]


def _masked(ids: Sequence[int]) -> Labels:
    return [-100] * len(ids)


def _ids(tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _alpaca_prompt(row: Row) -> str:
    """Of axolotl's `prompters.py` (AlpacaPrompter) and torchtune's `data/_messages.py` (AlpacaToMessages)."""
    task = "Below is an instruction that describes a task"
    more = ", paired with an input that provides further context" if row["input"] else ""
    given = f"### Input:\n{row['input']}\n\n" if row["input"] else ""
    return (
        f"{task}{more}. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"
    )


def _turns(row: Row) -> list[dict[str, str]]:
    """The messages of a row, by the names that templates have; LLaMA-Factory's `data/converter.py` makes two of the
    columns of Alpaca."""
    roles = {"human": "user", "gpt": "assistant"}
    if "instruction" in row:
        asked = "\n".join(str(row[key]) for key in ("instruction", "input") if row[key])
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": str(row["output"])}]
    messages = row.get("messages") or row["conversations"]
    assert isinstance(messages, list)
    pairs = [(each.get("role") or each["from"], each.get("content") or each["value"]) for each in messages]
    return [{"role": roles.get(role, role), "content": content} for role, content in pairs]


def of_axolotl(row: Row, source: Mapping[str, object], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """`prompt_tokenizers.py` (InstructionPromptTokenizingStrategy, `_tokenize`), `prompt_strategies/completion.py`,
    `prompt_strategies/pretrain.py`, and `prompt_strategies/chat_template.py` (`_tokenize_single_prompt`: the words of a
    turn, and an EOS token or one of `eot_tokens` at most three tokens behind them)."""
    eos = tokenizer.eos_token_id
    if source.get("type") == "alpaca":
        prompt, answer = _ids(tokenizer, _alpaca_prompt(row), special=True), [*_ids(tokenizer, str(row["output"])), eos]
        return prompt + answer, _masked(prompt) + answer
    if source.get("type") != "chat_template":
        ids = [*_ids(tokenizer, str(row[str(source.get("field", "text"))]), special=True), eos]
        return ids, ids
    text = tokenizer.apply_chat_template(_turns(row), tokenize=False)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels, at = found["input_ids"], _masked(found["input_ids"]), 0
    for turn in _turns(row):
        start = text.index(turn["content"], at)
        at = start + len(turn["content"])
        if turn["role"] == "assistant":
            inside = [place for place, (first, _) in enumerate(found["offset_mapping"]) if start <= first < at]
            behind = range(inside[-1] + 1, min(inside[-1] + 5, len(ids)))
            inside += [place for place in behind if ids[place] == eos][:1]
            for place in inside:
                labels[place] = ids[place]
    return ids, labels


def of_llama_factory(row: Row, template: str, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """`data/template.py` (`llama3`, `qwen`, `qwen3_nothink` and `qwen3`, of which the last is a ReasoningTemplate and
    writes an empty thought before an answer without one, with loss) and `data/processor/supervised.py`."""
    opened, closed, end = ("<|im_start|>", "\n", "<|im_end|>\n")
    if template == "llama3":
        opened, closed, end = "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant." if template == "qwen" else ""
    before = f"{opened}system{closed}{system}{end}" if system else ""
    ids = [tokenizer.bos_token_id] if template == "llama3" else []
    labels = _masked(ids)
    for turn in _turns(row):
        if turn["role"] == "user":
            asked = f"{before}{opened}user{closed}{turn['content']}{end}{opened}assistant{closed}"
            ids, labels, before = ids + _ids(tokenizer, asked), labels + _masked(_ids(tokenizer, asked)), ""
        else:
            thought = "<think>\n\n</think>\n\n" if template == "qwen3" else ""
            said = _ids(tokenizer, thought) + _ids(tokenizer, turn["content"] + end)
            ids, labels = ids + said, labels + said
    return ids, labels


def of_own_template(row: Row, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Turns of the assistant in the tokenizer's own template, of the shape of ChatML."""
    text = tokenizer.apply_chat_template(_turns(row), tokenize=False)
    ids: list[int] = []
    labels: Labels = []
    for place, part in enumerate(re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>\n)", text, flags=re.DOTALL)):
        part_ids = _ids(tokenizer, part)
        ids, labels = ids + part_ids, labels + (part_ids if place % 2 else _masked(part_ids))
    return ids, labels


def of_torchtune(row: Row, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """`modules/transforms/tokenizers/_utils.py` (`tokenize_messages_no_special_tokens`): BOS, the texts, EOS. Alpaca's
    prompts have loss (`datasets/_alpaca.py`)."""
    ids = [*_ids(tokenizer, _alpaca_prompt(row)), *_ids(tokenizer, str(row["output"]))]
    ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    return ids[tokenizer.bos_token_id is None :], ids[tokenizer.bos_token_id is None :]


def of_trl(rows: Sequence[Row], content: Mapping[str, object], tokenizer: PreTrainedTokenizerFast) -> list[Encoded]:
    """What `SFTTrainer` makes of the rows."""
    if content.get("eos_token"):
        tokenizer.eos_token = str(content["eos_token"])
    tokenizer.chat_template = content.get("chat_template", tokenizer.chat_template)
    only = bool(content.get("assistant_only_loss"))
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        options = SFTConfig(folder, max_length=LENGTH, bf16=False, use_cpu=True, assistant_only_loss=only)
        made = SFTTrainer._prepare_dataset(
            trainer, Dataset.from_list([dict(row) for row in rows]), tokenizer, options, False, None, "train"
        )
        return [(row["input_ids"], row["labels"]) for row in made]


def rows_of(name: str) -> list[Row]:
    """Rows as a set of this name has them."""
    return next(rows for part, rows in ROWS.items() if part in name)


def sources_of(content: Mapping[str, object]) -> list[Mapping[str, object]]:
    """axolotl's sets."""
    sets = content.get("datasets") or content["pretraining_dataset"]
    return [sets] if isinstance(sets, dict) else list(sets)  # type: ignore[call-overload]


def expected(name: str, content: Mapping[str, object], tokenizer: PreTrainedTokenizerFast) -> list[Encoded]:
    """The rows of a config as its tool encodes them, or where `TOLD` says so, as Ratel does."""
    if name.startswith("axolotl"):
        return [of_axolotl(row, each, tokenizer) for each in sources_of(content) for row in rows_of(str(each["path"]))]
    if name.startswith("torchtune"):
        return [of_torchtune(row, tokenizer) for row in ALPACA]
    if name.startswith("TRL"):
        mixture = content.get("dataset_mixture")
        number = len(mixture["datasets"]) if isinstance(mixture, dict) else 1
        given = content.get("dataset_name") or content.get("dataset_mixer")
        rows = TEXTS if isinstance(given, dict) else rows_of(str(given))
        return of_trl(rows * number, content, tokenizer)
    rows = [row for each in str(content["dataset"]).split(",") for row in (SHAREGPT if "traces" in each else ALPACA)]
    if name in TOLD and TOLD[name][0] == "template":
        return [of_own_template(row, tokenizer) for row in rows]
    return [of_llama_factory(row, str(content["template"]), tokenizer) for row in rows]


TOLD: Mapping[str, tuple[str, str]] = {
    name: ("tokenizer._component_", "writes the Alpaca prompt as a turn")
    for name in TEN
    if name.startswith("torchtune") and "gemma" not in name
} | {
    name: ("template", "the tokenizer's own chat template is used")
    for name in TEN
    if any(part in name for part in ("qwen3_full_sft", "qwen3moe", "nanbeige"))
}
"""By config: the key about which `ratel import` says that other tokens have loss here, and what it says.

torchtune's tokenizers, but Gemma's, write turns (`models/*/_tokenizer.py`, and for Llama 2 and Mistral the default of
`prompt_template` in `models/*/_model_builders.py`). LLaMA-Factory has templates of its own (`data/template.py`): `qwen`
leaves out the empty thought of Qwen3's own and has a system prompt, and `qwen3` writes a thought that the instruct
models' own has not.
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """A tiny model of each family, with its tokenizer; made once."""
    root = tmp_path_factory.mktemp("families")
    plain = save_base(root / "plain")
    made: dict[str, Path] = {}

    def base_of(family: Family) -> Path:
        key = repr(family)
        if key not in made:
            made[key] = root / str(len(made))
            tokenizer = AutoTokenizer.from_pretrained(plain)
            tokenizer.add_tokens(SPECIAL, special_tokens=True)
            tokenizer.eos_token = family.eos
            tokenizer.chat_template = None
            if family.template is not None:
                tokenizer.chat_template = (OF_TRL / f"{family.template}.jinja").read_text()
            if family.bos is not None:
                tokenizer.bos_token = family.bos
                begins = [(family.bos, tokenizer.bos_token_id)]
                tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                    single=f"{family.bos} $A", special_tokens=begins
                )
            tokenizer.save_pretrained(made[key])
            torch.manual_seed(1)
            make = _OTHERS.get(family.architecture)
            size = len(tokenizer)
            config = make(size) if make is not None else tiny_config(family.architecture, vocab_size=size)
            for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
                if hasattr(config, name):
                    setattr(config, name, LENGTH)
            for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
                setattr(config, name, 0.0)
            config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
            AutoModelForCausalLM.from_config(config).save_pretrained(made[key])
        return made[key]

    return base_of


def family_of(content: Mapping[str, object]) -> Family:
    model = content.get("base_model") or content.get("model_name_or_path") or content["model"]
    return next(family for part, family in FAMILIES.items() if part in str(model))


def written(content: Mapping[str, object], folder: Path) -> Path:
    """The tool's config as a file, and its sets beside it."""
    data = folder / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    for name, rows in (("alpaca", ALPACA), ("traces", SHAREGPT)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs: dict[str, Plain] = json.loads(json.dumps(content))
    if "dataset" in theirs and "stage" in theirs:
        theirs["dataset_dir"] = str(data)
    path = folder / "theirs.yaml"
    path.write_text(dump(theirs))
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A config of a tool and what it became here."""

    content: Mapping[str, object]
    base: Path
    config: Config
    told: dict[str, str]
    """By key: what the import says about it."""


def imported(name: str, bases: Callable[[Family], Path], folder: Path) -> Shipped:
    """Import it, with a tiny model and rows of its kind; each step has all rows."""
    content = dict(PORTED[name] if name in PORTED else CONFIGS[name])
    if content.get("assistant_only_loss"):
        content["chat_template"] = MARKED
    found = import_config(written(content, folder))
    run = folder / "imported.yaml"
    run.write_text(found.text)
    config = yaml.safe_load(found.text)
    num_rows = 0
    for number, each in enumerate(config["datasets"]):
        path = Path(each["path"])
        if not path.is_file():
            rows = rows_of(each["path"] if "mixer" not in str(content) or "mc4" not in each["path"] else "c4")
            path = folder / f"{number}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            each["path"] = str(path)
            each.pop("split", None)
            each.pop("name", None)
        num_rows += len(path.read_text().splitlines())
    is_packed = config.get("sample_packing") and family_of(content).architecture != "lfm2"  # rows do not share it
    size = 1 if is_packed else num_rows
    config |= {
        "base_model": str(bases(family_of(content))), "output_dir": "out", "device": "cpu", "dtype": "float32",
        "sequence_len": LENGTH, "micro_batch_size": size, "gradient_accumulation_steps": 1, "max_steps": 3,
        "report_to": "none", "storage": {"engine": "threads"}, "val_set_size": 0, "learning_rate": 1e-5,
    }  # fmt: skip
    for key in ("revision_of_model", "hub_model_id", "push_to_hub", "load_best_model_at_end", "save_total_limit"):
        config.pop(key, None)
    for key in [key for key in config if key.startswith(("eval", "save"))]:
        del config[key]
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    told = {row.written: row.reason for row in found.outcomes}
    return Shipped(content=content, base=Path(config["base_model"]), config=Config(folder / "run.yaml"), told=told)


def plain_loss(base: Path, rows: Sequence[Encoded]) -> float:
    """The mean over the tokens with loss, one row after another."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    total = torch.zeros(())
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            total += nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
    return float(total) / num_with_loss(rows)


def num_with_loss(rows: Sequence[Encoded]) -> int:
    """The first token of a row is not predicted."""
    return sum(label != -100 for _, labels in rows for label in labels[1:])


@pytest.mark.full
@pytest.mark.parametrize("name", sample(NAMES, every=5))
def test_its_tokens_and_three_steps(
    name: str, bases: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = imported(name, bases, tmp_path)
    with mock.patch("ratel_cli.engine.steps.state.MeanLoss", side_effect=MeanLoss) as means:
        ended = shipped.config.finetune()
    assert ended.code == 0, ended.stderr
    steps = shipped.config.metrics
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(math.isfinite(step["loss"]) for step in steps)
    content = shipped.content
    tokenizer = AutoTokenizer.from_pretrained(shipped.base)
    special = load_config(shipped.config).config
    if special.special_tokens:
        tokenizer.add_special_tokens(special.special_tokens)
    if content.get("chat_template") == "llama3":
        tokenizer.chat_template = (OF_TRL / "llama3.jinja").read_text()
    rows = expected(name, content, tokenizer)
    first_step = means.call_args_list[-len(steps)]  # before it, the trial of the layers has some of its own
    assert first_step.args[0] == num_with_loss(rows)
    if not content.get("reinit_weights"):
        assert steps[0]["loss"] == pytest.approx(plain_loss(shipped.base, rows), rel=1e-5)
    if name in TOLD:
        key, words = TOLD[name]
        assert words in shipped.told[key]
    if special.adapter is not None:
        with safe_open(shipped.config.output / "adapter_model.safetensors", "pt") as file:
            found = set(file.keys())
        names = adapted_names(content, shipped.base)
        if "moe" in family_of(content).architecture:
            assert names < found
            assert "routers and stacked experts no adapter" in shipped.told["finetuning_type"]
        else:
            assert names == found


def adapted_names(content: Mapping[str, object], base: Path) -> set[str]:
    """What PEFT saves of an adapter of the tool's modules: those it names, or all linear ones but the head, by the last
    parts of their names (axolotl: `loaders/adapter.py`, `find_all_linear_names`; LLaMA-Factory:
    `model/model_utils/misc.py`, `find_all_linear_modules`)."""
    model = AutoModelForCausalLM.from_pretrained(base)
    modules = content.get("lora_target_modules")
    if modules is None:
        classes = [(each, type(module).__name__) for each, module in model.named_modules()]
        linear = {each.rpartition(".")[2] for each, kind in classes if "Linear" in kind}
        modules = sorted(linear - {"lm_head"})
    rank = content.get("lora_r") or content.get("lora_rank") or 8
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=modules, task_type="CAUSAL_LM"))  # type: ignore[arg-type]
    return set(get_peft_model_state_dict(adapted))
