"""Tries every causal language model family of the installed transformers against plain PyTorch.

    python -m scripts.families                 all families that RESULTS does not have yet; then the table
    python -m scripts.families llama mixtral   these, again
    python -m scripts.families --table         only write docs/families.md from RESULTS

For each family it builds a tiny random model, and in a process of its own

1. trains three steps of three micro-batches in plain PyTorch (`tests/reference.py`, which shares no code with Ratel)
   and with `ratel finetune`, in fp32 and in bf16, and compares losses and all weights, bit for bit;
2. trains a step on packed samples, and compares its loss with that of each sample alone;
3. loads the export with the class that config.json names: no tensor may be missing or unexpected.

A family is `equal`; or `refused` with exit code 2 before anything is written, with the reason that Ratel gives; or a
`fault`; or `not trainable` where plain PyTorch itself fails. Exit code 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from scripts.family_configs import FAMILIES, VOCAB_SIZE, tiny_config
from tests.e2e.runs import ratel
from tests.reference import Recipe, Trained, train_in_memory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "families.jsonl"
TABLE = ROOT / "docs" / "families.md"
_SECONDS = 300
"""A family that takes longer is a fault."""
_TOKENS, _STEPS, _MICRO_BATCHES, _ROWS = 48, 3, 3, 2
_RAGGED = (8, 40, 17, 33, 25, 11, 39, 26, 24)
"""Tokens of the samples that are packed: some pairs fill a sequence, some leave a rest."""
_PACKED_TOLERANCE = 1e-6
"""Of a loss. Packed samples are summed in another order; a leak of one sample into another is seen at 4e-6."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_HEAD = """# Model families

Every causal language model family that transformers has, against plain PyTorch: written by `python -m scripts.families`
with {versions}. {counts}.

*Equal*: three steps give the bits of plain PyTorch, losses and all weights, and the export loads with nothing missing.
*Refused*: with this message, before anything is written. *Not trainable*: plain PyTorch cannot train it. *Packed*:
several samples share a sequence, and each has the loss that it has alone; otherwise each sample gets a sequence of its
own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found of one family."""

    family: str
    architecture: str = ""
    verdict: str = "equal"
    reason: str = ""
    """Why it was refused, what plain PyTorch says, or what the fault is."""
    bfloat16: str = ""
    """Whether bf16 is equal too, or why Ratel refuses it."""
    packing: str = ""
    """`packed`, or `alone` where each sample gets a sequence of its own."""
    seconds: float = 0.0
    versions: str = ""


class Fault(Exception):
    """Ratel does something else than plain PyTorch, or ends with neither a result nor a refusal."""


class Refused(Exception):
    """Ratel refuses the model, before it has written anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    num_targets: int


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args(arguments)
    known = {result.family: result for result in _read_results()}
    if not options.table:
        for family in options.families or [name for name in FAMILIES if name not in known]:
            known[family] = result = try_family(family)
            print(f"{result.seconds:5.1f} s  {family}: {result.verdict}  {result.reason}", flush=True)
            _write_results(known)
    results = [known[family] for family in FAMILIES if family in known]
    if len(results) == len(FAMILIES):
        TABLE.write_text(table(results), encoding="utf-8")
    print(_counts(results))
    return 1 if any(result.verdict == "fault" for result in results) else 0


def try_family(family: str) -> Result:
    """Try one family in a process of its own, which the result outlives."""
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, theirs))
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(_SECONDS) else None
    except EOFError:
        result = None
    if result is None:
        process.kill()
        result = Result(family=family, verdict="fault", reason="the process ended, or took too long")
    process.join()
    return replace(result, seconds=round(time.monotonic() - began, 1), versions=_versions())


def try_here(family: str, directory: Path) -> Result:
    """Try one family in this process, with files in `directory`."""
    torch.set_num_threads(1)
    result = Result(family=family)
    try:
        base = save_base(family, directory / "base")
        architecture = json.loads((base / "config.json").read_text())["architectures"][0]
        result = replace(result, architecture=architecture)
        trained = train_plain(base, recipe_of(base, "float32"))
    except Exception as error:  # noqa: BLE001  whatever it is, plain PyTorch cannot train this family
        return replace(result, verdict="not trainable", reason=_first_line(error))
    try:
        _compare(base, directory / "fp32", "float32", trained)
        packing = _compare_packed(_without_draws(base, directory / "still"), directory / "packed")
        result = replace(result, packing=packing, bfloat16=_try_bfloat16(base, directory / "bf16"))
    except Refused as refusal:
        return replace(result, verdict="refused", reason=str(refusal))
    except Fault as fault:
        return replace(result, verdict="fault", reason=str(fault))
    return result


