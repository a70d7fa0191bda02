"""Opens a model for a loop of the caller's own, with its state on drives: one from a directory or hub id, or a module.

    1. the config   the caller's arguments, checked as those of a run are
    2. the model    its skeleton and its files, or the module cut at its blocks
    3. the store    the one that an earlier loop left in `storage`, or a new one with the weights of the files

Invariant: a store is opened only by a loop with the same model and settings as the one that made it; no other is
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_QUANTISATION
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import return_large_buffers
from ratel_cli.library.batches import Tensors
from ratel_cli.library.initialising import INIT, storage_of
from ratel_cli.library.limits import Limits
from ratel_cli.library.model import Model
from ratel_cli.library.plans import least_of, planner_for
from ratel_cli.library.settings import OWN_LOOP, WarningLog, caller_config, software
from ratel_cli.library.states import new_state, opened_state
from ratel_cli.library.surroundings import usual_settings
from ratel_cli.library.trained_model import TrainedModel, language_model, module_model
from ratel_cli.model.cut.hooked import own_dtype
from ratel_cli.model.cut.module_weights import as_it_was_on_failure
from ratel_cli.run.context import open_context
from ratel_cli.run.inputs.settings import settings_hash
from ratel_cli.run.train.planner import estimated_profile
from ratel_cli.run.train.profile_machine import measure_for_run
from ratel_cli.sizes import LOGITS_CHUNK_BYTES, DtypeName, Task
from ratel_cli.store.store import Store, StoreIdentity


@usual_settings("ratel.open")
def open_model(
    model: str | Path | nn.Module,
    *,
    storage: Sequence[str | Path] | None = None,
    sample: Tensors | None = None,
    blocks: str | Sequence[str] | None = None,
    task: Task = "causal_lm",
    dtype: DtypeName | None = None,
    adapter: Mapping[str, object] | None = None,
    limits: Limits | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    random_init: bool = False,
    deterministic: bool = True,
    seed: int = 42,
    verbose: bool = False,
) -> Model:
    """Open a model for training steps of one's own. Use it as a context manager.

    `model`: a directory with config.json and safetensors files of a language model, or a Hugging Face hub id; or any
    module with one stack of blocks, which is this model's from now on. `storage`: directories for the training state,
    one on each drive: two generations of 12 bytes per parameter (14 in fp16); None: those of the `init` around it. If
    they have the state that an earlier loop left there, with the same model and settings, training resumes after its
    last step.

    Of a language model: `task` is what it predicts, the next token of each (`causal_lm`), the tokens that are masked
    (`masked_lm`), or the class of a row (`classification`; the model must be a classifier); `dtype`: None: bfloat16.
    `adapter`: train a LoRA adapter beside the frozen model, with a config's keys, such as `{"lora_r": 16}`; what is
    saved is then the adapter, in PEFT's format.
    Of a module: `sample` has what its forward gets by name, `[samples, ..]`, and `blocks` is as `hook` takes it; the
    dtype is that of its parameters.

    `betas`, `eps` and `weight_decay` are AdamW's, as in torch; norms and biases do not decay. `max_grad_norm` clips the
    norm of all gradients; None does not. `random_init`: draw the weights, as transformers does, and read no weight
    files. `verbose`: print notices and progress on stderr; otherwise notices are Python's warnings.

    While it is open, torch's deterministic algorithms are on, unless `deterministic` is false. Raises RatelError.
    """
    if len(betas) != 2:
        raise BadInput(f"betas must be two numbers, not {betas}")
    module = model if isinstance(model, nn.Module) else None
    given: dict[str, object] = {"sample": sample, "blocks": blocks, "dtype": dtype, "random_init": random_init}
    given |= {"task": task, "adapter": adapter}
    _reject_arguments_of_others(given, is_module=module is not None)
    storage, limits = storage_of(storage, limits, asked_by="open")
    config = caller_config(
        {
            "base_model": str(model) if module is None else type(module).__name__,
            "dtype": dtype or "bfloat16" if module is None else own_dtype(module),
            "device": device,
            "adam_beta1": betas[0],
            "adam_beta2": betas[1],
            "adam_epsilon": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "random_init": random_init,
            "deterministic": deterministic,
            "seed": seed,
            "head_chunk": LOGITS_CHUNK_BYTES,
            **_adapter_keys(adapter),
        },
        storage,
        limits or Limits(),
        _NAMES,
    )
    log = RunLog() if verbose else WarningLog()
    if module is None:
        return _opened(config, log, None, partial(language_model, config, log, task))
    return _opened(config, log, module, partial(module_model, module, sample, blocks))


def _opened(
    config: RunConfig, log: RunLog, module: nn.Module | None, find: Callable[[ExitStack], TrainedModel]
) -> Model:
    """Phases 2 and 3. `find` gives the model, and `module` is the caller's own if it is one."""
    around = None if module is None else INIT.get()
    return_large_buffers()
    with nullcontext() if module is None else as_it_was_on_failure(module), ExitStack() as opening:
        trained = find(opening)
        torch_device = compute_device(config.device)
        opening.enter_context(determinism(config.deterministic, torch_device, notice=log.notice))
        context = opening.enter_context(open_context(config, log, device=torch_device))
        if around is not None:
            around.unload()
        identity = StoreIdentity(
            model_hash=trained.identity,
            config_hash=settings_hash(config),
            data_hash=OWN_LOOP,
            seed=config.seed,
            software=software(),
        )
        exists = Store.exists(config.storage.paths)
        hardware = measure_for_run(context, has_store=exists)
        if exists:
            store = opened_state(context, identity, _DIFFERENCES)
        else:
            planner = planner_for(context, trained.model, hardware, least_of(trained.model))
            planner = replace(planner, process_bytes=max(0, planner.process_bytes - trained.weight_bytes))
            planner.plan(estimated_profile(planner, trained.model))  # raises if not even the smallest step fits
            store = new_state(context, identity, trained.model.spec, trained.weights, shares=hardware.nvme.shares)
        made = Model(context, trained, store, hardware, opening.pop_all())
    trained.forget_weights()
    return made


_NAMES = {"base_model": "model", "adam_epsilon": "eps", "adam_beta1": "betas", "adam_beta2": "betas"}
"""Arguments, by the keys of a config."""
_DIFFERENCES = {
    "model_hash": "another model or dtype",
    "config_hash": "other settings",
    "seed": "another seed",
    "data_hash": "data of its own, by a run",
}


def _reject_arguments_of_others(given: Mapping[str, object], *, is_module: bool) -> None:
    """Raise BadInput for an argument that is for models of the other kind. `given`: by name."""
    others = ("dtype", "random_init", "task", "adapter") if is_module else ("sample", "blocks")
    wrong = next((name for name in others if given[name] not in (None, False, "causal_lm")), None)
    if wrong is not None:
        raise BadInput(f"{wrong} is for {'language models' if is_module else 'modules'}", f"leave {wrong} out")


def _adapter_keys(adapter: Mapping[str, object] | None) -> dict[str, object]:
    """The keys of a config for an adapter; none without one. Raises BadInput for keys of something else."""
    if adapter is None:
        return {}
    known = (*OF_ADAPTER, *OF_QUANTISATION, "loraplus_lr_ratio")
    wrong = next((name for name in adapter if name not in known), None)
    if wrong is not None:
        raise BadInput(f"adapter: {excerpt(str(wrong))} is no key of an adapter", f"its keys are {', '.join(known)}")
    return {"adapter": "lora", **adapter}
