"""Configs as texts, loaded as a command loads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.load import LoadedConfig, load_config
from ratel_cli.errors import BadInput
from tests.config.config_loading import Complain, Load


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a text as run.yaml, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str) -> LoadedConfig:
        path = Path("run.yaml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, overrides)

    return load_text


@pytest.fixture
def complain(load: Load) -> Complain:
    """Loads a text that must not load. Gives every error, as `error | hint` if it has a hint."""

    def load_wrong(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(BadInput) as caught:
            load(text, *overrides)
        found = (caught.value, *caught.value.others)
        return [each.message if each.hint is None else f"{each.message} | {each.hint}" for each in found]

    return load_wrong
