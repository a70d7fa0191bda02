"""A run that is not training, opened for reading: its base model's skeleton, and its store.

Invariant: nothing of the run is changed, and no permission to change it is needed. Its store is locked meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.ranks.commits import newest_common
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.export.card import Card
from ratel_cli.model.export.export_weights import ExportFiles
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.output import check_export_output, has_own_store, no_store, reject_overlap
from ratel_cli.run.files.resharding_record import is_moving
from ratel_cli.run.files.run_directory import METRICS_NAME, run_directory, store_of_rank
from ratel_cli.run.inputs.base import Base, check_model
from ratel_cli.run.inputs.base_kinds import read_base
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.settings import best_rule
from ratel_cli.run.train.card import card_of
from ratel_cli.schedule.slices import range_in
from ratel_cli.sizes import MergeBase
from ratel_cli.store.generation import Generation
from ratel_cli.store.joined import JoinedGeneration, Readable, SlicedGeneration
from ratel_cli.store.layout import RankSlice
from ratel_cli.store.store import Store
from ratel_cli.training.history import History, check_best_is_known, read_history


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is not training."""

    context: RunContext
    base: Base
    stores: tuple[Store, ...]
    """The store of each rank."""

    @property
    def store(self) -> Store:
        """The store of the first rank."""
        return self.stores[0]

    @property
    def language(self) -> LanguageBase:
        """Its language model. Raises BadInput if it trains something else."""
        if not isinstance(self.base, LanguageBase):
            raise BadInput(
                f"{self.context.config.output_dir} has no language model: its datasets are of type: latents",
                "`ratel generate CONFIG --class N -o IMAGES` shows what it makes",
            )
        return self.base

    def slices(self, step: int | None) -> list[Generation]:
        """See `slices_of`."""
        return slices_of(self.stores, step)

    def generation(self, step: int | None) -> Readable:
        """All of that generation; None: of the run's result. Raises BadInput if that step is not saved."""
        step = self._best_step if step is None else step
        return joined(self.slices(step), self.base.model.spec, self.context.pool)

    @property
    def _best_step(self) -> int | None:
        """The best step that is saved, where the config wants it; None: the last one."""
        config = self.context.config
        rule, current = best_rule(config), self.store.progress.step
        if rule is None or not rule.saves_best:
            return None
        path = run_directory(config.output_dir) / METRICS_NAME
        try:
            history = read_history(path)
        except OSError:
            history = History()
        check_best_is_known(path, history)
        saved = set.intersection(*(set(store.pinned_steps) for store in self.stores))
        return rule.best_among(history.up_to(current).steps, {current, *saved}).step


def open_run(context: RunContext) -> OpenedRun:
    """Open the config's run; the context closes it.

    Raises BadInput if there is no store of this run, or it was made for another model.
    """
    prepare_process()
    config = context.config
    paths = config.storage.paths
    if not has_own_store(config):
        raise no_store(config)
    here, is_on_cpu = config, context.device.type == "cpu"
    if is_on_cpu and config.attn_implementation.startswith("flash"):  # the store does not depend on it
        here = config.model_copy(update={"attn_implementation": "sdpa"})
    base = read_base(here, context.log)
    stores = open_stores(context, config)
    check_model(stores[0], config, base.model.spec, paths[0])
    return OpenedRun(context=context, base=base, stores=stores)


def open_stores(context: RunContext, config: RunConfig, *, shared: bool = False) -> tuple[Store, ...]:
    """The stores of all ranks of the config's run, for reading; the context closes them. `shared`: other processes may
    open them so, too.

    Raises BadInput if one is missing, or if they are not those of one step of one run.
    """
    if is_moving(config):
        raise BadInput(
            f"{config.output_dir}: the change to another number of ranks was interrupted", "resume the run to finish it"
        )
    first = context.open_store(config.storage.paths, read_only=True, shared=shared)
    rank, size = first.rank_slice.rank, first.rank_slice.size
    if rank:
        raise BadInput(f"{config.output_dir} is rank {rank} of a run", "name the directory of the run itself")
    stores = [first]
    for other in range(1, size):
        store = context.open_store(store_of_rank(config, other), read_only=True, shared=shared)
        if store.rank_slice != RankSlice(other, size):
            raise BadInput(
                f"the store of rank {other} is not one of {size} ranks", f"resume the run with --ranks {size}"
            )
        stores.append(store)
    steps = [store.progress.step for store in stores]
    if len(set(steps)) > 1:
        raise BadInput(
            f"the stores of the ranks are at different steps: {', '.join(map(str, steps))}",
            f"resume the run with --ranks {size}, which brings them to the newest step that all have",
        )
    return tuple(stores)


