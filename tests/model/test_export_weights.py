"""The exported directory: transformers loads it, and a failed export leaves the old one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.export.card import plain_card
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.export.export_layout import (
    ExportLayout,
    LaidOutTensor,
    layout_of_model,
    split_into_shards,
    whole_parameter,
)
from ratel_cli.model.export.export_weights import ExportFiles, export_model
from ratel_cli.model.export.sidecars import BaseSidecars, TokenizerFiles
from ratel_cli.model.export.staging import Destination
from ratel_cli.model.files.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.files.marker import (
    MARKER_NAME,
    Marker,
    check_output,
    files_of_others,
    is_unchanged,
    read_marker,
    write_marker,
    written_file,
)
from ratel_cli.model.files.shards import ShardReader, file_bytes
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.store import Store
from ratel_cli.units import MIB
from tests.model.tiny import (
    FAMILIES,
    Tensors,
    assert_same,
    file_size_limit,
    import_all,
    imported_store,
    reference,
    rewrite,
    save_tiny,
    skeleton_of,
)
from tests.tiers import rotating, thinned

SHARD_BYTES = 60_000


class Exported:
    """A base model, and a store that holds its weights."""

    def __init__(self, base: Path, skeleton: PreTrainedModel, spec: ModelSpec, store: Store, pool: BufferPool) -> None:
        self.base, self.skeleton, self.spec, self.store, self.pool = base, skeleton, spec, store, pool

    def layout(self, dtype: DtypeName, max_shard_bytes: int) -> ExportLayout:
        return layout_of_model(self.skeleton, self.spec, dtype, max_shard_bytes=max_shard_bytes)

    def export(
        self,
        output: Path,
        *,
        dtype: DtypeName = "float32",
        max_shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
        layout: ExportLayout | None = None,
        tokenizer: Callable[[], TokenizerFiles] = TokenizerFiles,
    ) -> None:
        """Without a `layout`, one of this size that no files of the base decide."""
        sidecars = BaseSidecars(base_dir=self.base, tokenizer=tokenizer)
        export_model(
            self.spec,
            self.store.current(),
            self.pool,
            ExportFiles(layout or self.layout(dtype, max_shard_bytes), sidecars),
            Destination(directory=output, run="/runs/a", overwrite=overwrite),
            dtype=dtype,
            card=plain_card(self.spec),
            group_elements=4096,
        )


@contextmanager
def in_store(
    tmp_path: Path,
    family: str,
    dtype: DtypeName = "float32",
    *,
    rewritten: Callable[[Tensors], object] | None = None,
    **changes: object,
) -> Iterator[Exported]:
    """`rewritten`: changes the base model's tensors."""
    base = tmp_path / "base"
    save_tiny(family, base, **changes)
    if rewritten is not None:
        rewrite(base, rewritten)
    skeleton, spec = skeleton_of(base)
    with CheckpointSource(base, skeleton, spec) as source:
        install_buffers(skeleton, source.read_buffers())
        with imported_store(tmp_path / "store", spec, source) as (store, pool):
            yield Exported(base, skeleton, spec, store, pool)


def load(directory: Path, **options: object) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, **options)
    return model


def state_of(model: PreTrainedModel) -> Tensors:
    return dict(model.state_dict())


@pytest.mark.parametrize("family", thinned(list(FAMILIES), every=3, full_every=2))
def test_transformers_loads_the_same_weights(tmp_path: Path, family: str) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, family) as exported:
        exported.export(output)
    base, found = load(tmp_path / "base"), load(output)
    assert type(found) is type(base) and found.dtype == torch.float32
    assert found.config.tie_word_embeddings == base.config.tie_word_embeddings
    wanted, state = state_of(base), state_of(found)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert_same(import_all(output), reference(tmp_path / "base"))


@pytest.mark.parametrize(("store_dtype", "dtype"), rotating(list(DTYPES), list(DTYPES), offset=1))
def test_every_dtype_of_every_layout(tmp_path: Path, store_dtype: DtypeName, dtype: DtypeName) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "mixtral", store_dtype) as exported:
        exported.export(output, dtype=dtype)
    assert json.loads((output / "config.json").read_text())["dtype"] == dtype
    found = load(output)
    assert found.dtype == DTYPES[dtype]
    wanted = reference(tmp_path / "base")
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted[name].to(DTYPES[dtype])), name


