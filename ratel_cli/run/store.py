"""The store of a run: the one that its last commit left, or a new one with the base model's weights.

Invariants: an existing store is opened and checked against the config before anything is written. Only `--resume no`
replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.model.import_weights import WeightSource, import_weights
from ratel_cli.model.spec import ModelSpec
from ratel_cli.run.context import OpenBar, RunContext, no_bar
from ratel_cli.run.inputs import Inputs, changed_settings, identity_of
from ratel_cli.run.run_directory import CONFIG_NAME, run_directory
from ratel_cli.run.settings import num_slots, place_of
from ratel_cli.sizes import CHUNK_ELEMENTS, DtypeName
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.layout import record_layout
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


def make_store(context: RunContext, inputs: Inputs, *, drive_weights: Sequence[int], resume: str) -> Store:
    """A new store with the base model's weights as its first generation."""
    config = context.config
    return create_store(
        inputs.model.spec,
        inputs.source,
        config.storage.paths,
        identity=identity_of(config, inputs),
        dtype=config.dtype,
        num_slots=num_slots(config),
        queue=context.queue,
        pool=context.pool,
        overwrite=resume == "no",
        drive_weights=drive_weights,
        bar=context.bar,
        notice=context.log.notice,
    )


def create_store(
    spec: ModelSpec,
    source: WeightSource,
    paths: Sequence[Path],
    *,
    identity: StoreIdentity,
    dtype: DtypeName,
    num_slots: int,
    queue: IoQueue,
    pool: BufferPool,
    overwrite: bool = False,
    drive_weights: Sequence[int] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    barrier: Barrier | None = None,
    bar: OpenBar = no_bar,
    notice: Callable[[str], None] | None = None,
) -> Store:
    """A store of a model's blocks with the weights of `source` as its first generation, at step 0.

    The arguments that are not explained here are those of `prepare_store`.
    """
    with ExitStack() as opened:
        store = opened.enter_context(
            prepare_store(
                paths,
                identity=identity,
                dtype=dtype,
                block_elements=[block.num_elements for block in spec.blocks],
                num_slots=num_slots,
                queue=queue,
                overwrite=overwrite,
                drive_weights=drive_weights,
                chunk_elements=chunk_elements,
                barrier=barrier,
                bar=bar,
                notice=notice,
            )
        )
        with bar("importing weights", spec.num_parameters) as advance:
            import_weights(spec, source, store.shadow(), pool, progress=advance)
        store.commit_import(Progress(step=0, updates=0, loss_scale=_FIRST_LOSS_SCALE, good_steps=0, tokens=0))
        pool.trim()
        opened.pop_all()
    return store


def prepare_store(
    paths: Sequence[Path],
    *,
    identity: StoreIdentity,
    dtype: DtypeName,
    block_elements: Sequence[int],
    num_slots: int,
    queue: IoQueue,
    overwrite: bool = False,
    drive_weights: Sequence[int] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    barrier: Barrier | None = None,
    what: str = "store",
    bar: OpenBar = no_bar,
    notice: Callable[[str], None] | None = None,
) -> Store:
    """An empty store, which becomes valid with its first commit. Every byte is written once: minutes for a large one.

    With one slot the store is written in place. `drive_weights` are the directories' shares of its bytes, for its
    whole life; None: equal shares. `bar` shows the progress of making the `what`. Raises BadInput if there is a store
    already and `overwrite` is not set, EnvironmentFailure if there is no space.
    """
    total_bytes = num_slots * record_layout(dtype).bytes_per_parameter * sum(block_elements)
    with bar(f"preparing the {what}", total_bytes) as advance:
        return Store.create(
            paths,
            identity=identity,
            dtype=dtype,
            block_elements=block_elements,
            num_slots=num_slots,
            queue=queue,
            overwrite=overwrite,
            weights=drive_weights,
            chunk_elements=chunk_elements,
            barrier=barrier,
            progress=advance,
            notice=notice,
        )
