"""One run: opens everything it needs, in order, trains, exports.

Called by `cli.finetune` with a checked config. The one place where all parts meet; below it,
functions take plain values.

    1. config, model skeleton, tokenizer, data
    2. measure the machine, make the plan, print the opening statement      (--dry-run ends here)
    3. the store: opened where a run left it, or created and imported
    4. train step by step, each one committed
    5. export the Hugging Face directory

Nothing is written to the store before phase 3 has checked that everything fits.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from ratel_cli.cli.inputs import Inputs, changed_settings, identity_of, read_inputs
from ratel_cli.cli.render import opening, step_line
from ratel_cli.config.load import to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.adamw import AdamWSettings, OutOfCoreAdamW
from ratel_cli.engine.step import StepEngine
from ratel_cli.engine.telemetry import StepClock
from ratel_cli.engine.update import UpdateSettings
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.host import default_limit_bytes, peak_resident_bytes, resident_bytes, return_freed_memory
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.export import export_model
from ratel_cli.model.load import import_weights
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.lock import DATA_FILE_NAME
from ratel_cli.movement.queue import IoQueue, open_queue
from ratel_cli.movement.records import record_layout
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Progress, Store
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.runlog import RunLog
from ratel_cli.training.loop import LoopSettings, TrainingLoop
from ratel_cli.training.metrics import MetricsLog
from ratel_cli.training.schedule import LearningRateSchedule
from ratel_cli.training.stopping import StopRequest

_FIRST_LOSS_SCALE = 2.0**16


def carry_out(config: RunConfig, log: RunLog, *, resume: str, dry_run: bool) -> None:
    """One run from start to end. Raises RatelError."""
    return_freed_memory()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _set_determinism(config.deterministic)
    with ExitStack() as resources:
        inputs = read_inputs(config, resources, log)
        queue = resources.enter_context(open_queue(config.storage.engine, notice=log.notice))
        limit_bytes = config.limits.host_memory or default_limit_bytes()
        pool = resources.enter_context(BufferPool(limit_bytes))
        hardware, plan = _plan(config, inputs, queue, pool, limit_bytes)
        store = _find_store(config, inputs, queue, resume, log)
        if store is not None:
            resources.enter_context(store)
        log.facts(_opening(config, inputs, plan, hardware, queue, store, resume))
        if dry_run:
            return
        stop = resources.enter_context(StopRequest())
        if store is None:
            store = resources.enter_context(_make_store(config, inputs, queue, pool, resume, stop, log))
        elif resume != "auto":
            store.rewind(int(resume))
        if store.progress.step:
            log.say(f"recovered step {store.progress.step}")
        _write_run_files(config, inputs.model.spec, hardware, plan)
        _train(config, inputs, plan, store, queue, pool, stop, log)
        _export(config, inputs, store, pool, log)


def _plan(
    config: RunConfig, inputs: Inputs, queue: IoQueue, pool: BufferPool, limit_bytes: int
) -> tuple[HardwareProfile, Plan]:
    hardware = measure(
        [_nearest_existing(path) for path in config.storage.paths],
        queue,
        pool,
        dtype=DTYPES[config.dtype],
        device=inputs.device,
    )
    layout = record_layout(config.dtype)
    in_place = config.storage.durability == "none"
    plan = make_plan(
        inputs.model.spec,
        StateBytes(
            compute=layout.compute_field.bytes_per_element,
            record=layout.bytes_per_parameter,
            gradient=_gradient_dtype(config).itemsize,
        ),
        Workload(
            micro_batch_size=config.micro_batch_size,
            num_micro_batches=config.gradient_accumulation_steps,
            sequence_len=config.sequence_len,
        ),
        Decisions(
            holds_gradients=in_place or config.max_grad_norm is not None,
            num_slots=1 if in_place else 2 + config.num_saved_generations,
            host_limit_bytes=limit_bytes,
        ),
        hardware,
        process_bytes=resident_bytes(),
    )
    return hardware, plan


def _find_store(config: RunConfig, inputs: Inputs, queue: IoQueue, resume: str, log: RunLog) -> Store | None:
    """The store as the last commit left it, if there is one to go on with."""
    paths = config.storage.paths
    if resume != "no" and Store.exists(paths):
        try:
            return Store.open(paths, queue=queue, identity=identity_of(config, inputs), notice=log.notice)
        except BadInput as error:
            changed = changed_settings(config, _run_dir(config) / "config.yaml")
            if not changed:
                raise
            raise BadInput(
                f"the store in {', '.join(map(str, paths))} belongs to a run with other settings: {'; '.join(changed)}",
                "set them back to go on with that run, or start over with --resume no",
            ) from error
    if resume not in ("auto", "no"):
        raise BadInput(f"there is no saved step {resume}: no store in {', '.join(map(str, paths))}")
    return None


def _make_store(
    config: RunConfig,
    inputs: Inputs,
    queue: IoQueue,
    pool: BufferPool,
    resume: str,
    stop: StopRequest,
    log: RunLog,
) -> Store:
    """A new store with the base model's weights as its first generation."""
    identity, paths = identity_of(config, inputs), config.storage.paths
    spec = inputs.model.spec
    in_place = config.storage.durability == "none"
    num_slots = 1 if in_place else 2 + config.num_saved_generations
    with ExitStack() as opened:
        layout = record_layout(config.dtype)
        elements = [block.num_elements for block in spec.blocks]
        total = num_slots * layout.bytes_per_parameter * sum(elements)
        with log.bar("preparing the store", total) as bar:

            def prepared(num_bytes: int) -> None:
                stop.check()
                bar.advance(num_bytes)

            store = opened.enter_context(
                Store.create(
                    paths,
                    identity=identity,
                    layout=layout,
                    block_elements=elements,
                    num_slots=num_slots,
                    queue=queue,
                    in_place=in_place,
                    overwrite=resume == "no",
                    progress=prepared,
                    notice=log.notice,
                )
            )
        with log.bar("importing weights", spec.num_parameters) as bar:

            def imported(num_parameters: int) -> None:
                stop.check()
                bar.advance(num_parameters)

            import_weights(spec, inputs.source, store, pool, progress=imported)
        store.commit_import(Progress(step=0, updates=0, loss_scale=_FIRST_LOSS_SCALE, good_steps=0, tokens=0))
        pool.trim()
        opened.pop_all()
    return store


