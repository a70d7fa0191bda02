"""`ratel check` and `ratel finetune` agree about everything that a run can be refused for before its first step.

For each case the two have the same exit code, `check` reports every error of `finetune` (and others at once, which a
run does not come to), and neither has made a store or changed a file that was there.

A list of all messages shows that no refusal is forgotten: each has a case, or a reason why it has none.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratel_cli.hardware import drives
from ratel_cli.store.lock import StoreLock
from scripts.list_messages import Message, messages_in, package_sources
from tests.config.test_rejections import blocks
from tests.e2e.conftest import MakeConfig
from tests.e2e.preferences import keys_of, pairs, recipe, write
from tests.e2e.runs import Config, Ended, assert_rejected, file_hash, ratel, works
from tests.model.tiny import file_size_limit
from tests.tiers import sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a case may use."""

    make: MakeConfig
    base: Path
    rows: Path
    directory: Path
    patch: pytest.MonkeyPatch
    resources: ExitStack
    small_disk: Callable[[], Path]

    def run(self, **changes: object) -> Config:
        """The config of a finished run of one step."""
        config = self.make(**{"max_steps": 1, **changes})
        config.succeed()
        return config

    def copied_base(self) -> Path:
        return Path(shutil.copytree(self.base, self.directory / "copy"))


Asked = tuple[Path, list[str]]
"""A config and overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A refusal: part of its message as the source has it, the exit code, and what provokes it."""

    message: str
    code: int
    prepare: Callable[[Scene], Asked]


def with_keys(**changes: object) -> Callable[[Scene], Asked]:
    """A new run with these keys; `{}` in a text is the test's directory."""

    def fill(value: object, scene: Scene) -> object:
        if isinstance(value, str):
            return value.replace("{}", str(scene.directory)).replace("{base}", str(scene.base))
        if isinstance(value, dict):
            return {key: fill(each, scene) for key, each in value.items()}
        return [fill(each, scene) for each in value] if isinstance(value, list) else value

    return lambda scene: (scene.make(**{key: fill(value, scene) for key, value in changes.items()}), [])


def over_run(*overrides: str, **changes: object) -> Callable[[Scene], Asked]:
    """A finished run with other settings."""
    return lambda scene: (scene.run(**changes), list(overrides))


def no_tracker(scene: Scene) -> Asked:
    scene.patch.setattr("ratel_cli.run.train.trackers._is_installed", lambda package: False)
    return scene.make(report_to=["wandb", "mlflow"]), []


def no_mistral_common(scene: Scene) -> Asked:
    scene.patch.setattr("ratel_cli.data.text.mistral_tokenizer.find_spec", lambda name: None)
    return scene.make(tokenizer_use_mistral_common=True), []


def output_is_a_file(scene: Scene) -> Asked:
    (scene.directory / "file").write_text("mine")
    return scene.make(output_dir=str(scene.directory / "file")), []


def output_has_files(scene: Scene) -> Asked:
    (scene.directory / "mine").mkdir()
    (scene.directory / "mine" / "notes.txt").write_text("mine")
    return scene.make(output_dir=str(scene.directory / "mine")), []


def in_run(change: Callable[[Path], None]) -> Callable[[Scene], Asked]:
    """A finished run whose output directory was changed."""

    def prepare(scene: Scene) -> Asked:
        config = scene.run()
        change(config.output)
        return config, ["max_steps=2"]

    return prepare


def in_base(change: Callable[[Path], None], **changes: object) -> Callable[[Scene], Asked]:
    """A new run of a base model whose files were changed."""

    def prepare(scene: Scene) -> Asked:
        base = scene.copied_base()
        change(base)
        return scene.make(base=base, **changes), []

    return prepare


