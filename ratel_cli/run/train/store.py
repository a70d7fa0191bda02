"""The store of a run: the one that its last commit left, or a new one with the base model's weights.

Invariants: an existing store is opened and checked against the config before anything is written. Only `--resume no`
replaces it, and a store of other settings or data only with `--overwrite-store` too.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.ranks.commits import resume_together
from ratel_cli.engine.ranks.launched import num_launched_ranks
from ratel_cli.errors import BadInput
from ratel_cli.io.queue import IoQueue
from ratel_cli.model.files.import_weights import imported_weights
from ratel_cli.model.files.in_place import base_files_of
from ratel_cli.model.files.marker import read_marker
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import write_origin
from ratel_cli.run.files.output import (
    deleted_store,
    forget_deleted_store,
    missing_store,
    no_store,
    other_owner,
    own_output,
)
from ratel_cli.run.files.run_directory import (
    CONFIG_NAME,
    decay_of,
    default_store,
    recorded_decay,
    run_directory,
    same_places,
    store_at,
)
from ratel_cli.run.inputs.inputs import Inputs, changed_settings
from ratel_cli.run.inputs.settings import DECIDES_THE_STATE, as_recorded, new_geometry, num_slots, settings_hash
from ratel_cli.run.train.branch import Branch, beginning
from ratel_cli.run.train.start import GoBack, Start, StartOver
from ratel_cli.store.base_files import BaseFiles
from ratel_cli.store.layout import Geometry
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.open import REPLACE_STORE, StoreMismatch, stored_identity, stored_rank_slice, stored_step
from ratel_cli.store.run_record import RunRecord, hand_over, read_record, write_records
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.units import counted


def as_resumed(config: RunConfig, start: Start) -> RunConfig:
    """The config with what the store of its run decides, unless the run starts over.

    Raises BadInput if the store belongs to another run, and `start` does not replace it.
    """
    if start != StartOver(replaces_others=True):
        _reject_store_of_other_run(config)
    return config if isinstance(start, StartOver) else as_recorded(config)


def find_store(context: RunContext, identity: StoreIdentity, start: Start) -> Store | None:
    """The store of the run that resumes, which the context closes; None if there is none, or the run starts over.

    Raises BadInput if the store belongs to another run, and `start` does not replace it; or does not fit the config.
    """
    config = context.config
    paths = config.storage.paths
    if start == StartOver(replaces_others=False):
        reject_replacing(config, paths, identity)
        _reject_replacing_result(config)
    if not isinstance(start, StartOver) and Store.exists(paths):
        if deleted_store(config) is not None:
            raise no_store(config)  # deleting it was interrupted
        try:
            store = context.open_store(paths, identity=identity)
        except StoreMismatch as error:
            explained = _explained(config, paths, error.fields)
            if explained is None:
                raise
            raise explained from error
        _check_fits(store, config, start)
        return store
    if isinstance(start, GoBack):
        raise BadInput(f"there is no saved step {start.step}: {missing_store(config)}")
    return None


def check_decay(config: RunConfig, spec: ModelSpec) -> None:
    """Raise BadInput if weight decay applies to other parameters than when the run began, under another version."""
    recorded = recorded_decay(config.output_dir) if config.weight_decay else {}
    changed = [name for name, decay in decay_of(spec).items() if recorded.get(name, decay) is not decay]
    if changed:
        more = f" and {counted(len(changed) - 1, 'other parameter')}" if len(changed) > 1 else ""
        raise BadInput(
            f"weight decay applied to other parameters when this run began: {changed[0]}{more} differ",
            "finish the run with the version of Ratel that began it, or start over with --resume no",
        )


def _reject_store_of_other_run(config: RunConfig) -> None:
    """Raise BadInput if the store belongs to another run, as for a copy of that run's output directory."""
    owner = other_owner(config)
    if owner is None or not Store.exists(config.storage.paths):
        return
    own = default_store(config)
    if same_places([own], config.storage.paths):
        other = "set another output_dir for a new run"
    else:
        words = shlex.join([f"storage.paths={own}", "--resume", "no", "--from", owner.run])
        other = f"add `{words}`, so that this run gets a store of its own, which begins where that run is now"
    raise _of_other_run(config, owner, f"resume that run with {command('finetune', owner.run)}; or {other}")


