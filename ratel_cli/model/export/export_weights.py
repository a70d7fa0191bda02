"""Export: from the store to a directory that transformers loads.

Memory is one group of elements, whatever the model's size. All sizes are known before the first byte is written, so a
drive without enough space is rejected at once. Invariant: the weights written are those of
`model/files/stored_weights.py`; the store is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ratel_cli.errors import Diverged, excerpt
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.export.card import CARD_NAME, PICTURE_NAME, Card, card_text
from ratel_cli.model.export.export_contents import ContentReader
from ratel_cli.model.export.export_layout import ConvertedContent, ExportLayout, Shard, TrainedContent
from ratel_cli.model.export.merged_weights import MergedWeights
from ratel_cli.model.export.publishing import renamed_notice
from ratel_cli.model.export.sidecars import Sidecars
from ratel_cli.model.export.staging import Destination, Staging, require_space
from ratel_cli.model.files.import_weights import WEIGHT_GROUP_ELEMENTS
from ratel_cli.model.files.marker import check_output
from ratel_cli.model.files.shards import ShardWriter
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.model.values.finite import OTHER_DTYPE
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName
from ratel_cli.store.joined import Readable
from ratel_cli.units import MIB

_WRITTEN_BYTES = 2 * MIB
"""Space for what is not copied: configuration, card and curves, all below 1 MiB together."""

_OTHER_BASE = "merge with PEFT into the base model in bfloat16: from_pretrained(..., dtype=torch.bfloat16)"


@dataclass(frozen=True, slots=True)
class ExportFiles:
    """The files of an export, but for its card."""

    layout: ExportLayout
    """What the files of weights hold."""
    sidecars: Sidecars
    """The files beside them."""

    @property
    def num_bytes(self) -> int:
        """The space that an export takes. An earlier one stays until all of it is written, so its space does not
        count."""
        return self.layout.num_bytes + self.sidecars.copied_bytes + _WRITTEN_BYTES

    def names(self, *, has_card: bool = True) -> list[str]:
        """The names of all files that an export may have."""
        return [*self.layout.file_names, *self.sidecars.names, *([CARD_NAME, PICTURE_NAME] if has_card else [])]


def export_model(
    spec: ModelSpec,
    generation: Readable,
    pool: BufferPool,
    files: ExportFiles,
    destination: Destination,
    *,
    dtype: DtypeName,
    card: Card | None,
    merged: Callable[[StoredWeights], MergedWeights] | None = None,
    group_elements: int = WEIGHT_GROUP_ELEMENTS,
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """Replace the model in a directory by the weights of `generation`. Other files there stay.

    Returns a sentence about each file of the user's that got another name, because with it the directory would load
    other weights: only with `overwrite`.

    The weights are read in `dtype`. `merged`: what reads them instead, where an adapter is merged into its base. `card`
    is the content of the model card; None: the export has none. `progress` is called before each group.

    Raises BadInput if a sidecar cannot be used, or if a file of the user's would be replaced; EnvironmentFailure if the
    files cannot be written, IntegrityFailure if a record is damaged, Diverged if a trained weight is not finite in
    float16. After any exception before the last phase, and whatever `progress` raises, the directory is unchanged; see
    `staging` for the last phase.
    """
    layout, sidecars = files.layout, files.sidecars
    check_output(destination.directory, overwrite=destination.overwrite, option=destination.option)
    require_space(destination.directory, files.num_bytes, option=destination.option)
    with Staging(destination) as staging:
        staging.reject_files_of_others(files.names(has_card=card is not None))
        with StoredWeights(spec, generation, pool, dtype, group_elements=group_elements, progress=progress) as stored:
            weights = stored if merged is None else merged(stored)
            for shard in layout.shards:
                contents = ContentReader(weights, group_elements=group_elements, progress=progress)
                _write_shard(staging, shard, contents, hint=OTHER_DTYPE if merged is None else _OTHER_BASE)
        if layout.index is not None:
            staging.write_text(layout.index_name, layout.index)
        sidecars.add(staging, layout)
        if card is not None:
            text = card_text(card, spec, dtype=layout.dtype, num_updates=generation.progress.updates)
            staging.write_text(CARD_NAME, text)
        if card is not None and card.picture is not None:
            staging.write_bytes(PICTURE_NAME, card.picture)
        renamed = [*staging.renamed, *staging.publish(step=generation.progress.step)]
    return [renamed_notice(path, spare) for path, spare in renamed]


def _write_shard(staging: Staging, shard: Shard, contents: ContentReader, *, hint: str) -> None:
    """Write one file of weights. `hint`: what to do about a number that float16 cannot hold."""
    with ShardWriter(staging.path / shard.file_name, shard.tensors) as writer:
        for tensor in shard.tensors:
            is_narrow = tensor.dtype == torch.float16 and isinstance(tensor.content, TrainedContent | ConvertedContent)
            for elements in contents.read(tensor):
                if is_narrow and not elements.isfinite().all():
                    what = "it has a number that is not finite in float16 (65504 at most)"
                    raise Diverged(f"tensor {excerpt(tensor.name)} cannot be exported: {what}", hint)
                writer.write(elements)
        writer.finish()
        staging.add(shard.file_name, xxh3_128=writer.xxh3_128)
