"""Files with latents as one set: found, checked, and read a few samples at a time.

Invariant: when `open_latents` returns, every label, and the shape of every latent, has been checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ratel_cli.data.batches.latent_formats import FORMATS, LatentReader, LatentShape, reader_of
from ratel_cli.data.samples.packing import Integers
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.progress import no_progress

_HASHED_BYTES = 1 << 24
_WHAT = "type: latents reads safetensors or parquet files with latents and labels, or a directory of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFiles:
    """Opened files of one set."""

    readers: tuple[LatentReader, ...]
    shape: LatentShape
    starts: Integers
    """`[files + 1]`: the number of the first sample of each, and of all samples."""
    labels: torch.Tensor
    """int64 `[samples]`."""
    fingerprint: str
    """A hash of all bytes."""

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, numbers: Integers) -> torch.Tensor:
        """The latents of some samples, `[numbers, channels, height, width]` in fp32. Raises EnvironmentFailure."""
        numbers = np.asarray(numbers)
        order = np.argsort(numbers)
        bounds = np.searchsorted(numbers[order], self.starts)
        found = torch.empty((len(numbers), *self.shape))
        for index, reader in enumerate(self.readers):
            chosen = order[bounds[index] : bounds[index + 1]]
            if len(chosen):
                found[torch.from_numpy(chosen)] = reader.read(numbers[chosen] - self.starts[index])
        return found


def latent_paths(path: str) -> list[Path]:
    """The files that a dataset's `path` names: a file, or all of a directory. Raises BadInput."""
    named = Path(path).expanduser()
    if named.is_dir():
        found = sorted(each for ending in FORMATS for each in named.glob(f"*{ending}"))
    else:
        found = [named] if named.is_file() else []
    if not found:
        where = " in this directory" if named.is_dir() else ""
        raise BadInput(f"{path}: no safetensors or parquet file{where}", _WHAT)
    return found


def open_latents(
    paths: Sequence[Path],
    *,
    latent_shape: LatentShape,
    num_classes: int,
    progress: Callable[[int], None] = no_progress,
) -> LatentFiles:
    """Open and check files of latents of this shape, with classes from 0 to `num_classes` - 1. Raises BadInput, and
    EnvironmentFailure if a file cannot be read.

    `progress` is called with the bytes of each part that was read.
    """
    starts, labels, digest = [0], list[torch.Tensor](), hashlib.sha256()
    readers = tuple(reader_of(path, latent_shape) for path in paths)
    for reader in readers:
        own = reader.labels()
        wrong = own[(own < 0) | (own >= num_classes)]
        if wrong.numel():
            raise BadInput(
                f"{reader.path}: label {int(wrong[0])}, but the model's classes are 0 to {num_classes - 1}",
                "labels are classes of the model: num_embeds_ada_norm in its config.json says how many it has",
            )
        labels.append(own)
        starts.append(starts[-1] + len(own))
        try:
            with reader.path.open("rb") as content:
                while part := content.read(_HASHED_BYTES):
                    digest.update(part)
                    progress(len(part))
        except OSError as error:
            raise EnvironmentFailure(f"{reader.path}: cannot be read: {error.strerror}") from error
    if not starts[-1]:
        raise BadInput("the datasets have no latents", _WHAT)
    return LatentFiles(
        readers=readers,
        shape=latent_shape,
        starts=np.asarray(starts, dtype=np.int64),
        labels=torch.cat(labels),
        fingerprint=digest.hexdigest(),
    )
