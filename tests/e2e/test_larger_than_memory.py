"""Models larger than `limits.host_memory`: peaks stay inside it, and the results are those of the model in memory.

The results are losses, tokens, and every logit that the commands compute on the way, bit for bit. Both compute with one
thread, so that their bits can be compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ratel_cli.units import GIB, MIB

pytestmark = pytest.mark.nightly

ROWS = [[1 + (number * 37 + place * 11) % 511 for place in range(40 + number)] for number in range(12)]
"""Without the token for padding, whose embedding is zero: its gradient overflows in a deep model."""
MORE_MIB = (16, 200)
"""Memory beyond just enough. The process itself takes up to 9 MiB more or less each time."""
MORE_FOR_TRAINING_MIB = (16, 400)
"""The second one is filled by weights, held gradients and activations."""
_CHILD = """
import sys
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_forward_hook
from ratel_cli.cli.app import main
from ratel_cli.hardware.host import peak_resident_bytes
found = []
def keep(module, arguments, output):
    logits = getattr(output, "logits", None)
    if logits is not None and logits.any():
        found.append(logits.clone())
register_module_forward_hook(keep)
code = main(sys.argv[2:])
save_file({str(number): each for number, each in enumerate(found)}, sys.argv[1])
print(f"peak {peak_resident_bytes()}", file=sys.stderr)
sys.exit(code)
"""
"""Runs a command, and keeps the logits of every pass of the model. Those of a probe without weights are all 0."""


def save_large(directory: Path, *, num_layers: int) -> Path:
    """Save a Llama in bf16 with 34 MiB in each layer."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="200MB")
    finally:
        torch.set_default_dtype(torch.float32)
    return directory