def _child(family: str, connection: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="ratel-families-") as name:
        directory = Path(name)
        stderr = directory / "stderr.txt"
        # What a library prints itself goes to the terminal of a person who uses Ratel.
        with stderr.open("w") as file:
            os.dup2(file.fileno(), 2)
        with _quiet():
            result = try_here(family, directory)
        if result.verdict == "equal" and "Traceback" in stderr.read_text():
            result = replace(result, verdict="fault", reason="prints a traceback")
        connection.send(result)


def save_base(family: str, directory: Path) -> Path:
    """Save a tiny model of the family whose parameters, and buffers that a checkpoint has, are all random, and large
    enough to matter."""
    config = tiny_config(family)
    torch.manual_seed(zlib.crc32(family.encode()))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        known = {id(parameter) for parameter in model.parameters()}
        for buffer in model.state_dict(keep_vars=True).values():  # those that a checkpoint has; matrices are constants
            if id(buffer) not in known and buffer.is_floating_point() and buffer.ndim <= 1:
                buffer.add_(torch.randn_like(buffer) * 0.02)
    model.save_pretrained(directory)
    return directory


def recipe_of(base: Path, dtype: str) -> Recipe:
    config = AutoConfig.from_pretrained(base)
    is_clipped = zlib.crc32(f"{config.model_type} {dtype}".encode()) % 2
    return Recipe(
        dtype=_DTYPES[dtype],
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.05 if is_clipped else None,
        attn_implementation=_attention(config),
    )


def _attention(config: PretrainedConfig) -> str:
    """The implementation that transformers chooses by itself."""
    with torch.device("meta"):
        chosen = AutoModelForCausalLM.from_config(config).config._attn_implementation
    return chosen or "eager"


def _without_draws(base: Path, directory: Path) -> Path:
    """The same model without dropout and jitter, whose draws depend on how samples are packed."""
    shutil.copytree(base, directory)
    file = directory / "config.json"
    file.write_text(json.dumps(_zero_draws(json.loads(file.read_text()))))
    return directory


def _zero_draws(values: dict[str, object]) -> dict[str, object]:
    return {
        key: _zero_draws(value)
        if isinstance(value, dict)
        else 0.0
        if isinstance(value, float) and re.search(r"drop|jitter", key)
        else value
        for key, value in values.items()
    }


def _rows(lengths: Iterable[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB_SIZE - 1, (length,), generator=draw).tolist() for length in lengths]


def batch_of(rows: Sequence[Sequence[int]]) -> _Batch:
    """Rows of one length as a micro-batch: the target of a token is the next one, the last one's is ignored."""
    ids = torch.tensor(rows)
    targets = torch.cat([ids[:, 1:], torch.full((len(rows), 1), -100)], dim=1)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return _Batch(input_ids=ids, targets=targets, position_ids=positions, num_targets=int((targets >= 0).sum()))


def training_rows() -> list[list[int]]:
    """The tokens that a tiny model is trained on: a row for each sequence of each step."""
    return _rows([_TOKENS] * (_STEPS * _MICRO_BATCHES * _ROWS))


