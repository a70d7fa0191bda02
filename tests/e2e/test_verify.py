"""`ratel verify`: a whole run passes, and every change is reported with its place and exit code 4."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import Config, Ended, Tensors, as_json, file_hash, ratel, works
from tests.e2e.trained import WHOLE_OR_ADAPTER, OfEach, run_of_each
from tests.tiers import rotating, thinned

SAVING: dict[str, object] = {"max_steps": 4, "save_steps": 2, "save_total_limit": 2, "dtype": "bfloat16"}
WEIGHTS = "model.safetensors"
CHECKSUM = "has not the checksum that it was exported with"


@pytest.fixture(scope="module")
def saved_of(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs that have saved steps 2 and 4."""
    return run_of_each(tmp_path_factory, base=base, rows=rows, **SAVING)


@pytest.fixture
def saved(saved_of: OfEach) -> Config:
    """The config of such a run of all weights. Tests must not change it."""
    return saved_of("all weights")


@pytest.fixture
def copied(saved_of: OfEach, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """A copy of such a run, which a test may damage. It trains all weights unless the test asks for another one."""
    saved = saved_of(getattr(request, "param", "all weights"))
    Path(shutil.copytree(saved.parent, tmp_path / "copied"))
    config = Config(tmp_path / "copied" / "run.yaml")
    for file in (config, config.output / "run" / "config.yaml"):
        file.write_text(file.read_text().replace(str(saved.parent), str(config.parent)))
    return config


OF_EACH = pytest.mark.parametrize("copied", thinned(WHOLE_OR_ADAPTER, every=3), indirect=True)
"""A test of a copy, once for each kind of run."""


def library_of(config: Config) -> str:
    """What the export is loaded with."""
    return "PEFT" if config.adapts else "transformers"


def rows_of(ended: Ended) -> dict[str, str]:
    """The table: the first column, and the rest of each row."""
    lines = [line for line in ended.stdout.splitlines()[1:] if line]
    return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines}


def change_weights(config: Config, change: Callable[[Tensors], object]) -> None:
    tensors = config.exported
    change(tensors)
    save_file(tensors, config.weights_path, metadata={"format": "pt"})


def damage(config: Config, step: int, block: int, field: str) -> None:
    """Flip a bit in a field of a generation, in the data file."""
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        BufferPool(None) as pool,
        Store.open([config.store.parent], queue=queue, identity=None) as store,
    ):
        generation = store.current() if store.progress.step == step else store.pinned(step)
        field_, num_elements = store.blocks[block].record.field(field), store.blocks[block].num_elements
        memory = pool.lease(field_.num_bytes(num_elements), "test").memory
        generation.read(block, field, 0, num_elements, memory).wait()
        wanted = bytes(memory[:4096])
    data = bytearray(config.store.read_bytes())
    place = data.index(wanted)
    data[place + 17] ^= 4
    config.store.write_bytes(data)


@pytest.mark.parametrize(
    ("by", "what"), rotating(["config", "directory"], WHOLE_OR_ADAPTER, every=2, full_rotation=True)
)
def test_a_whole_run(saved_of: OfEach, by: str, what: str) -> None:
    saved = saved_of(what)
    before = file_hash(saved.store)
    ended = works("verify", saved if by == "config" else saved.output)
    assert ended.stdout.splitlines()[0].split() == ["what", "bytes", "checked", "verdict"]
    rows = rows_of(ended)
    weights, library = saved.weights_path.name, library_of(saved)
    assert list(rows) == [
        "step 4, current", "step 2, saved", weights, "other files", "tokenizer", library, "weights", "logits",
    ]  # fmt: skip
    assert all("every chunk" in rows[name] and rows[name].endswith("whole") for name in list(rows)[:2])
    assert rows[weights].endswith("tensors  whole, every value finite")
    assert "loads: LlamaForCausalLM" in rows[library]
    assert rows["tokenizer"].endswith("equal to the run's")
    assert rows["weights"].endswith("every bit  equal to step 4")
    assert rows["logits"].endswith("16 tokens  equal to those from step 4, bit for bit")
    assert "B/s" in ended.stderr
    assert file_hash(saved.store) == before


def test_json(saved: Config) -> None:
    found = as_json("verify", saved)
    assert found["whole"] is True
    assert [check["what"] for check in found["checks"]][:3] == ["step 4, current", "step 2, saved", WEIGHTS]
    assert all(check.keys() == {"what", "num_bytes", "checked", "verdict", "is_wrong"} for check in found["checks"])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "float16"}, marks=pytest.mark.nightly),
        pytest.param({"dtype": "float32"}, marks=pytest.mark.full),
        {"base": "tied"},
        pytest.param({"random_init": True}, marks=pytest.mark.nightly),
        {"attn_implementation": "flash_attention_2"},
    ],
    ids=["float16", "float32", "tied", "drawn", "flash"],
)
def test_other_runs(make_config: MakeConfig, tied_base: Path, changes: dict[str, object]) -> None:
    config = make_config(max_steps=2, **({"base": tied_base} if "base" in changes else changes))
    config.succeed()
    assert rows_of(works("verify", config))["logits"].endswith("bit for bit")


