"""What an open model and a hooked module have in common: a training state on drives, to be read, checked and copied.

Invariant: each of these sees the state after the last step, which is committed first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput
from ratel_cli.library.snapshots import write_snapshot
from ratel_cli.model.files.quantised_model import QuantisedWeight
from ratel_cli.model.files.stored_state import StoredState
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.run.context import RunContext
from ratel_cli.store.generation import Generation
from ratel_cli.store.store import Store


class HasState(Closing):
    """Has its training state in a store. For one thread."""

    _closed: tuple[str, str]
    """The error for whoever uses it when it is closed, and its hint."""

    def __init__(
        self,
        context: RunContext,
        spec: ModelSpec,
        store: Store,
        *,
        quantised: Mapping[str, QuantisedWeight] = MappingProxyType({}),
    ) -> None:
        """`spec`: the parameters and where they lie in the store; `quantised`: how some of them are quantised."""
        self._quantised = quantised
        self._context = context
        self._store = store
        self._pending = store.progress
        """After the last step that was computed."""
        self._stored_spec = spec
        self._is_closed = False
        self._grad_norm = math.nan

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients of the last step, from its backward on, before clipping; NaN before the first
        one."""
        return self._grad_norm

    @property
    def num_steps(self) -> int:
        """Steps that have ended, those of earlier loops on the same state included."""
        return self._pending.step

    def state(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The training state after the last step: the name of each parameter, and what torch's AdamW has of it.

        That is, in fp32 and in the parameter's shape, on the CPU: `weight`, the master weight, and if it is trained
        `exp_avg` and `exp_avg_sq`; and `step`, a scalar, the number of updates. A tied parameter has the first of its
        names. Parameters are read as they are asked for, so memory is that of one of them.

        Read it before the next step: from then on, asking for another parameter raises BadInput. Raises
        IntegrityFailure if the state is damaged.
        """
        self._settle_for("state")
        return self._states_of(self._store.current())

    def snapshot(self, directory: str | Path, *more: str | Path) -> None:
        """Copy the training state after the last step to `directory`, on another drive, and return when it is durable.

        Needs space for two copies there; with `more`, it is spread over all of them. The snapshot that this state has
        in these directories is replaced once the new one is complete; until then, and after a crash, it is valid. To
        train on from a snapshot, open or hook with `storage=[directory, *more]`: it is a training state from then on.

        Raises BadInput if there is anything else than a snapshot of this same training state, EnvironmentFailure if
        space or a permission is missing, IntegrityFailure if the state is damaged or cannot be written.
        """
        self._settle_for("snapshot")
        write_snapshot(self._context, self._store, [Path(directory), *map(Path, more)])

    def verify(self) -> None:
        """Commit the last step, and compare every byte of the training state with its checksum. Raises
        IntegrityFailure, which names the block."""
        self._settle_for("verify")
        self._store.current().check_all(self._context.pool, progress=lambda num_bytes: None)
        self._context.pool.trim()

    def _check_open(self) -> None:
        """Raise BadInput if it is closed, or another process has it."""
        if self.is_of_parent:
            raise BadInput(
                "a forked process uses the training state of its parent", "use it in the process that opened it"
            )
        if self._is_closed:
            raise BadInput(*self._closed)

    def _commit(self) -> None:
        self._store.commit(self._pending)
        deletion = self._store.deletion
        if deletion is not None:
            self._context.log.warn(deletion)

    @abstractmethod
    def _settle(self) -> None:
        """Commit the last step, if it is not yet."""

    def _check_ready(self, asked: str) -> None:  # noqa: ARG002 (where a step has two halves)
        """Raise BadInput if this is no time for what is `asked`."""
        self._check_open()

    def _settle_for(self, asked: str) -> None:
        self._check_ready(asked)
        self._settle()

    def _states_of(self, generation: Generation) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        stored = StoredState(self._stored_spec, generation, self._context.pool, quantised=self._quantised)
        for name in stored.names:
            self._check_open()
            if self._pending != generation.progress:  # its slot is one of two: the step after the next one takes it
                raise BadInput(
                    f"a step was taken before state() was read to its end: it is of step {generation.progress.step}",
                    "read all of it before the next step, or ask for state() again",
                )
            yield name, stored.whole(name)
        self._context.pool.trim()
