"""The log-probabilities that the reference model gives to the answers of samples: what they are, and their file.

The file has those of several sets of samples, for training and for evaluation, each with a key of its own: one set may
change without the other.

Invariant: a file with its final name is whole, and what it has of a set is used only for the model, the samples and the
settings that it was made for. What it lacks is NaN.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ratel_cli.io.files import replace_file
from ratel_cli.json_fields import JsonFields

_FORMAT_VERSION = 1
_DTYPE = np.dtype("<f4")
LogProbabilities = npt.NDArray[np.float32]
"""`[samples, 2]`: of both rows of each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The log-probabilities that the reference model gives to the samples of a set."""

    values: LogProbabilities | None
    """None: there is no reference model, or it has not computed yet."""

    def of(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """The log-probabilities of the rows of a micro-batch, fp32 `[rows]`. `places`: where its samples are in the
        set."""
        if self.values is None:
            return torch.full((2 * len(places),), torch.nan)
        return torch.from_numpy(self.values[places].T.reshape(-1).copy())


NO_REFERENCE = Reference(None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceOfSet:
    """The log-probabilities of one set of samples, as the file has them."""

    key: str
    """A hash of what decides them. Weights have a hash of their own (`ReferenceFile.weights`)."""
    values: LogProbabilities


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceFile:
    """What the file has."""

    weights: str | None
    """A hash of the files with the weights that they were computed with; None: of no files."""
    sets: tuple[ReferenceOfSet, ...]

    def values_of(self, key: str, num_samples: int) -> LogProbabilities | None:
        """The log-probabilities of the set with this key and number of samples; None if the file has no such set."""
        found = (each.values for each in self.sets if each.key == key and len(each.values) == num_samples)
        return next(found, None)


def read_reference(path: Path) -> ReferenceFile | None:
    """What the file has, without what is damaged; None if there is no such file, or nothing in it can be read."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
        facts = JsonFields(json.loads(head))
        if facts.integer("format_version") != _FORMAT_VERSION:
            return None
        sets, start = [], 0
        for each in map(JsonFields, facts.items("sets")):
            stop = start + each.integer("samples") * 2 * _DTYPE.itemsize
            part, start = content[start:stop], stop
            if hashlib.sha256(part).hexdigest() == each.text("sha256"):
                values = np.frombuffer(part, _DTYPE).astype(np.float32).reshape(-1, 2)
                sets.append(ReferenceOfSet(key=each.text("key"), values=values))
        weights = None if facts.value("weights") is None else facts.text("weights")
        return ReferenceFile(weights=weights, sets=tuple(sets))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def write_reference(path: Path, weights: str | None, sets: Sequence[ReferenceOfSet]) -> None:
    """Write them whole and durably. Raises OSError."""
    parts = [each.values.astype(_DTYPE).tobytes() for each in sets]
    facts = {
        "format_version": _FORMAT_VERSION,
        "weights": weights,
        "sets": [
            {"key": each.key, "samples": len(each.values), "sha256": hashlib.sha256(part).hexdigest()}
            for each, part in zip(sets, parts, strict=True)
        ],
    }
    replace_file(path, json.dumps(facts).encode() + b"\n" + b"".join(parts))