def reject_restoring_over_other_run(config: RunConfig) -> None:
    """Raise BadInput if the store that `ratel restore` would replace belongs to another run."""
    owner = other_owner(config)
    if owner is not None:
        other = "or add `storage.paths=DIR` to restore into other directories"
        raise _of_other_run(config, owner, f"that run is restored with {command('restore', owner.run)}; {other}")


def _of_other_run(config: RunConfig, owner: RunRecord, hint: str) -> BadInput:
    store = describe_store(config, config.storage.paths)
    return BadInput(f"{store_at(config)} holds {store}, whose output directory is {owner.run}", hint)


def reject_replacing(config: RunConfig, paths: Sequence[Path], identity: StoreIdentity) -> None:
    """Raise BadInput if the directories hold a store of another run, or something that is no store of Ratel."""
    if not Store.exists(paths):
        return
    stored = stored_identity(paths)
    if stored is None:
        if read_record(paths[0]) is None:
            raise BadInput(
                f"{', '.join(map(str, paths))}: there is a {DATA_FILE_NAME} that cannot be read, and nothing says "
                "that it is this run's",
                REPLACE_STORE,
            )
        return
    there = config.storage.model_copy(update={"paths": tuple(paths)})
    recorded = as_recorded(config.model_copy(update={"storage": there}))
    is_same = (stored.config_hash, stored.model_hash, stored.seed) == (
        settings_hash(recorded),
        identity.model_hash,
        identity.seed,
    )
    if not is_same or not (config.split is None or stored.data_hash == identity.data_hash):
        raise _explained(config, paths, ("data_hash",) if is_same else ()) or BadInput(
            f"{', '.join(map(str, paths))} holds {describe_store(config, paths)}, which has other settings or data",
            REPLACE_STORE,
        )


def _reject_replacing_result(config: RunConfig) -> None:
    """Raise BadInput if the output directory has the model of a run with other settings, wherever its store is."""
    marker = read_marker(config.output_dir)
    started_with = run_directory(config.output_dir) / CONFIG_NAME
    changed = changed_settings(config, started_with, ranks_before=num_launched_ranks())  # the store is not here
    if marker is not None and marker.step is not None and changed:
        raise BadInput(
            f"{config.output_dir} holds step {marker.step} of a run with other settings: {'; '.join(changed)}",
            "set another output_dir for a new run, or replace that one's with --resume no --overwrite-store",
        )


def describe_store(config: RunConfig, paths: Sequence[Path], *, what: str = "store") -> str:
    """The store in these directories, for messages: what it is, whose, at which step, and when it was made."""
    record, step = read_record(paths[0]), stored_step(paths)
    facts = ([] if step is None else [f"step {step}"]) + ([] if record is None else [f"made {record.made}"])
    name = config.output_dir.name if record is None else record.name
    return f"the {what} of the run {name}" + (f" ({', '.join(facts)})" if facts else "")


def _explained(config: RunConfig, paths: Sequence[Path], fields: Sequence[str]) -> BadInput | None:
    """The error that names what changed since the run with the store in `paths` began; None if that is not known.

    `fields` of the store's identity differ.
    """
    is_data = tuple(fields) == ("data_hash",)
    stored = stored_rank_slice(paths)
    started_with = run_directory(config.output_dir) / CONFIG_NAME
    changed = changed_settings(config, started_with, ranks_before=1 if stored is None else stored.size)
    if changed and not is_data:
        return BadInput(
            f"{', '.join(map(str, paths))} holds {describe_store(config, paths)}, which has other settings: "
            f"{'; '.join(changed)}",
            f"to resume that run, restore the old values; {_for_a_new_run(config, changed)}; to discard that run, use "
            "--resume no --overwrite-store",
        )
    if is_data:
        sources = ", ".join(dataset.path for dataset in config.datasets)
        return BadInput(
            f"the training data changed since this run began ({sources})",
            f"to resume that run, use the earlier data; {_for_a_new_run(config)}; to discard that run, use --resume "
            "no --overwrite-store",
        )
    return None


def _for_a_new_run(config: RunConfig, changed: Sequence[str] = ()) -> str:
    """The part of a hint that says how to begin a new run with the settings that `changed`, from this one's state."""
    if any(each.startswith(DECIDES_THE_STATE) for each in changed):
        return "for a new run, set another output_dir"
    return f"for a new run, set another output_dir (--from {config.output_dir} starts it from this run's state)"