@pytest.mark.parametrize(
    ("copied", "step", "block", "field"),
    [
        ("all weights", 4, 0, "hi16"),
        ("lora", 4, 2, "v32"),
        ("all weights", 2, 1, "lo16"),
        ("lora", 2, 4, "m32"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("all weights", 4, 2, "v32"),
                ("all weights", 2, 3, "m32"),
                ("qlora", 4, 5, "w32"),
                ("dora, head whole", 2, 1, "lo16"),
                ("adamw_8bit", 4, 1, "v_scale"),
                ("muon", 2, 5, "m32"),
            )
        ),
    ],
    indirect=["copied"],
)
def test_a_flipped_bit_in_the_store(copied: Config, step: int, block: int, field: str) -> None:
    damage(copied, step, block, field)
    ended = ratel("verify", copied)
    assert ended.code == 4
    [error] = ended.errors
    name, other = ("step 4, current", "step 2, saved") if step == 4 else ("step 2, saved", "step 4, current")
    assert error.startswith(f"error: {name}: block {block}, {field}: elements 0 to ")
    rows = rows_of(ended)
    assert "WRONG: " in rows[name]
    assert rows[other].endswith("whole")
    if step == 2:
        assert rows["logits"].endswith("bit for bit")
    else:
        assert "equal to step 4" not in ended.stdout, "what is damaged is no measure"


@pytest.mark.parametrize(
    ("copied", "block"),
    [("lora", 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (("qlora", 4), ("dora, head whole", 0)))],
    indirect=["copied"],
)
def test_a_flipped_bit_in_the_frozen_model(copied: Config, block: int) -> None:
    """It lies in the store once for all steps, so all of them are wrong."""
    damage(copied, 4, block, "frozen")
    ended = ratel("verify", copied)
    assert ended.code == 4
    [error] = ended.errors
    assert error.startswith(f"error: step 4, current: block {block}, frozen: elements 0 to ")
    rows = rows_of(ended)
    assert "WRONG: " in rows["step 4, current"] and "WRONG: " in rows["step 2, saved"]
    assert "equal to step" not in ended.stdout


@OF_EACH
def test_an_export_of_another_saved_step(copied: Config) -> None:
    works("export", copied, "--step", 2, "-o", copied.output, "--overwrite")
    ended = works("verify", copied)
    assert rows_of(ended)["weights"].endswith("equal to step 2")
    assert rows_of(ended)["logits"].endswith("equal to those from step 2, bit for bit")


@OF_EACH
def test_an_export_of_no_saved_step(copied: Config) -> None:
    name = next(name for name in sorted(copied.exported) if "layers.1.mlp.up_proj" in name)
    parameter = name.removeprefix("base_model.model.").replace("lora_A", "lora_A.default")

    def change(tensors: Tensors) -> None:
        bits = tensors[name].view(torch.int32 if copied.adapts else torch.int16)
        bits[3, 4] ^= 1

    change_weights(copied, change)
    ended = ratel("verify", copied)
    assert ended.code == 4
    [error] = ended.errors
    assert error.startswith(f"error: {copied.weights_path.name}: {CHECKSUM} (and 1 more")
    assert f"WRONG: {parameter} differs from step 4, and the export equals no" in ended.stdout
    assert "logits" not in rows_of(ended)


@pytest.mark.parametrize(
    ("fault", "copied"), rotating(["nan", "dropped"], WHOLE_OR_ADAPTER, full_pairs=True), indirect=["copied"]
)
def test_an_export_with_wrong_files(copied: Config, fault: str) -> None:
    name = max(copied.exported)

    def change(tensors: Tensors) -> None:
        if fault == "nan":
            tensors[name].view(-1)[5] = float("nan")
        else:
            del tensors[name]

    change_weights(copied, change)
    ended = ratel("verify", copied)
    assert ended.code == 4
    row = copied.weights_path.name if fault == "nan" else library_of(copied)
    found = f"tensor {name} {'has values that are NaN or infinite' if fault == 'nan' else 'is missing'}"
    assert found in rows_of(ended)[row]
    assert ended.errors[0].startswith(f"error: {copied.weights_path.name}: ")
    assert rows_of(ended)["step 4, current"].endswith("whole")
    alone = ratel("verify", shutil.copytree(copied.output, copied.parent / "alone", ignore=lambda *_: ["run"]))
    assert alone.code == 4
    assert found in rows_of(alone)[row]


