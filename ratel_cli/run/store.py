"""The store of a run: the one that its last commit left, or a new one with the base model's weights.

Invariants: an existing store is opened and checked against the config before anything is written. Only `--resume no`
replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.model.import_weights import WeightSource, import_weights
from ratel_cli.model.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs import Inputs, changed_settings
from ratel_cli.run.run_directory import CONFIG_NAME, run_directory
from ratel_cli.run.settings import num_slots, place_of
from ratel_cli.store.layout import Geometry, record_layout
from ratel_cli.store.open import StoreMismatch
from ratel_cli.store.store import Progress, Store, StoreIdentity
from ratel_cli.units import counted

_FIRST_LOSS_SCALE = 2.0**16


def find_store(context: RunContext, identity: StoreIdentity, *, resume: str) -> Store | None:
    """The store of the run that resumes, which the context closes; None if there is none, or `resume` is `no`.

    Raises BadInput if the store belongs to another run, or does not fit the config.
    """
    config = context.config
    paths = config.storage.paths
    if resume != "no" and Store.exists(paths):
        try:
            store = context.open_store(paths, identity=identity)
        except StoreMismatch as error:
            explained = _explained(error, config)
            if explained is None:
                raise
            raise explained from error
        _check_fits(store, config, resume)
        return store
    if resume not in ("auto", "no"):
        raise BadInput(f"there is no saved step {resume}: there is no store in {place_of(config)}")
    return None


def _explained(error: StoreMismatch, config: RunConfig) -> BadInput | None:
    """The error that names what changed since the run began; None if that is not known."""
    changed = changed_settings(config, run_directory(config.output_dir) / CONFIG_NAME)
    if changed:
        return BadInput(
            f"the store in {place_of(config)} belongs to a run with other settings: {'; '.join(changed)}",
            "set them back to resume that run, or start over with --resume no",
        )
    if error.fields == ("data_hash",):
        sources = ", ".join(dataset.path for dataset in config.datasets)
        return BadInput(
            f"the training data changed since this run began ({sources})",
            "use the earlier data to resume the run, or start over with --resume no",
        )
    return None


def _check_fits(store: Store, config: RunConfig, resume: str) -> None:
    """Raise BadInput unless the store, as it was created, can do what the config asks for now."""
    wanted = num_slots(config)
    if store.in_place != (wanted == 1):
        made = "none" if store.in_place else "step"
        raise BadInput(
            f"the store was made with storage.durability: {made}",
            f"set storage.durability: {made} to resume, or start over with --resume no",
        )
    if store.num_slots < wanted:
        raise BadInput(
            f"the store has space for {counted(store.num_slots - 2, 'saved generation')}, "
            f"but the config asks for {wanted - 2}"
            + (", one of them for the snapshot" if config.storage.snapshot is not None else ""),
            "lower save_total_limit or storage.keep_generations, or remove save_steps or storage.snapshot; "
            "or start over with --resume no",
        )
    if resume != "auto" and int(resume) not in store.pinned_steps:
        saved = ", ".join(map(str, store.pinned_steps)) or "none"
        raise BadInput(f"--resume {resume}: that step is not saved; saved steps: {saved}")


def resume_store(context: RunContext, store: Store, *, resume: str) -> None:
    """Make the generation that `resume` names the current one, and check every byte of it.

    A crash can damage the newest generation if a drive reports a flush that it did not do. The one before it may be
    whole then. Raises IntegrityFailure if no generation can be used.
    """
    with context.bar("verifying the store", store.slot_bytes) as advance:
        if resume == "auto":
            store.ensure_whole(context.pool, progress=advance, notice=context.log.notice)
        else:
            store.pinned(int(resume)).check_all(context.pool, progress=advance)
            store.rewind(int(resume))
    context.pool.trim()
    if store.progress.step:
        context.log.say(f"resuming from step {store.progress.step}")


def make_store(
    context: RunContext, inputs: Inputs, identity: StoreIdentity, *, weights: tuple[int, ...], resume: str
) -> Store:
    """A new store with the base model's weights as its first generation, which the context closes.

    `weights` are the directories' shares of its bytes, for its whole life.
    """
    spec = inputs.model.spec
    geometry = new_geometry(context.config, spec.block_elements, weights=weights)
    paths = context.config.storage.paths
    store = prepare_store(context, paths, geometry, identity=identity, overwrite=resume == "no")
    with context.bar("importing weights", spec.num_parameters) as advance:
        import_base(spec, inputs.source, store, context.pool, progress=advance)
    return store


def new_geometry(config: RunConfig, block_elements: tuple[int, ...], *, weights: tuple[int, ...]) -> Geometry:
    """The geometry of the store that the config asks for."""
    return Geometry(dtype=config.dtype, block_elements=block_elements, num_slots=num_slots(config), weights=weights)


def prepare_store(
    context: RunContext,
    paths: Sequence[Path],
    geometry: Geometry,
    *,
    identity: StoreIdentity,
    overwrite: bool,
    queue: IoQueue | None = None,
    what: str = "store",
) -> Store:
    """An empty store, which becomes valid with its first commit. Every byte is written once: minutes for a large one.

    The context closes it, and shows the progress of making the `what`. `queue`: the context's own if None. Raises
    BadInput if there is a store already and `overwrite` is not set, EnvironmentFailure if there is no space.
    """
    bytes_per_element = record_layout(geometry.dtype).bytes_per_parameter
    total_bytes = geometry.num_slots * bytes_per_element * sum(geometry.block_elements)
    with context.bar(f"preparing the {what}", total_bytes) as advance:
        store = Store.create(
            paths,
            geometry,
            identity=identity,
            queue=queue or context.queue,
            overwrite=overwrite,
            progress=advance,
            notice=context.log.notice,
        )
    return context.resources.enter_context(store)


def import_base(
    spec: ModelSpec, source: WeightSource, store: Store, pool: BufferPool, *, progress: Callable[[float], None]
) -> None:
    """Import the weights of `source` into an empty store, and commit them as step 0."""
    import_weights(spec, source, store.shadow(), pool, progress=progress)
    store.commit_import(Progress(step=0, updates=0, loss_scale=_FIRST_LOSS_SCALE, good_steps=0, tokens=0))
    pool.trim()