@pytest.mark.parametrize(("tied", "names"), [(True, 1), (False, 2)])
def test_a_tied_weight_is_written_once(tmp_path: Path, tied: bool, names: int) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "gpt2", tie_word_embeddings=tied) as exported:
        exported.export(output, max_shard_bytes=10**9)
    written = load_file(output / WEIGHTS_NAME)
    assert len({"transformer.wte.weight", "lm_head.weight"} & set(written)) == names
    model = load(output)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied  # type: ignore[no-untyped-call]
    assert_same(import_all(output), reference(tmp_path / "base"))


def test_shards_and_index(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        exported.export(output)
        num_parameters = exported.spec.num_parameters
    index = json.loads((output / INDEX_NAME).read_text())
    shards = sorted(path.name for path in output.glob("*.safetensors"))
    assert shards == [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    assert index["metadata"] == {"total_parameters": num_parameters, "total_size": 4 * num_parameters}
    for name in shards:
        assert (output / name).stat().st_size <= SHARD_BYTES
        with safe_open(output / name, "pt") as file, ShardReader(output / name) as reader:
            assert file.metadata() == {"format": "pt"}
            assert set(reader.tensors) == {tensor for tensor, shard in index["weight_map"].items() if shard == name}


def test_sidecars(tmp_path: Path) -> None:
    output, base = tmp_path / "out", tmp_path / "base"
    with in_store(tmp_path, "llama") as exported:
        make_tokenizer().save_pretrained(base)
        (base / "LICENSE").write_text("be good")
        (base / "code.py").write_text("raise SystemExit")
        (base / "pytorch_model.bin").write_bytes(b"pickle")
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
        GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(base)  # type: ignore[no-untyped-call]
        config = json.loads((base / "config.json").read_text())
        config |= {"auto_map": {"AutoConfig": "code.C"}, "torch_dtype": "float16", "unknown_key": [1]}
        (base / "config.json").write_text(json.dumps(config))
        exported.export(output, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("a b").input_ids == [0, 1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<user>a"
    assert GenerationConfig.from_pretrained(output).temperature == 0.25
    assert (output / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert (output / "LICENSE").read_text() == "be good"
    assert not (output / "code.py").exists() and not (output / "pytorch_model.bin").exists()
    written = json.loads((output / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and written["unknown_key"] == [1]
    assert "torch_dtype" not in written and "auto_map" not in written
    card = (output / "README.md").read_text()
    assert "LlamaForCausalLM" in card and "3 optimizer updates" in card and str(tmp_path) not in card


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return tokenizer


def test_generation_defaults_where_the_base_has_none(tmp_path: Path) -> None:
    with in_store(tmp_path, "llama") as exported:
        (exported.base / "generation_config.json").unlink()
        exported.export(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


def test_an_earlier_export_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        exported.export(output, max_shard_bytes=30_000)
        many = len(list(output.glob("*.safetensors")))
        (output / "run").mkdir()
        (output / "run" / "metrics.jsonl").write_text("{}\n")
        (output / "notes.txt").write_text("mine")
        for max_shard_bytes, number in ((10**9, 1), (60_000, None), (10**9, 1)):
            exported.export(output, max_shard_bytes=max_shard_bytes)
            shards = list(output.glob("*.safetensors"))
            assert len(shards) == number if number else 1 < len(shards) < many
            assert (output / INDEX_NAME).exists() == (number is None)
            assert_same(import_all(output), reference(exported.base))
    assert (output / "run" / "metrics.jsonl").read_text() == "{}\n" and (output / "notes.txt").read_text() == "mine"
    assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_into_the_directory_of_the_base_model(tmp_path: Path) -> None:
    with in_store(tmp_path, "mixtral", "bfloat16") as exported:
        wanted = reference(exported.base)
        exported.export(exported.base, dtype="float32", overwrite=True)
        assert_same(import_all(exported.base), wanted)


@pytest.mark.parametrize("max_shard_bytes", [10**9, SHARD_BYTES])
def test_the_space_of_an_export_is_known_before(tmp_path: Path, max_shard_bytes: int) -> None:
    """The weights and their index to the byte; the small files take at most what is counted for them."""
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        (exported.base / "tokenizer.json").write_text(" " * 5_000_000)
        layout = exported.layout("bfloat16", max_shard_bytes)
        exported.export(output, dtype="bfloat16", max_shard_bytes=max_shard_bytes)
        needed = ExportFiles(layout, BaseSidecars(base_dir=exported.base)).num_bytes
    sizes = {path.name: path.stat().st_size for path in output.iterdir()}
    assert layout.num_bytes == sum(sizes[name] for name in layout.file_names)
    assert sum(sizes.values()) <= needed <= sum(sizes.values()) + 2 * MIB


def test_too_little_space_is_found_before_the_first_byte(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        content = whole_parameter("model.norm.weight", (1 << 50,))
        tensor = LaidOutTensor(name="e", dtype=torch.float32, shape=(1 << 50,), content=content)
        layout = ExportLayout(shards=split_into_shards([tensor], 1), architecture="X", dtype="float32")
        with pytest.raises(EnvironmentFailure, match=r"the export needs 4096 TiB, .* available"):
            exported.export(output, layout=layout)
    assert not output.exists()


@pytest.mark.parametrize("limit_bytes", [1, 5_000, 30_000])
def test_a_drive_that_fills_up_during_the_export(tmp_path: Path, limit_bytes: int) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        exported.export(output, max_shard_bytes=40_000)
        before = {path.name: path.read_bytes() for path in output.iterdir()}
        with pytest.raises(EnvironmentFailure, match="no space left"), file_size_limit(limit_bytes):
            exported.export(output, dtype="bfloat16", max_shard_bytes=60_000)
        assert {path.name: path.read_bytes() for path in output.iterdir()} == before
        exported.export(output, max_shard_bytes=60_000)
    assert_same(import_all(output), reference(tmp_path / "base"))


@pytest.mark.parametrize("name", ["README.md", WEIGHTS_NAME, INDEX_NAME, "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("is_marked", [False, True])
def test_files_of_the_users_stay(tmp_path: Path, name: str, is_marked: bool) -> None:
    output = tmp_path / "out"
    with in_store(tmp_path, "llama") as exported:
        if is_marked:
            exported.export(output, max_shard_bytes=10**9)
        output.mkdir(exist_ok=True)
        (output / name).write_bytes(b"mine")
        before = {path.name: path.read_bytes() for path in output.iterdir()}
        if is_marked and "-of-" in name:  # no name of the export, and nothing that changes what is loaded
            exported.export(output, max_shard_bytes=10**9)
            assert {path.name for path in output.iterdir()} == before.keys()
        else:
            wanted = name if is_marked else "has files in it, and Ratel did not make it"
            with pytest.raises(BadInput, match=wanted):
                exported.export(output, max_shard_bytes=10**9)
            assert {path.name: path.read_bytes() for path in output.iterdir()} == before
        assert (output / name).read_bytes() == b"mine"
        exported.export(output, max_shard_bytes=10**9, overwrite=True)
        assert_same(import_all(output), reference(exported.base))


@pytest.mark.parametrize("size", [1, 4096, 65 << 20])
def test_the_marker_knows_a_changed_file(tmp_path: Path, size: int) -> None:
    """Also one with the size of the earlier file; a large file is read if it has another time."""
    (tmp_path / "a").write_bytes(bytes(size))
    entry = written_file(tmp_path, "a")
    write_marker(tmp_path, Marker(run="/r", is_run=True, step=3, files=(entry,)))
    marker = read_marker(tmp_path)
    assert marker == Marker(run="/r", is_run=True, step=3, files=(entry,))
    assert files_of_others(tmp_path, ["a", "b"]) == []
    os.utime(tmp_path / "a", ns=(0, 0))
    assert is_unchanged(tmp_path, entry)
    with (tmp_path / "a").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"x")
    assert not is_unchanged(tmp_path, entry)
    assert files_of_others(tmp_path, ["a", "b"]) == ["a"]
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").symlink_to("b")
    assert files_of_others(tmp_path, ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format_version": 2, "run": "r", "step": null, "files": []}']
    + [
        '{"format_version": 2, "run": "r", "is_run": true, "step": null, "files": '
        f'[{{"name": "{name}", "num_bytes": 1, "modified_ns": 1, "xxh3_128": ""}}]}}'
        for name in ("../a", "/a", "a/../../b", "")
    ],
)
def test_a_marker_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER_NAME).write_text(text)
    assert read_marker(tmp_path) is None
    with pytest.raises(BadInput, match="Ratel did not make it"):
        check_output(tmp_path, overwrite=False, option="-o")


def test_a_folder_of_the_users_in_the_way(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with in_store(tmp_path, "llama") as exported:
        folder = exported.base / "additional_chat_templates"
        folder.mkdir()
        (folder / "tools.jinja").write_text("{{ tools }}")
        exported.export(output)
        exported.export(output)
        (output / folder.name / "tools.jinja").unlink()
        (output / folder.name).rmdir()
        (output / folder.name).symlink_to(elsewhere)
        with pytest.raises(BadInput, match=r"tools\.jinja would be replaced"):
            exported.export(output)
        (output / "README.md").unlink()
        (output / "README.md").mkdir()
        with pytest.raises(BadInput, match=r"README\.md is a directory"):
            exported.export(output, overwrite=True)
    assert list(elsewhere.iterdir()) == []


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with in_store(tmp_path, "llama") as exported, pytest.raises(BadInput, match="not a directory"):
        exported.export(tmp_path / "out")


def test_memory_is_one_group(tmp_path: Path) -> None:
    with in_store(tmp_path, "llama", "bfloat16") as exported:
        for dtype, bytes_per_element in (("bfloat16", 2), ("float32", 12)):
            with BufferPool(bytes_per_element * 4096) as pool:
                exported.pool = pool
                exported.export(tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
                assert pool.leased_bytes == 0


@pytest.mark.parametrize("limit", [1, 500, 1000, 1 << 20])
def test_shard_sizes(limit: int) -> None:
    tensors = [
        LaidOutTensor(name=f"t{at}", dtype=torch.float32, shape=(at, 10), content=whole_parameter("p", (at, 10)))
        for at in range(20)
    ]
    shards = split_into_shards(tensors, limit)
    assert [tensor for shard in shards for tensor in shard.tensors] == tensors
    for shard in shards:
        assert shard.tensors and (len(shard.tensors) == 1 or file_bytes(shard.tensors) <= limit)
    assert len({shard.file_name for shard in shards}) == len(shards)


def test_every_file_is_on_the_drive_before_the_marker_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not leave empty files that the marker lists with the hashes of full ones."""
    output, synced, moved = tmp_path / "out", set[int](), list[Path]()
    fsync, replace_file = os.fsync, os.replace
    late: list[str] = []

    def note_sync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def note_move(source: Path, destination: Path) -> None:
        if destination.name != MARKER_NAME:
            moved.append(destination)
            synced.discard(destination.parent.stat().st_ino)
        elif moved:
            late.extend(str(path) for path in moved if path.stat().st_ino not in synced)
            late.extend(str(path.parent) for path in moved if path.parent.stat().st_ino not in synced)
        replace_file(source, destination)

    with in_store(tmp_path, "llama") as exported:
        (exported.base / "tokenizer.json").write_text("{}")
        (exported.base / "additional_chat_templates").mkdir()
        (exported.base / "additional_chat_templates" / "other.jinja").write_text("{{ messages }}")
        monkeypatch.setattr(os, "fsync", note_sync)
        monkeypatch.setattr(os, "replace", note_move)
        exported.export(output)
    assert {path.name for path in moved} >= {"tokenizer.json", "other.jinja", INDEX_NAME}
    assert not late
