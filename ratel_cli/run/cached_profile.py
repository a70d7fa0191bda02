"""What an earlier run recorded of a model's operators, in `run/model.json` of its output directory.

Nothing heavy is imported.

Invariant: a profile that comes from here was recorded with these layers and this batch, on this machine.
"""

from __future__ import annotations

import json

from ratel_cli.config.schema import RunConfig
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.json_fields import hash_of
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.run.run_directory import run_directory


class CachedProfile:
    """The profile in the directory of one run."""

    def __init__(self, config: RunConfig, spec: ModelSpec, hardware: HardwareProfile) -> None:
        self.path = run_directory(config.output_dir) / "model.json"
        shapes = [(parameter.name, parameter.shape) for block in spec.blocks for parameter in block.parameters]
        values = [shapes, config.dtype, config.attn_implementation, config.micro_batch_size, config.sequence_len]
        machine = [hardware.gpu.name, hardware.host.num_cores, config.deterministic]
        self._made_for = hash_of([values, machine])

    def read(self) -> ModelProfile | None:
        """The profile; None if there is none, if it was made for something else, or if it cannot be read."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))["profile"]
            if content["made_for"] != self._made_for:
                return None
            return ModelProfile.from_json(content)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def content(self, spec: ModelSpec, profile: ModelProfile | None) -> dict[str, object]:
        """The content of the file, with `profile` if there is one."""
        recorded = {} if profile is None else {"profile": {"made_for": self._made_for, **profile.to_json()}}
        return {**spec.to_json(), **recorded}
