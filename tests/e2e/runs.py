"""Tiny base models, tiny data, and the three ways in which the tests run the command line.

`Config.finetune` runs it in this process, which costs no imports. `Config.start` runs it in a forked process that can
be killed and signalled; the fork server has imported everything once. `ratel_command` is the installed program, for
tests that need a fresh process; only there a run measures the machine for as long as it usually does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path, PosixPath
from typing import Any, cast
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.data.batches.dataset import DataSettings, TrainingData
from ratel_cli.data.batches.load_data import load_training_data
from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.data.sources.encode import Encoding
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.data.text.tokenizer import Tokenizer as EncodeTokenizer
from ratel_cli.engine.replay.profiling import BlockProfiler
from ratel_cli.engine.steps import footprint
from ratel_cli.engine.steps.footprint import _measured_traits
from ratel_cli.hardware.budget import MeasurementBudget
from ratel_cli.hardware.measure import measure
from ratel_cli.io.queue import open_queue
from ratel_cli.library import plans
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.run.train import finetune as train_finetune
from ratel_cli.run.train import profile_machine
from ratel_cli.run.train.planner import Planner
from ratel_cli.run.train.profile_machine import measure_machine
from ratel_cli.run.train.ranks import RANK_TIMEOUT_SECONDS
from ratel_cli.run.train.trial import tried_profile
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.store import Store
from tests.reference import Recipe
from tests.simulated_gpu import install_if_asked

_stores = WeakKeyDictionary[ForkServerProcess, dist.TCPStore]()
"""By rank, the store in which it has met the others: it is there as long as one of them is."""
install_if_asked()  # also in the processes that `start` forks

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _row(number: int) -> dict[str, object]:
    """A question and its answer in two forms."""
    question = f"Which number is {number}?"
    answer = f"{number} is {'even' if number % 2 == 0 else 'odd'}" + " indeed" * (number * 7 % 11)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "prompt": question, "completion": answer}


ROWS = [_row(number) for number in range(48)]
CHAT = "chat_template"
COMPLETION = "completion"
"""Types of a dataset, which read one or the other form. A chat template costs a run a child process."""
SETTINGS: dict[str, object] = {
    "sequence_len": 64,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 0.01,
    "lr_scheduler": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "dtype": "float32",
    "device": "cpu",
    "storage": {"engine": "threads"},
    "limits": {"host_memory": "20GiB"},
}
SHORT_RUN: dict[str, object] = {
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
    "max_grad_norm": 0.5,
    "warmup_steps": 0,
    "warmup_ratio": None,
    "lr_scheduler": "constant",
}
"""Keys of a run whose weights are compared with those of plain PyTorch: it clips, and every step learns alike."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Those of a config, by name."""

Tensors = dict[str, torch.Tensor]

NO_STORE = -1
PATIENCE, MOST_FILE_BYTES = "TEST_PATIENCE_SECONDS", "TEST_MOST_FILE_BYTES"
"""In the environment of a forked process: how long a rank waits for another, and how large its files may be."""
RULES_OF = "TEST_RULES_OF"
"""There: the module of an optimizer that takes the place of Lion (tests/factored.py)."""
BRIEFLY = MeasurementBudget(
    seconds=1e-6, span_bytes=2 * PAGE_BYTES, buffer_bytes=2 * PAGE_BYTES, memory_bytes=0, adamw_bytes=0
)
"""Measuring the machine takes longer than a run of these models. The plans are odd then; the bits are the same."""
_RECORD_DEFAULTS = BlockProfiler.record.__kwdefaults__
_MEASURED: dict[str, object] | None = {}
"""What layers take and how long they take, by all of a model but its weights, and all else that this depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The exit code of a command line, and what it wrote to stderr and stdout."""

    code: int
    stderr: str
    stdout: str = ""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


