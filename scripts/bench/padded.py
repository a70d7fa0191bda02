"""Is the time of a run known whose rows are not packed? Six kinds of them, predicted from the lengths of their data.

Regime: models of about 20M parameters with random weights, fp32, 8 micro-batches of 4 rows of at most 512 tokens, whose
lengths are drawn (most have a tenth of that). Each run is `ratel finetune` in a process of its own with an empty cache.
The ceiling is the mean step without the first two and the last. The promise: what is said before step 1 is within 20 %.

    python -m scripts.bench.padded [--kinds text pairs ...] [--steps 9] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    T5Config,
)

from ratel_cli.hardware.load import LoadMeter
from scripts.bench.contestants import print_promise

_AT_MOST = 0.20
_WORDS, _LENGTH, _ROWS, _MICRO_BATCHES = 2000, 512, 4, 8
_SHAPE: dict[str, Any] = {
    "vocab_size": _WORDS + 3,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
_IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}

Row = dict[str, object]


def _llama() -> PretrainedConfig:
    return LlamaConfig(**_SHAPE, **_IDS)


def _t5() -> PretrainedConfig:
    width, ff, layers, heads = (_SHAPE[key] for key in list(_SHAPE)[1:])
    values: dict[str, Any] = {"d_model": width, "d_ff": ff, "d_kv": 64, "num_layers": layers // 2, "num_heads": heads}
    special: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5Config(**values, **special, vocab_size=_SHAPE["vocab_size"], dropout_rate=0.0)


_KINDS: dict[str, tuple[Callable[[], PretrainedConfig], dict[str, object], dict[str, object]]] = {
    "text": (_llama, {"sample_packing": False}, {"type": "completion"}),
    "pairs": (_llama, {"rl": "dpo"}, {}),
    "verdicts": (_llama, {"rl": "kto"}, {}),
    "classes": (
        lambda: BertConfig(**_SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0),
        {},
        {"type": "classification", "labels": ["no", "yes"]},
    ),
    "seq2seq": (_t5, {}, {"type": "seq2seq"}),
    "sinks": (
        lambda: GptOssConfig(**_SHAPE, **_IDS, head_dim=64, num_key_value_heads=8, num_local_experts=2,
                             num_experts_per_tok=1),
        {},
        {"type": "completion"},
    ),
    "chunks": (
        lambda: Qwen3NextConfig(**_SHAPE, **_IDS, head_dim=64, num_key_value_heads=8, num_experts=0,
                                linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64,
                                linear_value_head_dim=64),
        {},
        {"type": "completion"},
    ),
}  # fmt: skip
"""By kind: the model, keys of the run, keys of the rows."""


def main() -> None:
    """Run each kind, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=list(_KINDS), choices=list(_KINDS))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="directory for the stores")
    arguments = parser.parse_args()
    print(
        f"{'kind':<10}{'predicted s':>12}{'step s':>9}{'error':>8}{'others':>8}{'tokens':>8}{'plan tokens/s':>15}",
        flush=True,
    )
    found = {}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="ratel-padded-") as directory:
            found[kind] = _run(kind, Path(directory), arguments.steps)
    print_promise("before step 1, the largest error", max(map(abs, found.values())), at_most=_AT_MOST)
    print(json.dumps({"benchmark": "padded", "arguments": vars(arguments), "errors": found}))


def _run(kind: str, directory: Path, steps: int) -> float:
    """The error of what was predicted before step 1, as a share of the mean step."""
    make, keys, of_rows = _KINDS[kind]
    make().save_pretrained(directory / "model")
    _tokenizer().save_pretrained(directory / "model")
    draw = random.Random(0)
    rows = [_row(kind, draw) for _ in range(_ROWS * _MICRO_BATCHES * steps)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {
        "base_model": str(directory / "model"),
        "random_init": True,
        "datasets": [{"path": str(directory / "rows.jsonl"), **of_rows}],
        "sequence_len": _LENGTH,
        "micro_batch_size": _ROWS,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "max_steps": steps,
        "dtype": "float32",
        "output_dir": str(directory / "out"),
        "storage": {"paths": [str(directory / "store")]},
        **keys,
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    meter = LoadMeter()
    ended = subprocess.run(
        [sys.executable, "-m", "ratel_cli", "finetune", str(directory / "run.yaml")],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(directory / "cache")},
    )
    if ended.returncode:
        sys.exit(f"{kind} failed with exit code {ended.returncode}: {ended.stderr}")
    load = meter.other_load()
    lines = [json.loads(line) for line in (directory / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    predicted, seconds = lines[0]["predicted_seconds"], mean(line["step_seconds"] for line in lines[2:-1])
    tokens = mean(line["tokens"] for line in lines)
    plan = json.loads((directory / "out" / "run" / "plan.json").read_bytes())
    error: float = predicted / seconds - 1
    print(
        f"{kind:<10}{predicted:>12.2f}{seconds:>9.2f}{error:>+8.1%}{load.cores if load else 0.0:>8.1f}{tokens:>8.0f}"
        f"{plan['throughput']['tokens_per_second']:>15.0f}",
        flush=True,
    )
    return error


def _row(kind: str, draw: random.Random) -> Row:
    def text() -> str:
        length = min(_LENGTH // 2 - 8, 8 + int(draw.expovariate(1 / 48)))
        return " ".join(f"w{draw.randrange(_WORDS)}" for _ in range(length))

    match kind:
        case "pairs":
            return {"prompt": text(), "chosen": text(), "rejected": text()}
        case "verdicts":
            return {"prompt": text(), "completion": text(), "label": draw.random() < 0.5}
        case "classes":
            return {"text": text(), "label": draw.choice(["no", "yes"])}
        case "seq2seq":
            return {"prompt": text(), "completion": text()}
        case _:
            return {"text": text()}


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{each}" for each in range(_WORDS))])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="</s>"
    )


if __name__ == "__main__":
    main()
