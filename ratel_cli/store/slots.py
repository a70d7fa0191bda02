"""Which slots of a store hold a generation that somebody counts on, and so may not be written.

Used by `store`. The manifest keeps the current generation and the pinned ones, which outlives a crash; this process
holds what it is reading (a snapshot on its way), which does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.store.generation import Generation
from ratel_cli.store.manifest import Manifest


def kept_slots(manifest: Manifest, held: Sequence[Generation]) -> set[int]:
    """All others are free."""
    return {manifest.slot, *(pin.slot for pin in manifest.pins), *(generation.slot for generation in held)}


def check_room(manifest: Manifest, held: Sequence[Generation]) -> None:
    """Raise EnvironmentFailure unless steps can go on while the current generation is kept."""
    num_kept, num_slots = len(kept_slots(manifest, held)), manifest.geometry.num_slots
    if num_kept + 2 > num_slots:
        raise EnvironmentFailure(
            f"step {manifest.progress.step} cannot be kept: the store has {num_slots} slots, a step needs 2, "
            f"and {num_kept - 1} are kept already",
            "lower save_total_limit, or start over with a larger storage.keep_generations",
        )
