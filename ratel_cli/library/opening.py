"""Opens a model for a loop of the caller's own: from a directory or hub id, with its state on drives.

    1. the config   the caller's arguments, checked as those of a run are
    2. the model    its skeleton and its files
    3. the store    the one that an earlier loop left in `storage`, or a new one with the weights of the files

Invariant: a store is opened only by a loop with the same model and settings as the one that made it; no other is
replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import return_large_buffers
from ratel_cli.library.limits import Limits
from ratel_cli.library.model import Model
from ratel_cli.library.plans import LEAST, planner_for
from ratel_cli.library.settings import OWN_LOOP, WarningLog, caller_config, software
from ratel_cli.library.states import new_state, opened_state
from ratel_cli.run.context import open_context
from ratel_cli.run.inputs.base_model import Base, model_hash, open_weights, read_base
from ratel_cli.run.inputs.settings import settings_hash
from ratel_cli.run.train.planner import estimated_profile
from ratel_cli.run.train.profile_machine import measure_for_run
from ratel_cli.sizes import LOGITS_CHUNK_BYTES, DtypeName, Task
from ratel_cli.store.store import Store, StoreIdentity


def open_model(
    model: str | Path,
    *,
    storage: Sequence[str | Path],
    task: Task = "causal_lm",
    dtype: DtypeName = "bfloat16",
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
    """Open a language model for training steps of one's own. Use it as a context manager.

    `model`: a directory with config.json and safetensors files, or a Hugging Face hub id. `task`: what it predicts, the
    next token of each (`causal_lm`), the tokens that are masked (`masked_lm`), or the class of a row (`classification`;
    the model must be a classifier). `storage`: directories for
    the training state, one on each drive: two generations of 12 bytes per parameter (14 in fp16). If they have the
    state that an earlier loop left there, with the same model and settings, training resumes after its last step.
    `betas`, `eps` and `weight_decay` are AdamW's, as in torch; norms and biases do not decay. `max_grad_norm` clips the
    norm of all gradients; None does not. `random_init`: draw the weights, as transformers does, and read no weight
    files. `verbose`: print notices and progress on stderr; otherwise notices are Python's warnings.

    While it is open, torch's deterministic algorithms are on, unless `deterministic` is false. Raises RatelError.
    """
    if len(betas) != 2:
        raise BadInput(f"betas must be two numbers, not {betas}")
    config = caller_config(
        {
            "base_model": str(model),
            "dtype": dtype,
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
        },
        storage,
        limits or Limits(),
        _NAMES,
    )
    return_large_buffers()
    log = RunLog() if verbose else WarningLog()
    with ExitStack() as opening:
        base = read_base(config, log, task)
        source, layout = open_weights(config, base, opening)
        _ = base.model.row_multiple  # found by a trial on the CPU, before anything is on another device
        torch_device = compute_device(config.device)
        opening.enter_context(determinism(config.deterministic, torch_device, notice=log.notice))
        context = opening.enter_context(open_context(config, log, device=torch_device))
        identity = _identity(config, base)
        exists = Store.exists(config.storage.paths)
        hardware = measure_for_run(context, has_store=exists)
        if exists:
            store = opened_state(context, identity, _DIFFERENCES)
        else:
            planner = planner_for(context, base.model, hardware, LEAST)
            planner.plan(estimated_profile(planner, base.model))  # raises if not even the smallest step fits
            store = new_state(context, identity, base.model.spec, source, shares=hardware.nvme.weights)
        return Model(context, base, layout, store, hardware, opening.pop_all())


_NAMES = {"base_model": "model", "adam_epsilon": "eps", "adam_beta1": "betas", "adam_beta2": "betas"}
"""Arguments, by the keys of a config."""
_DIFFERENCES = {
    "model_hash": "another model or dtype",
    "config_hash": "other settings",
    "seed": "another seed",
    "data_hash": "data of its own, by a run",
}


def _identity(config: RunConfig, base: Base) -> StoreIdentity:
    return StoreIdentity(
        model_hash=model_hash(config, base.model.spec),
        config_hash=settings_hash(config),
        data_hash=OWN_LOOP,
        seed=config.seed,
        software=software(),
    )