def _train(
    config: RunConfig,
    inputs: Inputs,
    plan: Plan,
    store: Store,
    queue: IoQueue,
    pool: BufferPool,
    stop: StopRequest,
    log: RunLog,
) -> None:
    clock = StepClock()
    with ExitStack() as resources:
        scratch = None
        if plan.spilled_bytes:
            scratch = resources.enter_context(Scratch(config.storage.paths, plan.spilled_bytes, queue))
        optimizer = OutOfCoreAdamW(
            AdamWSettings(
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                epsilon=config.adam_epsilon,
                weight_decay=config.weight_decay,
            ),
            store,
            pool,
            clock=clock,
        )
        engine = StepEngine(
            inputs.model,
            store,
            pool,
            optimizer,
            UpdateSettings(
                gradient_dtype=_gradient_dtype(config),
                max_grad_norm=config.max_grad_norm,
                hold=plan.decisions.holds_gradients,
                held_in_memory_bytes=plan.held_in_memory_bytes,
            ),
            seed=config.seed,
            device=inputs.device,
            clock=clock,
            scratch=scratch,
            check_stop=stop.check,
        )
        metrics_log = resources.enter_context(
            MetricsLog(_run_dir(config) / "metrics.jsonl", committed_step=store.progress.step, warn=log.warn)
        )
        loop = TrainingLoop(
            engine,
            store,
            queue,
            inputs.data,
            LearningRateSchedule(
                scheduler=config.lr_scheduler,
                peak=config.learning_rate,
                num_warmup_steps=config.warmup_steps or int(config.warmup_ratio * inputs.num_steps),
                num_steps=inputs.num_steps,
            ),
            LoopSettings(
                num_steps=inputs.num_steps,
                micro_batches_per_step=config.gradient_accumulation_steps,
                scale_loss=config.dtype == "float16",
                eval_steps=config.eval_steps,
                save_steps=config.save_steps,
                save_total_limit=config.save_total_limit,
                max_bytes_written=_max_bytes_written(config),
                flops_forward_per_token=plan.flops_forward / plan.workload.tokens,
                flops_recomputed_per_token=plan.flops_recomputed / plan.workload.tokens,
                predicted_seconds=plan.time.total,
            ),
            clock=clock,
            check_stop=stop.check,
            host_peak_bytes=peak_resident_bytes,
            announce=metrics_log.announce,
        )
        with log.bar("training", inputs.num_steps - store.progress.step) as bar:
            for metrics in loop.steps():
                metrics_log.write(metrics)
                bar.advance()
                if metrics.step % config.logging_steps == 0 or metrics.step in (1, inputs.num_steps):
                    log.say(step_line(metrics, inputs.num_steps))