def add_tokenizer(directory: Path) -> None:
    """Words `t0` to `t511` are tokens 0 to 511."""
    backend = Tokenizer(models.WordLevel({f"t{number}": number for number in range(512)}, unk_token="t1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="t0").save_pretrained(directory)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_large(tmp_path_factory.mktemp("models") / "large", num_layers=30)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS))
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command did in a process of its own."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int
    logits: list[torch.Tensor]
    """Of every forward pass, in their order."""


def run(*arguments: object) -> Ran:
    """Run it in a new process with one thread."""
    [ended] = run_together([{}], *arguments)
    return ended


def run_ranks(size: int, *arguments: object) -> list[Ran]:
    """Run it in so many ranks, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_RUN_ID": "test"}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    ranks = [{**group, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return run_together(ranks, *arguments)


def run_together(environments: Sequence[Mapping[str, str]], *arguments: object) -> list[Ran]:
    """Run it in a process for each of these environments."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, f"{number}.safetensors") for number in range(len(environments))]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(file), *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
            for file, environment in zip(files, environments, strict=True)
        ]
        return [_ended(process, file) for process, file in zip(processes, files, strict=True)]


def _ended(process: subprocess.Popen[str], logits: Path) -> Ran:
    stdout, stderr = process.communicate(timeout=600)
    peak = re.search(r"^peak (\d+)$", stderr, flags=re.MULTILINE)
    assert peak, stderr
    found = load_file(logits)
    return Ran(
        code=process.returncode,
        stdout=stdout,
        stderr=stderr,
        peak_bytes=int(peak[1]),
        logits=[found[str(number)] for number in range(len(found))],
    )


def just_enough(*arguments: object, model_bytes: int, num_ranks: int = 1) -> int:
    """The least limit with which a command says that it fits. It is less than what the command works on."""
    named = (*arguments, f"limits.host_memory={300 * MIB}")
    ends = [run(*named)] if num_ranks == 1 else run_ranks(num_ranks, *named)
    found = [re.search(r"error: RAM: .* available \(short by (\S+) ([MG])iB\)", each.stderr) for each in ends]
    # They are printed in three digits.
    shortfalls = [float(each[1]) * MIB if each[2] == "M" else (float(each[1]) + 0.005) * GIB for each in found if each]
    assert {each.code for each in ends} <= {3, 75} and shortfalls, ends[0].stderr
    least_bytes = 300 * MIB + int(max(shortfalls))
    assert model_bytes > least_bytes + MORE_MIB[0] * MIB
    return least_bytes


def weights_bytes(directory: Path) -> int:
    """Bytes of the model's weights as they are saved."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def assert_same_bits(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """The logits of all passes have the same shapes and the same bits."""
    assert [each.shape for each in found] == [each.shape for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def in_memory(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="sdpa")
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> tuple[Path, Path]:
    """The config of a run that has only its store, and what it had exported: the same weights as files."""
    place = tmp_path_factory.mktemp("trained")
    base, output, exported = save_large(place / "base", num_layers=24), place / "run", place / "exported"
    add_tokenizer(base)
    settings = {
        "base_model": str(base),
        "datasets": [{"path": str(rows), "type": "tokens"}],
        "sequence_len": 128,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "device": "cpu",
        "storage": {"paths": [str(place / "store")], "durability": "none"},
        "output_dir": str(output),
    }
    config = place / "run.yaml"
    config.write_text(json.dumps(settings))
    ended = run("finetune", config)
    assert ended.code == 0, ended.stderr
    shutil.copytree(output, exported, ignore=shutil.ignore_patterns("run"))
    for path in (*output.glob("*.safetensors"), *base.glob("*.safetensors")):
        path.unlink()  # so that nothing but the store has the weights
    return config, exported


@pytest.mark.parametrize("is_run", [False, True], ids=["directory", "store"])
def test_eval_stays_inside_limits(
    large: Path, rows: Path, one_thread: None, is_run: bool, request: pytest.FixtureRequest
) -> None:
    named, weights = request.getfixturevalue("trained") if is_run else (large, large)
    model, wanted_logits, total = in_memory(weights), [], 0.0
    for row in ROWS:
        ids = torch.tensor([row])
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.arange(len(row)).unsqueeze(0), use_cache=False).logits
        total += float(cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum"))
        wanted_logits.append(logits)
    wanted = total / sum(len(row) - 1 for row in ROWS)
    del model
    arguments = ("eval", named, rows, "sample_packing=false", "device=cpu", "--json")
    least_bytes = just_enough(*arguments, model_bytes=weights_bytes(weights))
    for more_mib in MORE_MIB:
        limit_bytes = least_bytes + more_mib * MIB
        ended = run(*arguments, f"limits.host_memory={limit_bytes}")
        assert ended.code == 0, ended.stderr
        assert ended.peak_bytes <= limit_bytes
        assert json.loads(ended.stdout)["loss"] == wanted
        assert_same_bits(ended.logits, wanted_logits)


@pytest.mark.parametrize("is_run", [False, True], ids=["directory", "store"])
@pytest.mark.parametrize("prompts", [[[5, 9, 200, 17], [7] * 30], [[5, 9, 200, 17]]], ids=["padded", "not padded"])
def test_generate_stays_inside_limits(
    large: Path,
    one_thread: None,
    tmp_path: Path,
    prompts: list[list[int]],
    is_run: bool,
    request: pytest.FixtureRequest,
) -> None:
    """And the greedy text is the same."""
    if not is_run:
        add_tokenizer(large)
    named, weights = request.getfixturevalue("trained") if is_run else (large, large)
    width = max(map(len, prompts))
    (tmp_path / "prompts.txt").write_text("\n".join(" ".join(f"t{each}" for each in ids) for ids in prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    model, wanted_logits = in_memory(weights), list[torch.Tensor]()
    model.register_forward_hook(lambda module, arguments, output: wanted_logits.append(output.logits.clone()))
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    del model
    assert len(wanted_logits) == 8
    arguments = ("generate", named, "--prompts", tmp_path / "prompts.txt", "--raw", "--max-new-tokens", 8, "--json")
    least_bytes = just_enough(*arguments, "device=cpu", model_bytes=weights_bytes(weights))
    for more_mib in MORE_MIB:
        limit_bytes = least_bytes + more_mib * MIB
        ended = run(*arguments, "device=cpu", f"limits.host_memory={limit_bytes}")
        assert ended.code == 0, ended.stderr
        assert ended.peak_bytes <= limit_bytes
        found = json.loads(ended.stdout)
        assert found["batch_size"] == len(prompts)
        assert [each["token_ids"] for each in found["completions"]] == wanted[:, width:].tolist()
        assert_same_bits(ended.logits, wanted_logits)


def training(directory: Path, rows: Path, *, num_layers: int = 8) -> tuple[Path, Path]:
    """A base model, and a config of four steps without an output directory."""
    base, config = save_large(directory / "base", num_layers=num_layers), directory / "run.yaml"
    content = {
        "base_model": str(base),
        "datasets": [{"path": str(rows), "type": "tokens"}],
        "sequence_len": 128,
        "max_steps": 4,
        "device": "cpu",
        "storage": {"paths": [str(directory / "store")]},
        "output_dir": "given later",
    }
    config.write_text(json.dumps(content))
    return base, config


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_stay_inside_limits(rows: Path, tmp_path: Path, size: int) -> None:
    """Each of them has its part of the state, and whole blocks of weights and gradients on their way. What is planned
    is what is taken, but for what a process takes more or less each time."""
    base, config = training(tmp_path, rows, num_layers=16)

    def arguments(name: str) -> tuple[object, ...]:
        return "finetune", config, f"output_dir={tmp_path / name}", "dtype=float32"

    model_bytes = 6 * weights_bytes(base)
    least_bytes = just_enough(*arguments("least"), model_bytes=model_bytes, num_ranks=size)
    for more_mib in MORE_FOR_TRAINING_MIB:
        limit_bytes = least_bytes + more_mib * MIB
        ends = run_ranks(size, *arguments(str(more_mib)), f"limits.host_memory={limit_bytes}")
        for rank, ended in enumerate(ends):
            assert ended.code == 0, ended.stderr
            assert ended.peak_bytes <= limit_bytes
            directory = tmp_path / str(more_mib)
            run_directory = directory / "run" / "ranks" / str(rank) / "run" if rank else directory / "run"
            planned = json.loads((run_directory / "plan.json").read_text())["memory"]["host_bytes"]
            assert 0.75 * planned <= ended.peak_bytes <= planned + 16 * MIB


def test_finetune_stays_inside_limits(rows: Path, tmp_path: Path) -> None:
    """And the weights are the same bit for bit, whatever the plan keeps in memory: next to nothing, or more.

    The last step and the export, after a step whose buffers they do not reuse, once passed the limit.
    """
    base, config = training(tmp_path, rows)

    def arguments(name: str) -> tuple[object, ...]:
        return "finetune", config, f"output_dir={tmp_path / name}"

    # Beside the weights: what rounding left of them, two moments in fp32.
    least_bytes = just_enough(*arguments("least"), model_bytes=7 * weights_bytes(base))
    exported: list[dict[str, torch.Tensor]] = []
    for more_mib in MORE_FOR_TRAINING_MIB:
        limit_bytes = least_bytes + more_mib * MIB
        ended = run(*arguments(str(more_mib)), f"limits.host_memory={limit_bytes}")
        assert ended.code == 0, ended.stderr
        assert ended.peak_bytes <= limit_bytes
        exported.append({})
        for shard in (tmp_path / str(more_mib)).glob("*.safetensors"):
            exported[-1] |= load_file(shard)
    assert len(exported[0]) == 8 * 9 + 3
    for other in exported[1:]:
        assert exported[0].keys() == other.keys()
        for name, weights in exported[0].items():
            assert torch.equal(weights.view(torch.int16), other[name].view(torch.int16))


def test_the_peak_does_not_grow_with_the_depth(tmp_path: Path, rows: Path) -> None:
    peaks = []
    for num_layers in (4, 16):
        directory = save_large(tmp_path / f"{num_layers}", num_layers=num_layers)
        ended = run("eval", directory, rows, "device=cpu", "limits.host_memory=2GiB")
        assert ended.code == 0, ended.stderr
        peaks.append(ended.peak_bytes)
    assert peaks[1] - peaks[0] < 0.1 * peaks[0]