def slices_of(stores: Sequence[Store], step: int | None) -> list[Generation]:
    """What each rank has of the saved generation of `step`; None: of the current one. Raises BadInput if that step is
    not saved."""
    if step is None or step == stores[0].progress.step:
        return [store.current() for store in stores]
    return [store.pinned(step) for store in stores]


def newest_snapshot(known: Sequence[tuple[int, int | None]]) -> int | None:
    """The step of which the ranks have a snapshot: the current one if it is the same in all; else, where some have
    copied the next one already, the newest that all have. `known`: of each, its current step and the one before."""
    current = {step for step, _ in known}
    if len(current) == 1:
        return current.pop()
    return newest_common([{step for step in steps if step is not None} for steps in known])


def snapshot_of_all(stores: Sequence[Store]) -> list[Generation]:
    """What each rank has of the newest step of which all have a snapshot in these stores. Raises BadInput if there is
    none."""
    newest = newest_snapshot([(store.progress.step, store.step_before) for store in stores])
    for rank, store in enumerate(stores):
        if newest is None or store.rank_slice != RankSlice(rank, len(stores)):
            raise BadInput("the snapshots of the ranks belong to different runs, or have no step in common")
    assert newest is not None
    return [store.generation_of(newest) for store in stores]


def joined(slices: Sequence[Generation], spec: ModelSpec, pool: BufferPool) -> Readable:
    """All of a generation of the model, from what each rank has of it."""
    return slices[0] if len(slices) == 1 else JoinedGeneration(slices=slices, blocks=spec.stored_blocks, pool=pool)


def sliced(slices: Sequence[Generation], spec: ModelSpec, pool: BufferPool, rank_slice: RankSlice) -> Readable:
    """What a rank has of a generation of the model, from what each of other ranks has of it."""
    if rank_slice.size == 1:
        return joined(slices, spec, pool)
    # Joined even if it is one: slices need not begin where chunks of a store do.
    whole = JoinedGeneration(slices=slices, blocks=spec.stored_blocks, pool=pool)
    starts = [range_in(block, rank_slice)[0] for block in spec.blocks]
    return SlicedGeneration(whole=whole, starts=starts, blocks=spec.sliced(rank_slice).stored_blocks)


def write_export(run: OpenedRun, generation: Readable, output: Path, *, overwrite: bool) -> int:
    """Export a generation to the directory `output`. Returns the generation's step.

    Raises BadInput if something would be replaced there that is not this export, unless `overwrite` is set.
    """
    with ExitStack() as resources:
        _, layout = run.base.open_weights(run.context.config, resources)
        files = ExportFiles(layout, run.base.sidecars(run.context.config))
        export = partial(run.base.export, files=files, card=_card(run, generation), option="-o")
        return _write(run, generation, output, export, overwrite=overwrite)


def write_merged(run: OpenedRun, generation: Readable, output: Path, *, overwrite: bool, into: MergeBase) -> int:
    """Export the base model, merged with the adapter of a generation, as `write_export` does. The run must have an
    adapter. `into`: see `AdaptedBase.merged`."""
    from ratel_cli.run.inputs.adapted_base import AdaptedBase  # with PEFT, which other runs do not need

    assert isinstance(run.base, AdaptedBase)
    card = replace(_card(run, generation), is_adapter=False)
    merge = partial(run.base.merge, card=card, into=into)
    return _write(run, generation, output, merge, overwrite=overwrite)


def _card(run: OpenedRun, generation: Readable) -> Card:
    return card_of(run.context.config, run.store, step=generation.progress.step, log=run.context.log)


def _write(
    run: OpenedRun, generation: Readable, output: Path, export: Callable[..., list[str]], *, overwrite: bool
) -> int:
    """Have a generation written to a directory. Returns its step."""
    context, step = run.context, generation.progress.step
    reject_overlap(output, run.base.directory, option="-o")
    check_export_output(context.config, output, step=step, overwrite=overwrite)
    notices = export(context.config, generation, context.pool, output, overwrite=overwrite, progress=context.stop.check)
    for text in notices:
        context.log.notice(text)
    return step
