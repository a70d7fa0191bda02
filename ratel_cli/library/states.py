"""The training state of a loop of the caller's own, on its drives: the one that an earlier loop left, or a new one.

A snapshot that is opened becomes a training state of its own.

Invariant: a state is opened only as what it was made; no other is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ratel_cli.errors import BadInput
from ratel_cli.library.snapshots import is_snapshot
from ratel_cli.model.files.import_weights import WeightSource, imported_weights
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.settings import new_geometry
from ratel_cli.run.train.branch import beginning
from ratel_cli.store.open import StoreMismatch, stored_identity
from ratel_cli.store.store import Store, StoreIdentity


def opened_state(context: RunContext, identity: StoreIdentity, differences: Mapping[str, str]) -> Store:
    """The store that is there, whose newest whole generation is the current one. The context closes it.

    `differences`: what it was made with, by the field of its identity that is another one. Raises BadInput.
    """
    paths = context.config.storage.paths
    stored = stored_identity(paths)
    copied = stored if stored is not None and is_snapshot(stored) else None
    wanted = identity if copied is None else replace(identity, data_hash=copied.data_hash)
    try:
        store = context.open_store(paths, identity=wanted)
    except StoreMismatch as error:
        differs = " and ".join(differences[field] for field in error.fields if field in differences)
        raise BadInput(
            f"{', '.join(map(str, paths))} has a training state that was made with {differs}",
            "open it as it was made; or give another directory, or delete the state, to begin anew",
        ) from error
    with context.bar("verifying the store", store.generation_bytes) as advance:
        store.ensure_whole(context.pool, progress=advance, notice=context.log.notice)
    context.pool.trim()
    if copied is not None:  # the state that it was copied from must not replace what is trained here
        store.belong_to(replace(store.identity, data_hash=identity.data_hash))
    return store


def new_state(
    context: RunContext, identity: StoreIdentity, spec: ModelSpec, source: WeightSource, *, shares: tuple[int, ...]
) -> Store:
    """A store with the weights of `source`, which the context closes. `shares`: of the directories."""
    config = context.config
    geometry = new_geometry(config, spec.stored_blocks, shares=shares)
    store = context.resources.enter_context(
        Store.create(config.storage.paths, geometry, identity=identity, queue=context.queue, notice=context.log.notice)
    )
    context.fill(store, imported_weights(spec, source, beginning()), "importing weights")
    return store