def _check_fits(store: Store, config: RunConfig, start: Start) -> None:
    """Raise BadInput unless the store, as it was created, can do what the config asks for now."""
    wanted = num_slots(config)
    if store.overwrites != (wanted == 1):
        made = "none" if store.overwrites else "step"
        raise BadInput(
            f"the store was made with storage.durability: {made}",
            f"set storage.durability: {made} to resume, or start over with --resume no",
        )
    if store.num_slots < wanted:
        raise BadInput(
            f"the store has space for {counted(store.num_slots - 2, 'saved generation')}, "
            f"but the config asks for {wanted - 2}"
            + (", one of them for the snapshot" if config.storage.snapshot is not None else ""),
            "lower save_total_limit or storage.keep_generations, or remove save_steps, load_best_model_at_end or "
            "storage.snapshot; "
            "or start over with --resume no",
        )
    if isinstance(start, GoBack) and start.step not in store.pinned_steps:
        saved = ", ".join(map(str, store.pinned_steps)) or "none"
        raise BadInput(f"--resume {start.step}: that step is not saved; saved steps: {saved}")


def resume_store(context: RunContext, store: Store, start: Start, *, num_steps: int) -> None:
    """Make the generation that the run begins with the current one, and check every byte of it.

    A crash can damage the newest generation if a drive reports a flush that it did not do. The one before it may be
    whole then. Raises IntegrityFailure if no generation can be used.
    """
    with context.bar("verifying the store", store.generation_bytes) as advance:
        if isinstance(start, GoBack):
            store.pinned(start.step).check_all(context.pool, progress=advance)
            context.ranks.wait_for_all()  # none goes back where another one cannot
            store.rewind(start.step)
        else:
            store.ensure_whole(context.pool, progress=advance, notice=context.log.notice)
    resume_together(store, context.ranks, context.pool, notice=context.log.notice)
    context.pool.trim()
    hand_over(context.config.storage.paths, own_output(context.config))
    forget_deleted_store(context.config)
    if store.progress.step >= num_steps:
        context.log.say(f"this run is finished: step {store.progress.step} is its last; exporting its model again")
    elif store.progress.step:
        context.log.say(f"resuming from step {store.progress.step}")


def make_store(
    context: RunContext,
    inputs: Inputs,
    identity: StoreIdentity,
    start: Start,
    *,
    shares: tuple[int, ...],
    branch: Branch | None,
) -> Store:
    """A new store, which the context closes. Its first generation is the `branch`, or the base model's weights.

    `shares` are those of the directories in its bytes, for its whole life.
    """
    spec = inputs.model.spec.sliced(context.ranks.slice)
    rank_slice, base_files = context.ranks.slice, base_files_of(spec, inputs.source)
    geometry = new_geometry(
        context.config, spec.stored_blocks, shares=shares, rank_slice=rank_slice, base_files=base_files
    )
    paths, is_over = context.config.storage.paths, isinstance(start, StartOver)
    store = prepare_store(context, paths, geometry, identity=identity, overwrite=is_over, base_files=base_files)
    forget_deleted_store(context.config)
    write_origin(context.config, None if branch is None else branch.record)
    if branch is not None:
        branch.copy_into(store, context)
        return store
    context.fill(store, imported_weights(spec, inputs.source, beginning()), "importing weights")
    return store


def prepare_store(
    context: RunContext,
    paths: Sequence[Path],
    geometry: Geometry,
    *,
    identity: StoreIdentity,
    overwrite: bool,
    base_files: BaseFiles | None,
    queue: IoQueue | None = None,
    what: str = "store",
) -> Store:
    """An empty store, which becomes valid with its first commit. Every byte is written once: minutes for a large one.

    The context closes it, and shows the progress of making the `what`. `queue`: the context's own if None.
    `base_files`: see `Store.create`. Raises BadInput if there is a store already and `overwrite` is not set,
    EnvironmentFailure if there is no space.
    """
    total_bytes = geometry.slot_address(geometry.num_slots)
    with context.bar(f"preparing the {what}", total_bytes) as advance:
        store = Store.create(
            paths,
            geometry,
            identity=identity,
            queue=queue or context.queue,
            overwrite=overwrite,
            progress=advance,
            notice=context.log.notice,
            base_files=base_files,
        )
    write_records(paths, own_output(context.config))
    return context.resources.enter_context(store)