def _loaded(base: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def train_plain(
    base: Path,
    recipe: Recipe,
    *,
    num_micro_batches: int = _MICRO_BATCHES,
    rows: Sequence[Sequence[int]] | None = None,
) -> Trained:
    """What plain PyTorch makes of a saved model. `rows`: other tokens than `training_rows`, as many."""
    rows = rows or training_rows()
    batches = [batch_of(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
    starts = range(0, _STEPS * num_micro_batches, num_micro_batches)
    steps = [batches[start : start + num_micro_batches] for start in starts]
    model = _loaded(base)
    # Copies: a mapped file gives tensors at addresses at which some kernels round otherwise.
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loaded = _loaded(base, recipe.dtype)
    state = loaded.state_dict()
    buffers = {name: state[name] for name, _ in loaded.named_buffers() if name in state}
    kept = frozenset(name for name, each in state.items() if each.dtype == torch.float32 != recipe.dtype)
    return train_in_memory(model.config, weights, steps, replace(recipe, kept=kept), buffers)


def finetune(base: Path, directory: Path, recipe: Recipe, rows: Sequence[Sequence[int]], **changes: object) -> str:
    """Run `ratel finetune`; what it wrote to stderr. Raises Refused, Fault."""
    directory.mkdir()
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    settings = {
        "base_model": str(base),
        "datasets": [{"path": str(data), "type": "tokens"}],
        "output_dir": str(directory / "out"),
        "shuffle": False,
        "sample_packing": False,
        "sequence_len": _TOKENS,
        "micro_batch_size": _ROWS,
        "gradient_accumulation_steps": _MICRO_BATCHES,
        "max_steps": _STEPS,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.max_grad_norm,
        "dtype": next(name for name, dtype in _DTYPES.items() if dtype == recipe.dtype),
        "device": "cpu",
        "storage": {"engine": "threads"},
        "limits": {"host_memory": "20GiB"},
        **changes,
    }
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    ended = ratel("finetune", config)
    if "Traceback" in ended.stderr or ended.code not in (0, 2):
        raise Fault(f"exit {ended.code}: {_last_line(ended.stderr)}")
    if ended.code == 2:
        if ratel("check", config).code != 2:
            raise Fault(f"check does not refuse what finetune does: {_last_line(ended.stderr)}")
        left = sorted(path.name for path in directory.iterdir() if path not in (config, data))
        if left:
            raise Fault(f"refused after it had written {', '.join(left)}")
        raise Refused(ended.errors[0].removeprefix("error: ").replace(str(base), base.name))
    return ended.stderr


def _compare(base: Path, directory: Path, dtype: str, trained: Trained) -> None:
    """Train with Ratel and compare. Raises Refused, Fault."""
    finetune(base, directory, recipe_of(base, dtype), training_rows())
    out = directory / "out"
    losses = [json.loads(line)["loss"] for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    loaded = _reload(out, _DTYPES[dtype])
    wanted = {name: weight.to(loaded[name].dtype) for name, weight in trained.weights.items()}
    num_other = sum(int((loaded[name] != weight).sum()) for name, weight in wanted.items())
    num_all = sum(weight.numel() for weight in wanted.values())
    if num_other:
        raise Fault(f"{dtype}: {num_other / num_all:.2g} of the weights have other bits")
    if losses != list(trained.losses):
        raise Fault(f"{dtype}: losses {losses} instead of {list(trained.losses)}")


def _reload(out: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The export's parameters by the names of AutoModelForCausalLM. Raises Fault if any tensor has no place."""
    architecture = json.loads((out / "config.json").read_text())["architectures"][0]
    _, found = getattr(transformers, architecture).from_pretrained(out, dtype=dtype, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[problem]:
            raise Fault(f"{architecture} finds {problem.replace('_', ' ')}: {min(found[problem])}")
    return dict(_loaded(out, dtype).named_parameters())


def _compare_packed(base: Path, directory: Path) -> str:
    """The loss of one step on packed samples against each sample alone. Raises Refused, Fault."""
    rows = _rows(_RAGGED)
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.1)
    # One micro-batch of all sequences, packed or not.
    printed = finetune(
        base, directory, recipe, rows, sample_packing=True, sequence_len=50, micro_batch_size=len(rows),
        gradient_accumulation_steps=1, max_steps=1,
    )  # fmt: skip
    line = json.loads((directory / "out" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    model, total, num_targets = _loaded(base).train(), 0.0, 0
    for row in rows:
        batch = batch_of([row])
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
        targets = batch.targets.reshape(-1)
        total += float(nn.functional.cross_entropy(logits[0], targets, ignore_index=-100, reduction="sum").detach())
        num_targets += batch.num_targets
    alone = total / num_targets
    if abs(line["loss"] - alone) > _PACKED_TOLERANCE * alone:
        raise Fault(f"packed samples leak: loss {line['loss']:.7f}, each alone {alone:.7f}")
    return "alone" if "separat" in printed else "packed"


def _try_bfloat16(base: Path, directory: Path) -> str:
    try:
        trained = train_plain(base, recipe_of(base, "bfloat16"))
    except Exception as error:  # noqa: BLE001  whatever it is, plain PyTorch cannot train it so
        return f"not trainable: {_first_line(error)}"
    try:
        _compare(base, directory, "bfloat16", trained)
    except Refused as refusal:
        return f"refused: {refusal}"
    return "equal"


def table(results: Sequence[Result]) -> str:
    """docs/families.md."""
    lines = [
        _HEAD.format(versions=results[0].versions, counts=_counts(results)),
        "| family | class | result | bf16 | samples | remark |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        bfloat16 = each.bfloat16.partition(":")[0]
        remark = each.reason or each.bfloat16.partition(": ")[2]
        cells = (each.family, each.architecture, each.verdict, bfloat16, each.packing, remark.replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _counts(results: Sequence[Result]) -> str:
    verdicts = [result.verdict for result in results]
    kinds = ("equal", "refused", "fault", "not trainable")
    return f"{len(results)} families: " + ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)


def _versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"


def _read_results() -> list[Result]:
    """Results of the installed versions; others are tried again."""
    if not RESULTS.exists():
        return []
    results = [Result(**json.loads(line)) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return [result for result in results if result.versions == _versions()]


def _write_results(known: dict[str, Result]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    unfinished = RESULTS.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(asdict(result)) + "\n" for result in known.values()), encoding="utf-8")
    unfinished.replace(RESULTS)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(("error:", "hint:"))] or text.splitlines() or [""]
    return lines[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of tiny models."""
    transformers.logging.set_verbosity_error()
    output = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main())
