"""The log-probabilities that the reference model gives to the answers of samples: what they are, and their file.

Invariant: a file with its final name is whole, and is used only for the model, the samples and the settings that it was
made for. What it lacks is NaN.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ratel_cli.io.files import sync_path

_FORMAT_VERSION = 1
_DTYPE = np.dtype("<f4")
LogProbabilities = npt.NDArray[np.float32]
"""`[samples, 2]`: of both rows of each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Those of one cache's samples."""

    values: LogProbabilities | None
    """None: there is no reference model, or it has not computed yet."""

    def of(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """Those of the rows of a micro-batch with these samples, fp32 `[rows]`."""
        if self.values is None:
            return torch.full((2 * len(numbers),), torch.nan)
        return torch.from_numpy(self.values[numbers].T.reshape(-1).copy())


NO_REFERENCE = Reference(None)


def read_reference(path: Path, key: str, shapes: tuple[int, int]) -> tuple[LogProbabilities, LogProbabilities] | None:
    """Those of the samples for training and for evaluation, `shapes` samples each; None if there is no such file, or if
    it is damaged or was made for something else, which `key` names."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        expected = {"format_version": _FORMAT_VERSION, "key": key, "samples": list(shapes)}
        if facts != {**expected, "sha256": hashlib.sha256(content).hexdigest()}:
            return None
        values = np.frombuffer(content, _DTYPE).astype(np.float32).reshape(-1, 2)
        return (values[: shapes[0]], values[shapes[0] :]) if len(values) == sum(shapes) else None
    except (OSError, ValueError, RecursionError):
        return None


def write_reference(path: Path, key: str, train: LogProbabilities, evaluation: LogProbabilities) -> None:
    """Write them durably: 1. into another file, 2. which gets the name. Raises OSError."""
    content = np.concatenate([train, evaluation]).astype(_DTYPE).tobytes()
    facts = {
        "format_version": _FORMAT_VERSION,
        "key": key,
        "samples": [len(train), len(evaluation)],
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(json.dumps(facts).encode() + b"\n" + content)
    sync_path(partial)
    os.replace(partial, path)
    sync_path(path.parent)
