"""Any file and any arguments give a config, or a BadInput that names a place."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.config.load import LoadedConfig, load_config, to_yaml
from ratel_cli.config.others.aliases import SECTIONS
from ratel_cli.errors import BadInput
from tests.config.config_loading import MINIMAL
from tests.json_values import json_values
from tests.tiers import examples

KEYS = sorted({key for model in SECTIONS.values() for key in model.model_fields} | {"lr", "batch_size", "lora_r", "<<"})
VALUES = json_values(
    st.sampled_from(KEYS), st.sampled_from(["auto", "none", "24GiB", "1e-4", "bf16", "~", "alpaca", "/a", "0.5"])
)
FRAGMENTS = st.sampled_from(
    [*KEYS, *"[]{}:,-&*!|>'\"#%@`~=?.\n\t \\", ": ", "\n  ", "&a", "*a", "!!int ", "---\n", "1e-5"]
)
QUICK = examples(60)


def attempt(folder: Path, content: bytes, overrides: list[str]) -> LoadedConfig | None:
    """Load the config. None if it is rejected; then every error must name its place."""
    path = folder / "run.yaml"
    path.write_bytes(content)
    try:
        return load_config(path, overrides)
    except BadInput as exc:
        for error in (exc, *exc.others):
            assert error.message.startswith((f"{path}:", "argument '")), error.message
            assert len(error.message) < len(str(path)) + 600
        return None


@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    attempt(tmp_path, content, [])
    attempt(tmp_path, MINIMAL.encode() + content, [])


@QUICK
@given(pieces=st.lists(FRAGMENTS, max_size=40))
def test_any_text_that_looks_like_yaml(tmp_path: Path, pieces: list[str]) -> None:
    attempt(tmp_path, "".join(pieces).encode(), [])


@pytest.mark.full
@QUICK
@given(data=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_any_values_under_known_keys(tmp_path: Path, data: dict[str, object]) -> None:
    content = yaml.safe_dump({"base_model": "m", "datasets": "d", **data}, allow_unicode=True)
    loaded = attempt(tmp_path, content.encode(), [])
    if loaded is not None:
        again = attempt(tmp_path, to_yaml(loaded.config).encode(), [])
        assert again is not None
        assert again.config == loaded.config


@QUICK
@given(
    overrides=st.lists(
        st.text(max_size=20)
        | st.builds("{}={}".format, st.sampled_from(KEYS), st.text(max_size=12))
        | st.builds("{}.{}={}".format, st.sampled_from(KEYS), st.sampled_from([*KEYS, "0", "1"]), st.text(max_size=8))
        | st.builds("datasets.{}.{}={}".format, st.integers(-1, 2), st.sampled_from(KEYS), st.text(max_size=8)),
        max_size=4,
    )
)
def test_any_overrides(tmp_path: Path, overrides: list[str]) -> None:
    attempt(tmp_path, MINIMAL.encode(), overrides)


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_file_cut_anywhere(tmp_path: Path, cut: int) -> None:
    text = (
        MINIMAL + "storage: {paths: [/a, '/b'], engine: threads}\nlearning_rate: 1e-4\nlimits:\n  gpu_memory: 24GiB\n"
    )
    attempt(tmp_path, text.encode()[:cut], [])


@QUICK
@given(position=st.integers(0, 80), replacement=st.sampled_from(string.printable))
def test_a_file_with_one_wrong_character(tmp_path: Path, position: int, replacement: str) -> None:
    text = MINIMAL + "storage: {paths: [/a, '/b'], engine: threads}\n"
    attempt(tmp_path, (text[:position] + replacement + text[position + 1 :]).encode(), [])
