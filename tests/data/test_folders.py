"""Directories: the files of a split are those that `datasets` reads, and what is not read is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import pytest
from datasets.data_files import FILES_TO_IGNORE  # type: ignore[import-untyped]

from ratel_cli.data.text.rows import _NOT_DATA, DatasetSource, Row, open_source
from ratel_cli.errors import BadInput
from tests.data.conftest import Load
from tests.tiers import thinned

LAYOUTS: Mapping[str, str] = {
    "names of files": "train-0.jsonl train-1.jsonl test-0.jsonl notes.jsonl",
    "names of directories": "train/b.jsonl train/sub/a.jsonl testing/c.jsonl my-dev/d.jsonl",
    "both": "train/test-0.jsonl val/train-0.jsonl",
    "several names of a split": "eval.jsonl test.jsonl training.jsonl valid.jsonl dev.jsonl",
    "shards of the hub": "data/train-00001-of-00002.csv data/train-00000-of-00002.csv data/test-00000-of-00001.csv",
    "shards of other splits": "data/train_sft-00000-of-00001.jsonl data/test_sft-00000-of-00001.jsonl other.jsonl",
    "no splits": "b.jsonl a-b/c.jsonl a/d.jsonl latest.jsonl attest-0.jsonl",
    "two kinds of the same rows": "rows.jsonl rows.parquet",
    "two kinds of which one has more files": "a.jsonl b.json c.parquet",
    "texts beside rows": "a.jsonl LICENSE.txt",
    "a test file alone": "my-test-set.jsonl b.jsonl",
    "compressed files": "train.jsonl.gz test.jsonl.gz train.csv.gz",
    "files that are not rows": "a.jsonl config.json dataset_info.json __MACOSX/b.jsonl .git/c.jsonl __d.jsonl",
}
CARDS: Mapping[str, tuple[str, str]] = {
    "one configuration": (
        "a.jsonl b.jsonl c.jsonl",
        "- config_name: main\n  data_files: [{split: train, path: [b.jsonl, ./a.jsonl]}, {split: test, path: c*}]",
    ),
    "patterns without splits": ("en/a.jsonl en/b.jsonl de/c.jsonl", "- config_name: default\n  data_files: en/*"),
    "a list of patterns": ("en/a.jsonl de/c.jsonl", "- config_name: default\n  data_files: [en/*, '**/c.jsonl']"),
    "a default configuration": (
        "en/a.jsonl de/b.jsonl",
        "- config_name: en\n  data_files: en/*\n- config_name: de\n  data_files: de/*\n  default: True",
    ),
    "a directory": (
        "en/train.jsonl en/test.jsonl de/train.jsonl",
        "- config_name: en\n  data_dir: en\n- config_name: default\n  data_dir: de",
    ),
}
SPLITS = ("train", "test", "validation", "train_sft", "test_sft")


def _made(root: Path, names: str, configs: str | None = None) -> Path:
    for name in names.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'{{"text": "{name}"}}\n')
    if configs is not None:
        (root / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}\n---\n# Title\n\n---\n")
    return root


def _in_datasets(root: Path, cache: Path, name: str | None = None) -> dict[str, list[str]]:
    found = datasets.load_dataset_builder(str(root), name, cache_dir=str(cache)).config.data_files
    return {
        str(split): [Path(path).relative_to(root.resolve()).as_posix() for path in files]
        for split, files in found.items()
    }


def _read(root: Path, notices: list[str], split: str = "train", name: str | None = None) -> list[str]:
    source = open_source(DatasetSource(path=str(root), split=split, name=name), notice=notices.append)
    return [stamp.path.relative_to(root).as_posix() for stamp in source.files]


def _check(root: Path, cache: Path, notices: list[str], name: str | None = None) -> None:
    expected = _in_datasets(root, cache, name)
    for split in SPLITS:
        if split not in expected:
            with pytest.raises(BadInput, match=f"there is no split '{split}'; it has: ") as caught:
                _read(root, notices, split, name)
            assert {*caught.value.message.rpartition("; it has: ")[2].split(", ")} == {*expected}
            continue
        notices.clear()
        assert _read(root, notices, split, name) == expected[split]
        names = {path.relative_to(root).as_posix() for path in root.rglob("*.*") if path.is_file()}
        ignored = {name for name in names if name in FILES_TO_IGNORE or name.startswith((".git/", "__MACOSX/"))}
        told = {each for notice in notices for each in notice.partition("not read: ")[2].split(", ")} - {""}
        assert told == names - ignored - {*expected[split]}


@pytest.mark.parametrize("layout", thinned(list(LAYOUTS), every=2))
def test_a_directory_has_the_splits_that_datasets_finds(tmp_path: Path, notices: list[str], layout: str) -> None:
    _check(_made(tmp_path / "data", LAYOUTS[layout]), tmp_path / "cache", notices)


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("one configuration", None),
        ("one configuration", "main"),
        ("patterns without splits", None),
        ("a list of patterns", None),
        ("a default configuration", None),
        ("a default configuration", "en"),
        ("a directory", None),
        ("a directory", "en"),
    ],
)
def test_a_card_names_files_as_in_datasets(tmp_path: Path, notices: list[str], card: str, name: str | None) -> None:
    _check(_made(tmp_path / "data", *CARDS[card]), tmp_path / "cache", notices, name)


@pytest.mark.parametrize("end", ["", "\n", "\n# Title\n"])
def test_a_card_may_end_with_its_names(tmp_path: Path, notices: list[str], end: str) -> None:
    """Also without a line end."""
    root = _made(tmp_path / "data", "a.jsonl b.jsonl")
    files = "  - split: train\n    path: a.jsonl\n  - split: test\n    path: b.jsonl"
    (root / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}\n---{end}")
    _check(root, tmp_path / "cache", notices)


@pytest.mark.parametrize(
    ("configs", "name", "message", "hint"),
    [
        (None, "en", "it has no configuration 'en'", "one of: default"),
        (CARDS["a default configuration"][1], "fr", "it has no configuration 'fr'", "one of: en, de"),
        (
            CARDS["a directory"][1].replace("default", "de"),
            None,
            "several configurations and no default",
            "one of: en, de",
        ),
    ],
)
def test_configurations_that_are_not_there(
    tmp_path: Path, configs: str | None, name: str | None, message: str, hint: str
) -> None:
    root = _made(tmp_path / "data", "en/a.jsonl de/b.jsonl", configs)
    with pytest.raises(ValueError, match=r"not found|missing"):
        _in_datasets(root, tmp_path / "cache", name)
    with pytest.raises(BadInput, match=message) as caught:
        _read(root, [], name=name)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "path",
    ["https://example.org/a.jsonl", "hf://datasets/o/n/a.jsonl", "../outside.jsonl", "/etc/hosts", "missing-*"],
)
def test_a_card_reads_nothing_outside_its_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside.jsonl").write_text('{"text": "x"}\n')
    root = _made(tmp_path / "data", "a.jsonl", f"- config_name: default\n  data_files: {path}")
    with pytest.raises(BadInput, match="there is no split 'train'; it has: no split"):
        _read(root, [])


_BOMB = "\n".join(["  a0: &a0 {k: v}", *(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])


@pytest.mark.parametrize(
    "configs",
    [
        "- main",
        "- config_name: [x]",
        "- config_name: x\n  data_files: [[a.jsonl]]",
        "- config_name: x\n  data_files: [{split: train}]",
        "- config_name: x\n  data_files: data**",
        "- config_name: x\n  data_files: &a [*a]",
        "- config_name: 'x",
        "- [" * 2000,
        f"- config_name: x\n{_BOMB}\n  data_files: *a29",
    ],
)
def test_a_malformed_card(tmp_path: Path, configs: str) -> None:
    root = _made(tmp_path / "data", "a.jsonl", configs)
    with pytest.raises(BadInput, match=r"README\.md: its `configs` cannot be read: "):
        _read(root, [])


@pytest.mark.parametrize("card", ["", "# Title\n", "---\nlicense: mit\n---\n", "---\n---\n", "---\nconfigs:\n---\n"])
def test_a_card_that_says_nothing_about_files(tmp_path: Path, notices: list[str], card: str) -> None:
    root = _made(tmp_path / "data[1]", "train.jsonl test.jsonl")
    (root / "README.md").write_text(card)
    assert _read(root, notices, name="default") == ["train.jsonl"]


def test_what_datasets_ignores_is_no_data() -> None:
    assert {name for name in FILES_TO_IGNORE if name.endswith(".json")} <= _NOT_DATA


def test_training_and_evaluation_have_their_own_rows(tmp_path: Path, load: Load, notices: list[str]) -> None:
    root = _made(tmp_path / "data", "train-0.jsonl train-1.jsonl test-0.jsonl")
    data = load(DatasetSource(path=str(root)), test_sources=(DatasetSource(path=str(root), split="test"),))
    assert (data.num_samples, data.num_eval_samples) == (2, 1)
    part = open_source(DatasetSource(path=str(root), split="train[50%:]"), notice=notices.append)
    assert [row.record["text"] for row in part.read() if isinstance(row, Row)] == ["train-1.jsonl"]
    assert notices[-1] == f"{root}: split 'train' has 2 of 3 files; these are not read: test-0.jsonl"