def save_base(
    directory: Path, *, tied: bool = False, num_layers: int = 2, hidden_size: int = 32, vocab_size: int | None = None
) -> Path:
    """Save a small Llama with its tokenizer, chat template and generation config."""
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=7
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([message["content"] for row in ROWS for message in row["messages"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[1])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_rows(path: Path) -> Path:
    """The questions and answers as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def in_dtype(base: Path, dtype: str) -> Path:
    """The model with its weights in `dtype`, in several files; made once."""
    directory = base.with_name(f"{base.name}-{dtype}")
    if not directory.exists():
        partial = base.with_name(f"{directory.name}.partial")
        AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype]).save_pretrained(partial, max_shard_size="64KB")
        AutoTokenizer.from_pretrained(base).save_pretrained(partial)
        partial.rename(directory)
    return directory


def write_config(directory: Path, *, base: Path, rows: Path, data_type: str = COMPLETION, **changes: object) -> Config:
    """Write `run.yaml` in `directory`; the run's output and store are next to it. A change to None removes the key.

    A base that is to stay in its files is copied beside `base` in the run's dtype, which it must have for that.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if changes.get("base_storage") == "in_place":
        base = in_dtype(base, str(changes.get("dtype", SETTINGS["dtype"])))
    settings: dict[str, object] = {
        "base_model": str(base),
        "datasets": [{"path": str(rows), "type": data_type}],
        "output_dir": str(directory / "out"),
        **SETTINGS,
        **changes,
    }
    path = Config(directory / "run.yaml")
    path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return path


def ratel(*arguments: object) -> Ended:
    """Run `ratel ...` in this process."""
    stderr, stdout = io.StringIO(), io.StringIO()
    with measured_briefly(), contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
        code = main([str(argument) for argument in arguments])
    return Ended(code=code, stderr=stderr.getvalue(), stdout=stdout.getvalue())


@contextlib.contextmanager
def measured_briefly() -> Iterator[None]:
    """A context in which the machine and the model's blocks are measured in no time, by `ratel profile` as well.

    A product of two large matrices in a 16-bit dtype takes seconds on processors that have no instructions for it. A
    model that a run of this process has tried, with as much of everything, is not tried again.
    """
    brief = functools.partial(measure_machine, budget=BRIEFLY)
    with (
        mock.patch.multiple(profile_machine, measure=functools.partial(measure, budget=BRIEFLY), measure_machine=brief),
        mock.patch.dict("ratel_cli.hardware.gpu._MATMUL_SIZES", cpu=64),
        mock.patch.dict(_RECORD_DEFAULTS, most_runs=2),
        mock.patch.object(footprint, "_measured_traits", _traits_once),
        contextlib.ExitStack() as stack,
    ):
        for module in (train_finetune, plans):
            if module.tried_profile is tried_profile:  # a test may have another one
                stack.enter_context(mock.patch.object(module, "tried_profile", _tried_once))
        yield


@contextlib.contextmanager
def measured_by_each_run() -> Iterator[None]:
    """A context in which each run tries its model, whatever other runs have tried."""
    with mock.patch(f"{__name__}._MEASURED", None):
        yield


def _traits_once(model: AnyModel) -> LayerTraits:
    return cast(LayerTraits, _once(model, "traits", functools.partial(_measured_traits, model)))


def _tried_once(
    context: RunContext,
    model: AnyModel,
    batches: Sequence[AnyModelBatch],
    planner: Planner,
    plan: Plan,
    estimate: ModelProfile,
    *,
    is_packed: bool,
) -> ModelProfile | None:
    lengths = [each.num_computed_tokens for each in batches]
    what = f"{context.device} {planner.workload} {planner.decisions} {lengths} {is_packed}"
    measured = functools.partial(tried_profile, context, model, batches, planner, plan, estimate, is_packed=is_packed)
    return cast(ModelProfile | None, _once(model, what, measured))


def _once(model: AnyModel, what: str, measured: Callable[[], object]) -> object:
    """What is measured of a model, or what was before. None is not remembered: nothing could be measured."""
    root = model.root
    if _MEASURED is None or not isinstance(root, PreTrainedModel):
        return measured()
    asked = [value for name, value in root.config.to_dict().items() if name != "_name_or_path"]
    modes = [(module.training, getattr(module, "p", None)) for module in root.modules()]
    spec = replace(model.spec, name="")  # that of its directory
    key = f"{id(type(root))} {root} {asked} {root.config._attn_implementation} {modes} {spec} {model.traits} {what}"
    found = _MEASURED.get(key)
    if found is None:
        found = _MEASURED[key] = measured()
    return found


def works(*arguments: object) -> Ended:
    """Run `ratel ...` in this process. It must succeed."""
    ended = ratel(*arguments)
    assert ended.code == 0, ended.stdout + ended.stderr
    return ended


def as_json(*arguments: object) -> Any:  # noqa: ANN401
    """What `ratel ... --json` prints. It must succeed."""
    return json.loads(works(*arguments, "--json").stdout)


def assert_rejected(ended: Ended, code: int, *parts: str, num_errors: int = 1) -> None:
    """The command ended with this exit code and no traceback; its first `error:` line has all these parts."""
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.errors) == num_errors, ended.stderr
    assert [part for part in parts if part not in ended.errors[0]] == [], ended.errors[0]


def wait(process: ForkServerProcess) -> int:
    """The exit code, negative for a signal."""
    process.join(300)
    assert process.exitcode is not None, "the run does not end"
    return process.exitcode


def _stderr_path(config: Path, rank: int) -> Path:
    return config.with_name(f"stderr-{rank}.txt" if rank else "stderr.txt")


def _run_child(
    config: str, arguments: Sequence[str], kill_at: str | None, environment: Mapping[str, str], directory: str
) -> None:
    torch.set_num_threads(1)
    os.chdir(directory)  # a fork server has that of the test that started it
    os.environ.clear()  # and its environment
    os.environ.update(environment)
    if kill_at is not None:
        os.environ["RATEL_KILL_AT"] = kill_at
    if RULES_OF in os.environ:
        importlib.import_module(os.environ[RULES_OF]).take_the_place_of_lion()
    path = _stderr_path(Path(config), int(os.environ.get("RANK", "0")))
    with path.open("w", encoding="utf-8", buffering=1) as stderr:
        sys.stderr = stderr
        patience, most = os.environ.get(PATIENCE), os.environ.get(MOST_FILE_BYTES)
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
        with (
            measured_briefly(),
            mock.patch(
                "ratel_cli.run.train.finetune.RANK_TIMEOUT_SECONDS",
                RANK_TIMEOUT_SECONDS if patience is None else float(patience),
            ),
        ):
            code = main(["finetune", config, *arguments])
        for number in (signal.SIGINT, signal.SIGTERM):  # the command is over: later signals are not meant for it
            signal.signal(number, signal.SIG_IGN)
        sys.exit(code)


def ratel_command() -> Path:
    """The installed program."""
    return Path(sys.executable).with_name("ratel")


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its content; None for a folder."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def json_lines(path: Path) -> list[dict[str, float]]:
    """The whole lines of a log. A run that is killed, or still writes, may leave a part of one more."""
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


class Config(PosixPath):
    """The file of a run's config: its run, and what that leaves. The output and the store are next to the file."""

    def finetune(self, *arguments: str) -> Ended:
        """Run `ratel finetune CONFIG ...` in this process."""
        return ratel("finetune", self, *arguments)

    def succeed(self, *arguments: str) -> str:
        """Run it, and return what it wrote to stderr. It must succeed."""
        return works("finetune", self, *arguments).stderr

    def start(
        self, *arguments: str, kill_at: str | None = None, environment: Mapping[str, str] | None = None
    ) -> ForkServerProcess:
        """Run it in a forked process, which writes to `stderr.txt` next to the config.

        The process has the environment of this one, and `environment`.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ratel_cli.run.train.finetune", "tests.e2e.runs"])
        process = context.Process(
            target=_run_child, args=(str(self), arguments, kill_at, {**os.environ, **(environment or {})}, os.getcwd())
        )
        process.start()
        return process

    def run_until_killed(self, *arguments: str, kill_at: str, environment: Mapping[str, str] | None = None) -> None:
        """Run it until it is killed at this failpoint of the store."""
        assert wait(self.start(*arguments, kill_at=kill_at, environment=environment)) == -9, self.stderr

    def start_ranks(
        self,
        size: int,
        *arguments: str,
        kill_at: Mapping[int, str] | None = None,
        environments: Mapping[int, Mapping[str, str]] | None = None,
    ) -> list[ForkServerProcess]:
        """Run it in so many ranks, each as `start` does; the store in which they meet is another process's, as
        torchrun's. `kill_at`, and what is in the environment besides: by rank."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": "t",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes = []
        for rank in range(size):
            own = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environments or {}).get(rank, {})}
            processes.append(self.start(*arguments, kill_at=(kill_at or {}).get(rank), environment=own))
            _stores[processes[-1]] = store
        return processes

    def run_ranks(self, size: int, *arguments: str, **given: Mapping[int, Any] | None) -> list[int]:
        """Run it in so many ranks, as `start_ranks` does, until all have ended. Returns their exit codes."""
        return [wait(process) for process in self.start_ranks(size, *arguments, **given)]

    def succeed_ranks(self, size: int, *arguments: str) -> str:
        """Run it in so many ranks to the end. Returns what rank 0 wrote to stderr."""
        for rank, process in enumerate(self.start_ranks(size, *arguments)):
            assert wait(process) == 0, self.stderr_of(rank)
        return self.stderr

    @property
    def stderr(self) -> str:
        """What the last process of `start` wrote to stderr, or rank 0."""
        return self.stderr_of(0)

    def stderr_of(self, rank: int) -> str:
        """What the process that was this rank wrote to stderr."""
        return _stderr_path(self, rank).read_text(encoding="utf-8")

    def wait_for_step(self, step: int, process: ForkServerProcess) -> None:
        """Return when the run's log has that step."""
        path = self.output / "run" / "metrics.jsonl"
        self.wait_until(lambda: path.exists() and len(json_lines(path)) >= step, process)

    def wait_until(self, condition: Callable[[], bool], process: ForkServerProcess) -> None:
        """Return when the condition holds. The run must still be alive."""
        deadline = time.monotonic() + 300
        while not condition():
            assert process.is_alive() and time.monotonic() < deadline, self.stderr
            time.sleep(0.002)

    @property
    def output(self) -> Path:
        """The output directory that `write_config` chose."""
        return self.parent / "out"

    @property
    def store(self) -> Path:
        """The data file of the default store."""
        return self.parent / "out.store" / "ratel.store"

    @property
    def committed_step(self) -> int:
        """The step of the store's current generation; NO_STORE if no import was committed."""
        paths = [self.store.parent]
        if not Store.exists(paths):
            return NO_STORE
        with (
            open_queue("threads", notice=lambda text: None) as queue,
            Store.open(paths, queue=queue, identity=None) as store,
        ):
            return store.progress.step

    @property
    def adapts(self) -> bool:
        """Whether the run trains an adapter."""
        return "adapter" in yaml.safe_load(self.read_text())

    @property
    def weights_path(self) -> Path:
        """Where the run exports what it has trained: the model's weights, or the adapter's."""
        return self.output / ("adapter_model.safetensors" if self.adapts else "model.safetensors")

    @property
    def exported(self) -> Tensors:
        """The weights that the run left, or its adapter."""
        return load_file(self.weights_path)

    @property
    def export_hash(self) -> str:
        """The hash of the export's weight file."""
        return file_hash(self.weights_path)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl."""
        return json_lines(self.output / "run" / "metrics.jsonl")

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Step, loss and norm of each step: the same for a resumed run as for an undisturbed one."""
        return [(line["step"], line["loss"], line["grad_norm"]) for line in self.metrics]

    def assert_same_result(self, other: Config) -> None:
        """Two runs have left the same weights, and the same losses and norms."""
        assert self.export_hash == other.export_hash
        assert self.curve == other.curve

    @property
    def recipe(self) -> Recipe:
        """What plain PyTorch is told to train as the config says."""
        settings = load_config(self).config
        return Recipe(
            dtype=DTYPES[settings.dtype],
            optimizer=settings.optimizer,
            momentum=(None if settings.optim_args is None else settings.optim_args.momentum) or 0.0,
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            bf16_master=settings.bf16_master,
            seed=settings.seed,
        )

    def load_data(self, *, row_multiple: int = 1, tokenizer_dir: Path | None = None) -> TrainingData:
        """The training data of the config, loaded as its run loads it. `row_multiple`: what divides its rows' tokens.
        `tokenizer_dir`: where another tokenizer is than the base model's."""
        settings = load_config(self).config
        assert settings.base_model is not None
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir or settings.base_model)
        known = tokenizer.get_vocab()  # others would be new tokens, which the model's embedding has no rows for
        tokenizer.add_special_tokens({k: v for k, v in (settings.special_tokens or {}).items() if v in known})
        return load_training_data(
            [DatasetSource(**item.model_dump()) for item in settings.datasets],
            DataSettings(
                sequence_len=settings.sequence_len,
                micro_batch_size=settings.micro_batch_size,
                gradient_accumulation_steps=settings.gradient_accumulation_steps,
                packing=settings.sample_packing,
                shuffle=settings.shuffle,
                seed=settings.seed,
                val_set_size=settings.val_set_size,
                task=settings.task,
                mlm_probability=settings.mlm_probability,
            ),
            Encoding(tokenizer=cast(EncodeTokenizer, tokenizer), train_on_inputs=settings.train_on_inputs),
            TokenFiles(cache_dir=self.parent / "tokens", rejects_path=self.parent / "rejects.jsonl"),
            notice=lambda text: None,
            row_multiple=row_multiple,
        )