def _export(config: RunConfig, inputs: Inputs, store: Store, pool: BufferPool, log: RunLog) -> None:
    export_model(
        inputs.model.spec,
        store,
        pool,
        base_dir=inputs.base_dir,
        output_dir=config.output_dir,
        dtype=config.dtype,
        buffers=inputs.buffers,
        base_model=None if Path(config.base_model or "").exists() else config.base_model,
    )
    log.say(f"saved {config.output_dir}; load it with transformers' from_pretrained")
    log.say(
        f"the training state stays in {', '.join(map(str, config.storage.paths))}; "
        "delete it when you do not want to train on"
    )


def _opening(
    config: RunConfig,
    inputs: Inputs,
    plan: Plan,
    hardware: HardwareProfile,
    queue: IoQueue,
    store: Store | None,
    resume: str,
) -> list[tuple[str, str]]:
    first_step = 0 if store is None else store.progress.step if resume == "auto" else int(resume)
    return opening(
        inputs.model.spec,
        plan,
        hardware,
        dtype=config.dtype,
        samples=inputs.data.num_samples,
        data_tokens=inputs.data.num_tokens,
        num_steps=inputs.num_steps,
        first_step=first_step,
        engine=queue.engine,
        paths=config.storage.paths,
        output_dir=config.output_dir,
        taken_bytes=sum(file.stat().st_size for file in _data_files(config) if file.is_file()),
    )


def _data_files(config: RunConfig) -> list[Path]:
    return [path / DATA_FILE_NAME for path in config.storage.paths]


def _write_run_files(config: RunConfig, spec: ModelSpec, hardware: HardwareProfile, plan: Plan) -> None:
    run_dir = _run_dir(config)
    values = {"hardware.json": hardware.to_json(), "model.json": spec.to_json(), "plan.json": plan.to_json()}
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        for name, value in values.items():
            (run_dir / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(
            f"{run_dir}: cannot be written: {error.strerror}", "choose another output_dir"
        ) from error


def _run_dir(config: RunConfig) -> Path:
    return config.output_dir / "run"


def _gradient_dtype(config: RunConfig) -> torch.dtype:
    return DTYPES[config.dtype if config.gradient_dtype == "auto" else config.gradient_dtype]


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # It would fill every placeholder of the tape with NaN, and touch its memory for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _max_bytes_written(config: RunConfig) -> int | None:
    limit = config.storage.max_tb_written
    return None if limit is None else int(limit * 1e12)


def _nearest_existing(path: Path) -> Path:
    """Where a file for measuring can be made without creating directories: on the same drive, mostly."""
    for candidate in (path, *path.absolute().parents):
        if candidate.is_dir():
            return candidate
    return Path("/")
