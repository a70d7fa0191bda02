"""Hooks a module of any kind: its parameters go to drives, and its blocks fetch their weights whenever they are called.

The module stays the caller's: any loop, any loss, several modules at once. Only the training state is Ratel's.

    1. find    the blocks, or take those that are named; what is outside of them stays in memory
    2. store   write all parameters to the drives, or open the state that an earlier loop left there
    3. hook    let each block's `forward` fetch the weights, compute, and give them up
    4. follow  an optimizer (library/optimizer.py), whose steps end in backward

Invariant: a store is opened only by a module with the same parameters as the one that made it; no other is replaced.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.phases import StepDecision
from ratel_cli.engine.optimizer.settings import adamw_settings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.steps.build import UpdatingParts, open_device
from ratel_cli.engine.steps.following import EngineSettings
from ratel_cli.engine.steps.horizontal import HorizontalEngine
from ratel_cli.errors import BadInput, Diverged
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.hardware.host import kept_bytes, num_cores, return_large_buffers
from ratel_cli.library.block_call import Forward, HookedBlock, PassedOn
from ratel_cli.library.has_state import HasState
from ratel_cli.library.initialising import INIT, storage_of
from ratel_cli.library.limits import Limits
from ratel_cli.library.loop_rules import LoopRules
from ratel_cli.library.optimizer import HOOKED, AdamW
from ratel_cli.library.settings import OWN_LOOP, WarningLog, caller_config, software
from ratel_cli.library.states import new_state, opened_state
from ratel_cli.library.trained_model import save_module
from ratel_cli.model.cut.hooked import HookedModule, find_module_blocks, identity_of
from ratel_cli.model.cut.module_weights import ModuleWeights
from ratel_cli.model.values.away import AwayGradient, AwayParameter
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.search.horizontal import HorizontalPlan, plan_horizontal
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.loop import progress_after

_THREADS = 4
"""Threads of AdamW, at most one for each core: enough for the fastest drives."""


def hook(
    module: nn.Module,
    *,
    storage: Sequence[str | Path] | None = None,
    blocks: str | Sequence[str] | None = None,
    outside: Sequence[str] = (),
    limits: Limits | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Hooked:
    """Send a module's parameters to drives. Its blocks fetch them whenever they are called, in any loop.

    `storage`: directories for the training state, one on each drive: two generations of 12 bytes per parameter; None:
    those of the `init` around it, whose limits count, too. If they have the state that an earlier loop left there for
    the same parameters, training resumes with it, whatever values the module has. `blocks`: the name of a list of
    blocks in the module, or several, or names of blocks; None: its outermost ModuleLists and Sequentials. `outside`:
    names of modules within blocks that code outside uses, too. What is outside of the blocks stays in memory.

    The module must have its last form: parameters in float32 or bfloat16, those that are not trained without
    `requires_grad`. Raises RatelError.
    """
    if module in HOOKED:
        raise BadInput(f"this {type(module).__name__} is hooked already")
    around, (storage, limits) = INIT.get(), storage_of(storage, limits, asked_by="hook")
    source = ModuleWeights(module)
    hooked = HookedModule(module, find_module_blocks(module, blocks), outside=outside)
    config = caller_config(
        {
            "base_model": type(module).__name__,
            "dtype": hooked.spec.dtype,
            "device": device,
            "max_grad_norm": None,
        },
        storage,
        limits or Limits(),
        {"base_model": "module"},
    )
    return_large_buffers()
    with torch.inference_mode(mode=False), torch.device("cpu"), ExitStack() as opening:  # whatever is set around it
        torch_device = compute_device(config.device)
        context = opening.enter_context(open_context(config, WarningLog(), device=torch_device))
        if around is not None:
            around.unload()
        process_bytes = max(0, kept_bytes() - source.num_bytes)
        planned = partial(_planned, context, process_bytes=process_bytes)
        planned(hooked.spec, None)  # raises if nothing fits, before a byte is written
        identity = StoreIdentity(
            model_hash=identity_of(hooked.spec), config_hash="hooked", data_hash=OWN_LOOP, seed=0, software=software()
        )
        paths = config.storage.paths
        if Store.exists(paths):
            store = opened_state(context, identity, dict.fromkeys(asdict(identity), "other parameters"))
        else:
            store = new_state(context, identity, hooked.spec, source, shares=(1,) * len(paths))
        made = Hooked(context, hooked, store, opening.pop_all(), planned)
    HOOKED[module] = made
    return made


class Hooked(HasState):
    """The training state of a hooked module, made by `hook`. Use it as a context manager, or close it."""

    _closed = ("the hooked module is closed", "hook it again: its state is in its storage")

    def __init__(
        self,
        context: RunContext,
        hooked: HookedModule,
        store: Store,
        resources: ExitStack,
        planned: Callable[[ModelSpec, AdamW | None], HorizontalPlan],
    ) -> None:
        """`resources` closes everything that is open. `planned`: the plan for an optimizer, or for none."""
        super().__init__(context, hooked.spec, store)
        self._hooked = hooked
        self._resources = resources
        self._engines = resources.enter_context(ExitStack())
        """Closed first: the engine."""
        self._engine: HorizontalEngine | None = None
        self._optimizer: AdamW | None = None
        self._rules = LoopRules(hooked)
        self.plan = planned(hooked.spec, None)
        """What steps follow."""
        self._planned = planned
        self._timeline = Timeline()
        self._passed_on = PassedOn()
        self._last_index = 0
        """Index of the block that was called last."""
        self._unhooking = ExitStack()
        """Gives the module its own code back."""
        self._accumulators: list[Node] = []
        """Where autograd accumulates the gradients of what is outside of the blocks."""
        try:
            self._hook()
        except BaseException:
            self.close()
            raise
        # Before the interpreter ends the threads that the last step is written with; `atexit` would come after that.
        threading._register_atexit(partial(_close_if_there, weakref.ref(self)))  # type: ignore[attr-defined]

    @property
    def spec(self) -> ModelSpec:
        """The module's blocks."""
        return self._hooked.spec

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write the weights as they are after the last step: safetensors files with the module's own names, and the
        config of a model of transformers.

        A file that Ratel did not write is replaced only with `overwrite`. Raises BadInput, EnvironmentFailure.
        """
        self._settle_for("save")
        hooked = self._hooked
        output, context = Path(directory), self._context
        for text in save_module(hooked.module, hooked.spec, context, self._store, output, overwrite=overwrite):
            context.log.notice(text)

    def follow(self, optimizer: AdamW) -> None:
        """Update by this optimizer from now on."""
        self._check_open()
        if self._engine is not None and self._engine.has_gradients:
            raise BadInput(
                "an optimizer is made while gradients wait for the end of a step", "make it before the first backward"
            )
        self._settle_for("ratel.AdamW")
        self._engine = None
        self._engines.close()
        self._optimizer = optimizer
        decays = optimizer.decays
        self._hooked.decay_by(
            {name: decays.get(id(each), False) for name, each in self._hooked.module.named_parameters()}
        )
        self._opened_engine()

    def end_step(self, optimizer: AdamW) -> None:
        """End the step, if its last backward has not ended it. Raises BadInput."""
        self._check_open()
        if optimizer is not self._optimizer:
            raise BadInput("another optimizer was made after this one, and updates the module now")
        engine = self._opened_engine()
        engine.drop_failed()
        if engine.has_gradients:
            engine.end_step()
        self._rules.end()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that has not ended. Raises BadInput if the update of one that has was theirs."""
        self._rules.see("zero_grad()")
        if self._engine is not None:
            self._engine.drop()
        self._rules.clear()

    def close(self) -> None:
        """Commit the last step and give everything back; the module can be hooked again, and not be used before.
        Gradients of a step that has not ended are dropped, and so is a step that has, in a loop that calls `step()` and
        has not called it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        HOOKED.pop(self._hooked.module, None)
        self._unhooking.close()
        with self._resources:
            if not self._rules.leaves_step_out:
                self._settle()
            self._rules.clear()
            self._hooked.leave()

    def _hook(self) -> None:
        self._hooked.send_away(self._context.device)
        for index, block in enumerate(self._hooked.blocks.values()):
            self._replace(block, "forward", self._forward(index, block))
        module, undo = self._hooked.module, self._unhooking.callback
        self._replace(module, "zero_grad", self._zero_grad)
        for name in ("state_dict", "load_state_dict", "__reduce_ex__"):  # the last one: pickle asks the instance
            self._replace(module, name, _no_state_dict)
        undo(module.register_forward_pre_hook(lambda *_: self._passed_on.clear()).remove)
        undo(module.register_forward_hook(lambda *_: self._passed_on.clear(), always_call=True).remove)
        self._opened_engine()
        for _, parameter in self._hooked.trained:
            if not isinstance(parameter, AwayParameter):
                self._accumulators.append(get_gradient_edge(parameter).node)
                undo(self._accumulators[-1].register_prehook(partial(self._take_outside, parameter)).remove)

    def _replace(self, module: nn.Module, name: str, value: object) -> None:
        """Give a module another attribute until it is unhooked."""
        attributes, absent = vars(module), object()
        before = attributes.get(name, absent)
        attributes[name] = value

        def undo() -> None:
            if before is absent:
                del attributes[name]
            else:
                attributes[name] = before

        self._unhooking.callback(undo)

    def _forward(self, index: int, module: nn.Module) -> Forward:
        shared = self._hooked.shared_by(module)
        block = HookedBlock(index=index, module=module, forward=module.forward, shared=shared)

        def hooked_forward(*arguments: object, **keywords: object) -> object:
            if torch.compiler.is_compiling():
                raise BadInput(
                    "torch.compile compiles a hooked module, and the weights of its blocks are on the drives",
                    "compile blocks, and before ratel.hook: net.layers[0] = torch.compile(net.layers[0])",
                )
            self._check_open()
            self._hooked.check_flags(index)
            self._rules.see("a forward")
            if index < self._last_index:
                self._passed_on.clear()  # another forward begins
            self._last_index = index
            return block.call(self._opened_engine(), arguments, keywords, self._passed_on)

        return hooked_forward

    def _zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (as torch has it)
        self.drop_gradients()

    def _take_outside(self, parameter: nn.Parameter, _: tuple[torch.Tensor, ...]) -> None:
        """Autograd accumulates a gradient for a parameter outside of the blocks."""
        self._opened_engine().begin_pass()
        if isinstance(parameter.grad, AwayGradient):
            parameter.grad = None

    def _check_ready(self, asked: str) -> None:
        self._check_open()
        self._rules.see(f"{asked}()")
        self._hooked.check()
        if self._engine is not None:
            self._engine.check_outside()

    def _settle(self) -> None:
        if self._engine is not None:
            self._engine.settle()

    def _ended(self, step: StepDecision) -> None:
        self._grad_norm = step.norm
        self._passed_on.clear()
        self._rules.clear()
        if step.first_not_finite is not None or not math.isfinite(step.norm):
            what = step.first_not_finite or "all parameters together"
            raise Diverged(
                f"step {self._pending.step + 1}: the gradient of {what} is not finite; step {self._pending.step} is "
                "saved",
                "lower the learning rate",
            )
        self._pending = progress_after(self._pending, applied=True, num_tokens=0, scale_loss=False)
        self._rules.step_has_ended(step.norms)

    def _opened_engine(self) -> HorizontalEngine:
        if self._engine is not None:
            return self._engine
        context, optimizer = self._context, self._optimizer
        plan = self.plan = self._planned(self._hooked.spec, optimizer)
        settings = EngineSettings(
            optimizer=_NO_ADAMW if optimizer is None else optimizer.settings,
            updates=UpdateSettings(
                max_grad_norm=None if optimizer is None else optimizer.max_grad_norm,
                holds_all=False,
                held_in_memory_bytes=plan.memory.held_gradients if plan.num_spilled else None,
            ),
            placement=plan.placement,
            seed=0,
            gradient_scratch_bytes=plan.spilled_bytes,
        )
        device = self._engines.enter_context(open_device(context.device, self._timeline))
        parts = self._engines.enter_context(
            UpdatingParts(
                self._hooked,
                self._store,
                queue=context.queue,
                pool=context.pool,
                device=device,
                timeline=self._timeline,
                paths=context.config.storage.paths,
            )
        )
        self._engine = self._engines.enter_context(
            HorizontalEngine(
                self._hooked,
                parts.follow(settings),
                _NoOptimizer() if optimizer is None else optimizer,
                device=device,
                timeline=self._timeline,
                num_updates=lambda: self._pending.updates,
                commit=self._commit,
                begins=self._rules.begin,
                waits=self._rules.wait,
                ended=self._ended,
            )
        )
        return self._engine


_NO_ADAMW = adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0)


class _NoOptimizer:
    """Takes the place of the optimizer of a module that is not trained yet."""

    num_rounds = 1

    def begin_step(self) -> float:
        """There is no rate."""
        raise BadInput("the hooked module has no optimizer", "make one before backward: ratel.AdamW(module, lr=1e-4)")


def _close_if_there(hooked: weakref.ref[Hooked]) -> None:
    """The program ends."""
    found = hooked()
    if found is not None:
        found.close()


def _planned(context: RunContext, spec: ModelSpec, optimizer: AdamW | None, *, process_bytes: int) -> HorizontalPlan:
    return plan_horizontal(
        spec,
        holds_gradients=optimizer is not None and optimizer.max_grad_norm is not None,
        has_sums=optimizer is not None and optimizer.num_rounds > 1,
        process_bytes=process_bytes,
        limit_bytes=context.host_limit_bytes,
        num_drives=len(context.config.storage.paths),
        num_threads=min(_THREADS, num_cores()),
    )


def _no_state_dict(*_: object, **__: object) -> None:
    raise BadInput(
        "the weights of a hooked module are on its drives, and cannot be taken, copied or loaded here",
        "write them with save() of what ratel.hook gave; load others before ratel.hook",
    )
