"""What a base model's directory has that a run neither trains nor uses, or lacks, in sentences for the user.

Invariant: each kind of thing is reported once, whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from ratel_cli.errors import excerpt
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.files.directory import adapter_files
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.shards import TensorEntry
from ratel_cli.units import counted, format_bytes

_MAX_PARTS = 6
"""A sentence names at most this many parts."""


def unused_parts(directory: Path, source: WeightSource) -> list[str]:
    """The sentences about a head that is drawn, tensors that are only kept, and an adapter beside the model."""
    sentences: list[str] = []
    if isinstance(source, CheckpointSource) and source.drawn:
        names = sorted({name.rpartition(".")[0] for name in source.drawn})
        sentences.append(f"the base model has no weights for {_listed(names)}: they are drawn from `seed`")
    if isinstance(source, CheckpointSource) and (kept := source.kept_tensors()):
        parts = _parts(kept, source.read_names())
        sentences.append(
            f"not trained: {_listed(parts)} ({counted(len(kept), 'tensor')}, "
            f"{format_bytes(sum(entry.num_bytes for entry in kept))}); the export contains them unchanged"
        )
    adapters = adapter_files(directory)
    if adapters:
        sentences.append(f"{directory}: {' and '.join(adapters)} beside the model: the run does not use this adapter")
    return sentences


def _parts(kept: Sequence[TensorEntry], trained: Iterable[str]) -> list[str]:
    """The parts of the model that the tensors belong to: the shortest beginnings of names that no trained one has."""
    beginnings = {".".join(name.split(".")[:length]) for name in trained for length in range(1, name.count(".") + 2)}
    parts: list[str] = []
    for entry in kept:
        words = entry.name.split(".")
        heads = (".".join(words[:length]) for length in range(1, len(words) + 1))
        parts.append(next((head for head in heads if head not in beginnings), entry.name))
    return [part for part, _ in groupby(sorted(parts))]


def _listed(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - _MAX_PARTS} more parts" if len(parts) > _MAX_PARTS else ""
    return ", ".join(excerpt(part) for part in parts[:_MAX_PARTS]) + more
