"""The state that a new run takes over from a step of another run.

With its optimizer's moments the new run goes on after that step: every later step is that of a run which has the new
settings from there on. With a fresh optimizer it begins at step 0 with that step's master weights.

Invariants: the other run is only read, and its store is locked until it is copied. A run that cannot start from it is
rejected before anything is written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ratel_cli.commands import command, errors_about
from ratel_cli.config.describe import changed_value
from ratel_cli.errors import BadInput
from ratel_cli.model.files.import_weights import copied_weights
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import Origin, OriginRecord
from ratel_cli.run.files.output import missing_store
from ratel_cli.run.inputs.base import model_hash
from ratel_cli.run.inputs.inputs import Inputs
from ratel_cli.run.inputs.settings import DECIDES_THE_STATE
from ratel_cli.run.train.open import open_stores, sliced, slices_of
from ratel_cli.store.fill import Copied, StateSource
from ratel_cli.store.joined import Readable
from ratel_cli.store.store import Progress, Store

FIRST_LOSS_SCALE = 2.0**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """An open step of another run."""

    origin: Origin
    stores: tuple[Store, ...]
    """The stores of all ranks of the other run."""
    generation: Readable
    """What this rank takes over of the step."""

    @property
    def source(self) -> StateSource:
        """What the new run's store is filled from."""
        if self.origin.fresh_optimizer:
            return copied_weights(self.generation, beginning())
        return Copied(self.generation)

    @property
    def record(self) -> OriginRecord:
        """What the new run records."""
        return OriginRecord(
            run=os.path.realpath(self.origin.config.output_dir),
            step=self.generation.progress.step,
            fresh_optimizer=self.origin.fresh_optimizer,
        )

    def copy_into(self, store: Store, context: RunContext) -> None:
        """Fill and commit the new run's store, checking every byte that is read, and let go of the other run's."""
        theirs = self.origin.config.output_dir
        with errors_about(theirs):
            context.fill(store, self.source, f"copying step {self.generation.progress.step} of {theirs}")
        for each in self.stores:
            each.close()


def beginning() -> Progress:
    """The progress of a run that has done no step."""
    return Progress(step=0, updates=0, loss_scale=FIRST_LOSS_SCALE, good_steps=0, tokens=0)


def open_branch(context: RunContext, inputs: Inputs, origin: Origin) -> Branch:
    """Open the step that the new run starts from; the context closes it.

    Raises BadInput if that run has no such step or trains another model, or if the new run would have no step to do.
    """
    theirs = origin.config
    if not Store.exists(theirs.storage.paths):
        raise BadInput(
            f"--from {origin}: {missing_store(theirs)}",
            "to train its exported model, set base_model to the directory of the export",
        )
    with errors_about(theirs.output_dir):
        stores = open_stores(context, theirs, shared=True)
    spec = inputs.model.spec
    _reject_other_model(context, spec, stores[0], origin)
    try:
        slices = slices_of(stores, origin.step)
    except BadInput as error:
        raise BadInput(f"--from {origin}: {error.message}", error.hint) from error
    generation = sliced(slices, spec, context.pool, context.ranks.slice)
    branch = Branch(origin=origin, stores=stores, generation=generation)
    if branch.source.progress.step >= inputs.num_steps:
        raise BadInput(
            f"--from {origin}: that run has done {branch.source.progress.step} steps, and this one ends after step "
            f"{inputs.num_steps}, counted from the beginning of that run",
            "set max_steps or num_epochs higher; start from an earlier saved step, --from RUN@STEP; or begin at step 0 "
            "with its weights, --fresh-optimizer",
        )
    return branch


def _reject_other_model(context: RunContext, spec: ModelSpec, store: Store, origin: Origin) -> None:
    ours, theirs = context.config, origin.config
    is_same_place = os.path.realpath(str(ours.base_model)) == os.path.realpath(str(theirs.base_model))
    update = {key: getattr(ours, key) for key in DECIDES_THE_STATE if key != "base_model" or not is_same_place}
    wanted = theirs.model_copy(update=update)
    if store.identity.model_hash == model_hash(wanted, spec):
        return
    old, new = (each.model_dump(mode="json") for each in (theirs, wanted))
    keys = [key for key in DECIDES_THE_STATE if old[key] != new[key]]
    changes = [f"{key} was {changed_value(old[key])}, is now {changed_value(new[key])}" for key in keys]
    differences = "; ".join(changes) or "its parameters differ"
    verb, what = ("export", "its model") if theirs.adapter is None else ("merge", "its adapter into its model")
    raise BadInput(
        f"--from {origin}: that run trains another model: {differences}",
        f"set them as in that run; or {verb} {what} with {command(verb, theirs.output_dir, '-o', 'DIR')}, and set "
        "base_model: DIR",
    )