@pytest.mark.parametrize("what", thinned(WHOLE_OR_ADAPTER, every=3))
def test_a_flipped_bit_in_a_copied_export(saved_of: OfEach, tmp_path: Path, what: str) -> None:
    """All values stay finite, and no store is there to compare them with: only the checksum knows."""
    saved = saved_of(what)
    weights = saved.weights_path.name
    copy = Path(shutil.copytree(saved.output, tmp_path / "copy", ignore=lambda *_: ["run"]))
    whole = works("verify", copy)
    assert rows_of(whole)[weights].endswith("whole, every value finite")
    assert rows_of(whole)["other files"].endswith("whole")
    data = bytearray((copy / weights).read_bytes())
    data[-7] ^= 1
    (copy / weights).write_bytes(data)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    ended = ratel("verify", copy)
    assert ended.code == 4
    assert ended.errors == [f"error: {weights}: {CHECKSUM}"]
    assert rows_of(ended)["other files"].endswith("changed or removed since the export: tokenizer.json")


@pytest.mark.parametrize(
    ("content", "is_changed", "verdict"),
    [
        ("other", True, "differs from the run's"),  # the user may have done it
        ("other", False, "WRONG: differs from the run's"),
        pytest.param("{", True, "no usable tokenizer", marks=pytest.mark.full),
    ],
)
def test_a_tokenizer_that_is_not_the_runs(copied: Config, content: str, is_changed: bool, verdict: str) -> None:
    """One that has lost a file, or was changed later, which the marker knows."""
    path, marker = copied.output / "tokenizer.json", copied.output / "ratel.files"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(values) if content == "other" else content)
    if not is_changed:
        known = json.loads(marker.read_text())
        known["files"] = [row for row in known["files"] if row["name"] != path.name]
        marker.write_text(json.dumps(known))
    ended = ratel("verify", copied)
    assert verdict in rows_of(ended)["tokenizer"]
    assert ended.code == (0 if verdict == "differs from the run's" else 4)
    assert rows_of(ended)["logits"].endswith("bit for bit")


def test_a_model_that_no_export_wrote_is_not_called_whole(base: Path) -> None:
    ended = works("verify", base)
    assert list(rows_of(ended)) == [WEIGHTS, "transformers"]
    assert "loads: LlamaForCausalLM" in rows_of(ended)["transformers"]
    assert rows_of(ended)[WEIGHTS].endswith("every value finite; there is no checksum to compare it with")
    assert "whole" not in ended.stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("num_bytes", "copied"), rotating([0, 5, -4], WHOLE_OR_ADAPTER[:2], full_pairs=True), indirect=["copied"]
)
def test_an_export_that_is_cut_short(copied: Config, num_bytes: int) -> None:
    path = copied.weights_path
    path.write_bytes(path.read_bytes()[:num_bytes])
    ended = ratel("verify", copied)
    assert ended.code == 4
    rows = rows_of(ended)
    for row in (copied.weights_path.name, library_of(copied), "weights"):
        assert "WRONG" in rows[row]
    assert ended.errors[0].endswith("(and 2 more, see above)")


@OF_EACH
def test_a_run_without_an_export(copied: Config) -> None:
    copied.weights_path.unlink()
    ended = works("verify", copied)
    assert list(rows_of(ended)) == ["step 4, current", "step 2, saved"]
    assert "there is no export in" in ended.stderr


@OF_EACH
def test_an_export_whose_store_was_deleted(copied: Config) -> None:
    shutil.rmtree(copied.store.parent)
    ended = works("verify", copied.output)
    assert "there is no store in" in ended.stderr
    assert list(rows_of(ended)) == [copied.weights_path.name, "other files", library_of(copied)]
    by_config = ratel("verify", copied)
    assert (by_config.code, "there is no store in" in by_config.errors[0]) == (2, True)


def test_directories_that_are_neither_run_nor_model(tmp_path: Path, saved: Config) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(saved.read_text() + "\nseeed: 1\n")
    for path, part in (
        ("empty", "neither a run's output directory nor a model"),
        ("half", "neither a run's output directory nor a model"),
        ("none", "no such file"),
        ("run.yaml", "unknown key `seeed`"),
    ):
        ended = ratel("verify", tmp_path / path)
        assert (ended.code, ended.stdout) == (2, "")
        assert part in ended.errors[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("call", [1, 20])
def test_a_signal(saved: Config, signal_at: SignalAt, call: int, number: int, code: int) -> None:
    signal_at(call, number)
    ended = ratel("verify", saved)
    assert (ended.code, ended.stdout) == (code, "")
    assert ended.stderr.splitlines()[-1] == "Stopped. Run the same command again."
