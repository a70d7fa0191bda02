"""What the machine is and which software it has, for `ratel env` and beside what `ratel bench` finds.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ratel_cli.hardware.environment import Environment, describe_environment
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.run.files.user_cache import software_versions

_PACKAGES: Final = (
    "ratel-cli", "torch", "transformers", "tokenizers", "safetensors", "datasets", "huggingface-hub", "numpy",
    "rich", "pydantic", "flash-attn", "mistral-common",
)  # fmt: skip


def environment_of(paths: Sequence[Path]) -> Environment:
    """This machine and its software, with the directories of stores in `paths`."""
    versions = zip(_PACKAGES, software_versions(*_PACKAGES), strict=True)
    return describe_environment(paths, {name: version for name, version in versions if version}, SystemFiles())
