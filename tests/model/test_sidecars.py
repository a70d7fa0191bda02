"""The files of an export beside its weights: whatever a tokenizer is made of is among them, and is opened with care."""

from __future__ import annotations

from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedTokenizerBase

from ratel_cli.errors import BadInput
from ratel_cli.model.export.sidecars import BaseSidecars, TokenizerFiles
from ratel_cli.model.files import directory
from ratel_cli.model.files.directory import check_sidecars
from tests.model.test_export_weights import in_store


def files_of_tokenizers() -> dict[str, set[str]]:
    """By the name of a class of the installed transformers: the files that its tokenizers are made of."""
    found: dict[str, set[str]] = {}
    for name in dir(transformers):
        with suppress(ImportError):  # a class whose package is not installed
            made = getattr(transformers, name) if "Tokenizer" in name else None
            if isinstance(made, type) and issubclass(made, PreTrainedTokenizerBase):
                found[name] = set(made.vocab_files_names.values())
    return found


@pytest.mark.full
def test_every_file_of_every_tokenizer_is_exported(tmp_path: Path) -> None:
    """Those of the classes of today by their names; those of other classes, as they name them."""
    table = files_of_tokenizers()
    assert len(table) > 80 and {"spm.model", "source.spm", "emoji.json"} < {*set().union(*table.values())}
    names = {*set().union(*table.values()), "tokenizer_config.json"}
    with in_store(tmp_path, "llama") as exported:
        for name in (*names, "words.of-tomorrow", "notes.of-mine"):
            (exported.base / name).write_text(f'{{"of": "{name}"}}')
        tokenizer = TokenizerFiles(names=("words.of-tomorrow", "not-there"))
        exported.export(tmp_path / "out", tokenizer=lambda: tokenizer)
        written = {path.name for path in (tmp_path / "out").iterdir()}
        for made, files in table.items():
            assert files <= written, f"{made} has no {files - written} in its export"
        for name in (*names, "words.of-tomorrow"):
            assert (tmp_path / "out" / name).read_bytes() == (exported.base / name).read_bytes()
        assert "notes.of-mine" not in written
        assert names <= {*BaseSidecars(base_dir=exported.base).names}, "they are known before the export"


@pytest.mark.full
def test_every_file_of_every_tokenizer_is_downloaded_and_trusted(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("{}")
    for number, name in enumerate(sorted({*set().union(*files_of_tokenizers().values())})):
        base = tmp_path / str(number)
        base.mkdir()
        (base / "config.json").write_text("{}")
        check_sidecars(base)
        (base / name).symlink_to(tmp_path / "outside")
        with pytest.raises(BadInput, match="is a link to a file outside the model's directory"):
            check_sidecars(base)
        assert any(fnmatch(name, pattern) for pattern in directory._DOWNLOADED), name