def in_file(name: str, text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(text) and None


def weights_become_a_folder(output: Path) -> None:
    (output / "model.safetensors").unlink()
    (output / "model.safetensors").mkdir()


def license_leads_out(base: Path) -> None:
    (base.parent / "LICENSE").write_text("do what you want")
    (base / "LICENSE").symlink_to(base.parent / "LICENSE")


def run_is_a_link(output: Path) -> None:
    (output / "run").rename(output.parent / "elsewhere")
    (output / "run").symlink_to(output.parent / "elsewhere")


def metrics_is_a_link(output: Path) -> None:
    (output / "run" / "metrics.jsonl").rename(output.parent / "mine")
    (output / "run" / "metrics.jsonl").symlink_to(output.parent / "mine")


def trace_of_the_user(scene: Scene) -> Asked:
    config = scene.run()
    (config.output / "run" / "trace.json").write_text("mine")
    return config, ["trace=true", "max_steps=2"]


def output_is_an_export(scene: Scene) -> Asked:
    config, exported = scene.run(), scene.directory / "exported"
    works("export", config, "-o", exported)
    return scene.make("other", output_dir=str(exported)), []


def copied_run(scene: Scene) -> Asked:
    config = scene.run()
    shutil.copytree(config.output, scene.directory / "run" / "copied")
    return scene.directory / "run" / "copied", ["max_steps=2"]


def lost_store(scene: Scene) -> Asked:
    config = scene.run()
    config.store.unlink()
    return config, ["max_steps=2"]


def store_in_use(scene: Scene) -> Asked:
    config = scene.run()
    scene.resources.enter_context(StoreLock([config.store.parent], create=False, wait_seconds=0))
    real = StoreLock

    def lock(
        directories: list[Path], *, create: bool, wait_seconds: float, read_only: bool = False, shared: bool = False
    ) -> StoreLock:
        return real(directories, create=create, wait_seconds=0.05, read_only=read_only, shared=shared)

    scene.patch.setattr("ratel_cli.store.open.StoreLock", lock)
    return config, ["max_steps=2"]


def store_is_a_folder(scene: Scene) -> Asked:
    config = scene.make()
    config.store.mkdir(parents=True)
    return config, []


def store_is_short(scene: Scene) -> Asked:
    config = scene.run()
    with config.store.open("r+b") as file:
        file.truncate(config.store.stat().st_size // 2)
    return config, ["max_steps=2"]


def other_data(scene: Scene) -> Asked:
    rows = scene.directory / "rows.jsonl"
    shutil.copyfile(scene.rows, rows)
    config = scene.run(rows=rows)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    return config, ["max_steps=2"]


def other_reference(scene: Scene) -> Asked:
    """The base model is another one since, and a longer run needs to know more of the first."""
    base, rows = scene.copied_base(), write(scene.directory / "pairs.jsonl", pairs())
    config = scene.run(**{**keys_of(recipe("dpo")), "base": base, "rows": rows, "max_steps": 1})
    path = base / "model.safetensors"
    save_file({name: each * 2 for name, each in load_file(path).items()}, path, metadata={"format": "pt"})
    return config, ["max_steps=3"]


def snapshot_of_other(scene: Scene) -> Asked:
    snapshot = {"path": str(scene.directory / "snapshot"), "every": 1}
    scene.make("one", max_steps=1, storage={"engine": "threads", "snapshot": snapshot}).succeed()
    return scene.make("two", storage={"engine": "threads", "snapshot": snapshot}), []


def snapshot_over_store(scene: Scene) -> Asked:
    snapshot = {"path": str(scene.run().store.parent), "every": 1}
    return scene.make("two", storage={"engine": "threads", "snapshot": snapshot}), []


def snapshot_without_store(scene: Scene) -> Asked:
    snapshot = {"path": str(scene.directory / "snapshot"), "every": 1}
    config = scene.run(storage={"engine": "threads", "snapshot": snapshot})
    config.store.unlink()
    return config, ["max_steps=2"]


def on_small_disk(size: str, **keys: object) -> Callable[[Scene], Asked]:
    """A new run with something on a file system of this size, which `{}` in the keys names."""

    def prepare(scene: Scene) -> Asked:
        disk = scene.small_disk()
        subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
        return scene.make(**json.loads(json.dumps(keys).replace("{}", str(disk)))), []

    return prepare


def small_share(scene: Scene) -> Asked:
    # As a rule shares follow the measured rates, which differ from run to run.
    scene.patch.setattr(drives, "shares_for", lambda rates: (1,) * len(rates))
    paths = ["{}/store", str(scene.directory / "other")]
    return on_small_disk("256k", storage={"engine": "threads", "paths": paths})(scene)


def limited_files(scene: Scene) -> Asked:
    config = scene.make()
    scene.resources.enter_context(file_size_limit(1 << 19))
    return config, []


def end_is_beyond_the_embedding(scene: Scene) -> Asked:
    base = scene.copied_base()
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["<|end|>"] = tokenizer["added_tokens"][0]["id"] = 900
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    return scene.make(base=base), []


def cut_weights(base: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])


def bad_rows(scene: Scene) -> Asked:
    path = scene.directory / "bad.jsonl"
    path.write_text("".join(scene.rows.read_text().splitlines(keepends=True)[:8]) + "not json\n" * 3)
    return scene.make(rows=path), []


def no_template(scene: Scene) -> Asked:
    base = scene.copied_base()
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    return scene.make(base=base, chat_template="mistral"), []


CASES = (
    Case(message="cannot be used: not installed here", code=2, prepare=no_tracker),
    Case(message="run/train/first_checks.py|`model_shape` is only for", code=2, prepare=with_keys(
        base_model=None, datasets=None, model_shape={"num_layers": 1, "num_heads": 1, "hidden_size": 8})),
    Case(message="not the output directory of a run", code=2, prepare=lambda scene: (scene.directory, [])),
    # The output directory.
    Case(message="{output_dir} is not a directory", code=2, prepare=output_is_a_file),
    Case(message="has files in it, and Ratel did not make it", code=2, prepare=output_has_files),
    Case(message="{option}: {directory} cannot be written", code=3, prepare=with_keys(output_dir="{}/" + "o" * 300)),
    Case(message="output_dir: {_holds(directory, marker)}", code=2, prepare=output_is_an_export),
    Case(message="are the same directory", code=2, prepare=with_keys(output_dir="{base}")),
    Case(message="is inside the base model", code=2, prepare=with_keys(output_dir="{base}/out")),
    Case(message="or a file of it is inside {output_dir}", code=2, prepare=with_keys(output_dir="{base}/..")),
    Case(message="would be replaced, but Ratel did not write it, or it was changed", code=2,
         prepare=in_run(in_file("model.safetensors", "mine"))),
    Case(message="would lead to other weights", code=2, prepare=in_run(in_file("model.safetensors.index.json", "{}"))),
    Case(message="would be replaced, but Ratel did not write it, or it was changed", code=2,
         prepare=in_run(weights_become_a_folder)),
    Case(message="but a run would write its files there", code=2, prepare=in_run(run_is_a_link)),
    Case(message="but a run would write a file of that name", code=2, prepare=in_run(metrics_is_a_link)),
    Case(message="{shown} would be replaced, but Ratel did not write it", code=2, prepare=trace_of_the_user),
    Case(message="it cannot be changed for the run in", code=2,
         prepare=lambda scene: (scene.run().output, ["output_dir=other"])),
    # The model and its small files, which an export needs.
    Case(message="the tokenizer's {name}", code=2, prepare=end_is_beyond_the_embedding),
    Case(message="{directory}: no usable tokenizer: {first_line(error)}", code=2,
         prepare=in_base(in_file("tokenizer.json", "{"))),
    Case(message="no tokenizer for mistral-common: there is neither", code=2,
         prepare=with_keys(tokenizer_use_mistral_common=True)),
    Case(message="the package mistral-common is not installed here", code=2, prepare=no_mistral_common),
    Case(message="special_tokens: the tokenizer has no token", code=2,
         prepare=with_keys(special_tokens={"eos_token": "<none>"})),
    Case(message="eot_tokens: the tokenizer has no token", code=2, prepare=with_keys(eot_tokens=["<none>"])),
    Case(message="and the tokenizer has none of its own", code=2, prepare=no_template),
    Case(message="chat_template_jinja: {written}: cannot be read", code=2,
         prepare=with_keys(chat_template_jinja="/no/such.jinja")),
    Case(message="is a link to a file outside", code=2, prepare=in_base(license_leads_out)),
    Case(message="bytes of data in the file", code=2, prepare=in_base(cut_weights)),
    Case(message="and this cannot be a hub id", code=2, prepare=with_keys(base_model="/no/such")),
    # The data.
    Case(message="rejected {", code=2, prepare=bad_rows),
    Case(message="no such file or directory", code=2, prepare=with_keys(datasets=["/no/such.jsonl"])),
    # The store.
    Case(message="which has other settings: {'; '.join(changed)}", code=2, prepare=over_run("seed=1")),
    Case(message="the training data changed since this run began", code=2, prepare=other_data),
    Case(message="but would now end after step", code=2, prepare=over_run("max_steps=1", max_steps=2)),
    Case(message="the store was made with storage.durability", code=2,
         prepare=over_run("max_steps=2", "storage.durability=none")),
    Case(message="the store has space for", code=2, prepare=over_run("max_steps=4", "save_steps=1")),
    Case(message="holds {store}, whose output directory is", code=2, prepare=copied_run),
    Case(message="but its store is gone", code=2, prepare=lost_store),
    Case(message="is in use", code=3, prepare=store_in_use),
    Case(message="{option}: {file} is not a file", code=3, prepare=store_is_a_folder),
    Case(message="is truncated: it has", code=4, prepare=store_is_short),
    # The snapshot.
    Case(message="losing it would lose both", code=2, prepare=with_keys(
        output_dir="{}/out", storage={"engine": "threads", "snapshot": {"path": "{}/out.store", "every": 1}})),
    Case(message="there is a snapshot in", code=2, prepare=snapshot_without_store),
    Case(message="which the snapshot would replace", code=2, prepare=snapshot_over_store),
    Case(message="describe_store(config, [path], what='snapshot')", code=2, prepare=snapshot_of_other),
    Case(message="{option}: {directory} cannot be written", code=3, prepare=with_keys(
        storage={"engine": "threads", "snapshot": {"path": "/proc/none", "every": 1}})),
    # The machine.
    Case(message="a step needs", code=3, prepare=with_keys(limits={"host_memory": "150MiB"})),
    Case(message="but PyTorch finds no CUDA device", code=3, prepare=with_keys(device="cuda")),
    Case(message="not enough space for the store: it needs", code=3, prepare=on_small_disk(
        "512k", storage={"engine": "threads", "paths": ["{}/store"]})),
    Case(message="not enough space for the store: its share in", code=3, prepare=small_share),
    Case(message="not enough space for the {self.name}", code=3, prepare=on_small_disk("1m", output_dir="{}/out")),
    Case(message="not enough space for the {self.name}", code=3, prepare=on_small_disk(
        "512k", storage={"engine": "threads", "snapshot": {"path": "{}/s", "every": 1}})),
    Case(message="the limit of this process on the size of files", code=3, prepare=limited_files),
    Case(message="changed since the run began, and some reference", code=2, prepare=other_reference),
    Case(message="allows not even one step", code=3, prepare=with_keys(
        storage={"engine": "threads", "max_tb_written": 1e-9})),
)  # fmt: skip
NOT_ASKED: Mapping[str, str] = {
    # What check has no option for.
    "--from": "check has no --from",
    "--resume": "check has no --resume",
    "its stores must be redistributed": "check has no --ranks",
    "and this run has": "check has no --ranks",
    "holds the store of another rank": "check has no --ranks",
    "is a directory, but a file of the model": "of --overwrite: the last test",
    "there is no saved step": "of --resume STEP",
    "and nothing says that it is this run's": "of --resume no",
    "which has other settings or data": "of --resume no",
    "of a run with other settings": "of --resume no",
    "{asked}: the run in": "of --from",
    "which is not supported with several ranks": "check has no --from",
    "lacks reference log-probabilities that this run "
    "needs": "of a run that began with --from; tests/e2e/test_reference_model.py",
    "may be gone when the run is resumed": "an I/O error",
    "the reference log-probabilities are not finite": "known when they are computed",
    "weight decay applied to other parameters": "a store of an earlier version, opened by one function",
    # What other commands ask.
    "-o: {_holds": "of export",
    "storage.snapshot.path: {error.message}": "adds the key to what opening a store says",
    "storage.snapshot.path: {failure.message}": "adds the key to what opening a store says",
    "no model was trained with this config": "of commands about finished runs",
    "the store in {directory} was made for another model": "of commands about finished runs",
    "run/files/output.py|{missing_store(config)}": "of commands about finished runs",
    "nothing was deleted": "of clean",
    "belongs to the run in": "of commands about finished runs",
    "is not saved in the store": "of commands about finished runs",
    # What the config, which is read first, says in other words.
    "storage.paths is empty": "the config says it",
    "storage.paths names": "the config says it",
    "no usable tokenizer: there are no tokenizer files": "special tokens without a tokenizer: as the case after it",
    "no split of": "as `a step needs`",
    "comes closest": "as `a step needs`",
    "the split that this run began with": "as `a step needs`",
    "{table[0]} has only": "one function for both, in tests/run",
    "and no EOS token in its place": "of a classifier: in test_encoders",
    # What can only happen while something is written, as when a drive is filled up or pulled out meanwhile.
    "not enough space: needs": "seen before, unless the drive is filled up meanwhile",
    "the export needs {needed}": "seen before, unless the drive is filled up meanwhile",
    "space cannot be reserved": "seen before, unless the drive is filled up meanwhile",
    "{directory}: cannot be created": "seen before by measuring",
    "a file cannot be created in it": "seen before by measuring",
    "output_dir: {path} cannot be written": "seen before, unless the right is taken away meanwhile",
    "run/files/output.py|output_dir: {directory} cannot be written": "seen before, unless the right is taken meanwhile",
    "the store's files could not be written": "an I/O error",
    "cannot be finished": "an export that was killed while it was moved, on a drive that is read-only since",
    "is in the way": "seen before: files that Ratel did not make",
    "cannot be discarded": "our own invariant",
    "cannot be saved: the store has": "our own invariant",
    # What root may always do, or what the file systems of tests always can.
    "file {excerpt(name)} cannot be read": "root reads everything",
    "{output_dir} cannot be read": "root reads everything",
    "cannot be opened for {purpose}": "root reads everything",
    "cannot be locked": "file systems without locks",
    # Of stores, which both commands open by one function.
    "store/lock.py|there is no store in": "a store that disappears meanwhile",
    "is not a regular file": "seen before, unless it is replaced meanwhile",
    "is incomplete: its import": "such a store is made again",
    "was being written in place": "tests/e2e/test_resume.py",
    "Ratel did not make {run_directory": "a directory of an export with a folder of the user's",
}
"""Parts of messages that no case provokes, and why."""
LISTED = (
    "cli/finetune", "run/files/origin", "run/files/output", "run/files/run_directory", "run/files/run_files",
    "run/inputs/length", "run/train/branch", "run/train/decided", "run/train/finetune", "run/train/opening",
    "run/train/first_checks", "run/train/snapshots",
    "run/train/space", "run/train/split", "run/train/start", "run/train/store", "run/train/trackers",
    "model/export/sidecars",
    "model/files/marker", "model/export/staging", "store/open", "store/lock", "store/create", "store/store", "io/files",
    "run/train/reference",
)  # fmt: skip
"""Files whose messages each have a case, or a reason.

What is wrong with a config is in tests/config/rejections.txt, and what is wrong with a model or with data both commands
find by reading them with one function."""


@functools.cache
def all_messages() -> tuple[Message, ...]:
    """Every text of the program: read once, in some seconds."""
    return tuple(messages_in(package_sources()))


def is_named(part: str, message: Message) -> bool:
    """Whether the part, perhaps with the end of a path before it, is in this message."""
    path, _, text = part.rpartition("|")
    return message.path.endswith(path) and text in message.text


@pytest.fixture
def scene(
    make_config: MakeConfig,
    base: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Scene]:
    with ExitStack() as resources, monkeypatch.context() as patch:
        yield Scene(
            make=make_config,
            base=base,
            rows=rows,
            directory=tmp_path,
            patch=patch,
            resources=resources,
            small_disk=lambda: request.getfixturevalue("small_disk"),
        )


def contents(directory: Path) -> dict[Path, str]:
    """The files below a directory and their hashes, without what a run notes of its data in its own `run/`."""
    files = [path for path in directory.rglob("*") if path.is_file() and "run/tokens" not in str(path)]
    return {path: file_hash(path) for path in files}


def bare(error: str) -> str:
    """An error without its place in the config, and with N for numbers: memory grows between two commands."""
    text = re.sub(r"^(argument '[^']*'|\S*run\.yaml:\d+:\d+): ", "", error.removeprefix("error: "))
    return re.sub(r"\d+(\.\d+)?", "N", text)


def assert_agree(config: Path, overrides: list[str], directory: Path) -> Ended:
    """The two commands agree, and nothing was written. Returns how `finetune` ended."""
    before = contents(directory)
    checked = ratel("check", config, *overrides)
    assert contents(directory) == before
    ended = ratel("finetune", config, *overrides)
    new = {path: digest for path, digest in contents(directory).items() if before.get(path) != digest}
    assert [path for path in new if path.name not in ("ratel.files", "rejects.jsonl")] == []
    assert ended.code == checked.code != 0, checked.stderr + ended.stderr
    found = set(map(bare, checked.errors))
    assert [error for error in ended.errors if bare(error) not in found] == [], checked.stderr
    return ended


def template(text: str) -> re.Pattern[str]:
    """A message as the source has it, as a pattern of what it becomes."""
    return re.compile(".*".join(map(re.escape, re.split(r"\{(?:[^{}]|\{[^{}]*\})*\}", text))))


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("case", sample(CASES, every=9))
def test_what_a_run_is_refused_for_is_what_check_reports(scene: Scene, case: Case) -> None:
    config, overrides = case.prepare(scene)
    ended = assert_agree(config, overrides, scene.directory)
    wanted = [template(each.text) for each in all_messages() if is_named(case.message, each)]
    assert any(each.search(error) for each in wanted for error in ended.errors), ended.errors
    assert ended.code == case.code


@pytest.mark.parametrize("text", sample([text for text, _ in blocks()], every=24))
def test_a_wrong_config_is_refused_by_both(tmp_path: Path, text: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    assert_agree(config, [], tmp_path)


def test_every_refusal_has_a_case() -> None:
    listed = {f"ratel_cli/{name}.py" for name in LISTED}
    assert [path for path in listed if not (Path(__file__).parents[2] / path).is_file()] == []
    messages = [each for each in all_messages() if each.kind == "error" and each.path in listed]
    named = [*(case.message for case in CASES), *NOT_ASKED]
    assert [each for each in messages if not any(is_named(part, each) for part in named)] == []
    assert [part for part in named if not any(is_named(part, each) for each in all_messages())] == [], (
        "no such message any more"
    )


def test_a_folder_that_no_export_replaces_is_reported_before_the_first_step(make_config: MakeConfig) -> None:
    config = make_config()
    (config.output / "model.safetensors").mkdir(parents=True)
    for arguments in (["--dry-run"], []):
        ended = ratel("finetune", config, "--overwrite", *arguments)
        assert_rejected(ended, 2, "model.safetensors is a directory, but a file of the model has that name")
    assert not config.store.exists()
