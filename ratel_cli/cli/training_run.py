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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
import transformers

from ratel_cli.cli.inputs import Inputs, read_inputs
from ratel_cli.cli.render import opening, run_summary, step_line
from ratel_cli.cli.run_store import find_store, make_store, num_slots
from ratel_cli.config.load import to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.adamw import AdamWSettings
from ratel_cli.engine.opening import open_engine
from ratel_cli.engine.telemetry import StepTimes, Timeline
from ratel_cli.engine.trace import TraceFile
from ratel_cli.engine.update import UpdateSettings
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.host import default_limit_bytes, peak_resident_bytes, resident_bytes, return_freed_memory
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.export import export_model
from ratel_cli.model.skeleton import DTYPES
from ratel_cli.model.spec import ModelSpec
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.files import nearest_existing
from ratel_cli.movement.lock import DATA_FILE_NAME
from ratel_cli.movement.queue import IoQueue, open_queue
from ratel_cli.movement.records import record_layout
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Store
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.runlog import RunLog
from ratel_cli.training.loop import LoopSettings, TrainingLoop
from ratel_cli.training.metrics import MetricsLog, RunTotals
from ratel_cli.training.schedule import LearningRateSchedule
from ratel_cli.training.stopping import StopRequest
from ratel_cli.units import format_bytes


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
        store = find_store(config, inputs, queue, resume, log)
        if store is not None:
            resources.enter_context(store)
        hardware, plan = _plan(config, inputs, queue, pool, limit_bytes, store, log)
        log.facts(_opening(config, inputs, plan, hardware, queue, store, resume))
        if store is None:
            _check_space(config, plan, hardware)
        if dry_run:
            return
        stop = resources.enter_context(StopRequest())
        if store is None:
            store = resources.enter_context(make_store(config, inputs, hardware, queue, pool, resume, stop, log))
        elif resume != "auto":
            store.rewind(int(resume))
        if store.progress.step:
            log.say(f"recovered step {store.progress.step}")
        _write_run_files(config, inputs.model.spec, hardware, plan, log)
        _train(config, inputs, hardware, plan, store, queue, pool, stop, log)
        stop.check()
        _export(config, inputs, store, pool, stop, log)


def _plan(
    config: RunConfig,
    inputs: Inputs,
    queue: IoQueue,
    pool: BufferPool,
    limit_bytes: int,
    store: Store | None,
    log: RunLog,
) -> tuple[HardwareProfile, Plan]:
    hardware = _measure(config, inputs, queue, pool, store, log)
    layout = record_layout(config.dtype)
    slots = num_slots(config)
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
            holds_gradients=slots == 1 or config.max_grad_norm is not None,
            num_slots=slots,
            host_limit_bytes=limit_bytes,
            activations=_activations(config),
            overlap=config.optimizer_overlap,
        ),
        hardware,
        process_bytes=resident_bytes(),
    )
    return hardware, plan


def _measure(
    config: RunConfig, inputs: Inputs, queue: IoQueue, pool: BufferPool, store: Store | None, log: RunLog
) -> HardwareProfile:
    paths, dtype = [nearest_existing(path) for path in config.storage.paths], DTYPES[config.dtype]
    try:
        return measure(paths, queue, pool, dtype=dtype, device=inputs.device)
    except EnvironmentFailure as failure:
        if store is None:
            raise
        # A store that exists needs no more space, so a full disk is no reason not to go on.
        log.warn(f"the drives could not be measured: {failure.message}; the prediction assumes 1 GB/s")
        return measure(paths, queue, pool, dtype=dtype, device=inputs.device, nvme_rates=(1e9, 1e9))


def _train(
    config: RunConfig,
    inputs: Inputs,
    hardware: HardwareProfile,
    plan: Plan,
    store: Store,
    queue: IoQueue,
    pool: BufferPool,
    stop: StopRequest,
    log: RunLog,
) -> None:
    timeline, totals = Timeline(), RunTotals()
    with ExitStack() as resources:
        scratch = None
        if plan.spilled_bytes:
            scratch = resources.enter_context(
                Scratch(config.storage.paths, plan.spilled_bytes, queue, weights=hardware.nvme.weights)
            )
        engine = resources.enter_context(
            open_engine(
                inputs.model,
                store,
                pool,
                adamw=AdamWSettings(
                    beta1=config.adam_beta1,
                    beta2=config.adam_beta2,
                    epsilon=config.adam_epsilon,
                    weight_decay=config.weight_decay,
                ),
                updates=UpdateSettings(
                    gradient_dtype=_gradient_dtype(config),
                    max_grad_norm=config.max_grad_norm,
                    hold=plan.decisions.in_place,
                    held_in_memory_bytes=plan.held_in_memory_bytes,
                    overlap=config.optimizer_overlap,
                ),
                placement=plan.placement,
                seed=config.seed,
                device=inputs.device,
                timeline=timeline,
                scratch=scratch,
                check_stop=stop.check,
            )
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
            timeline=timeline,
            check_stop=stop.check,
            host_peak_bytes=peak_resident_bytes,
            announce=metrics_log.write,
            draw=_open_trace(config, resources, log),
        )
        with log.bar("training", inputs.num_steps - store.progress.step) as bar:
            for metrics in loop.steps():
                metrics_log.write(metrics)
                totals.add(metrics)
                bar.advance()
                if metrics.step % config.logging_steps == 0 or metrics.step in (1, inputs.num_steps):
                    log.say(step_line(metrics, inputs.num_steps))
    log.facts(run_summary(totals))


def _open_trace(config: RunConfig, resources: ExitStack, log: RunLog) -> Callable[[int, StepTimes, float], None]:
    """What the loop tells each step to; nothing is drawn unless the config says so."""
    if not config.trace:
        return lambda step, times, start: None
    trace = resources.enter_context(TraceFile(_run_dir(config) / "trace.json", warn=log.warn))
    return lambda step, times, start: trace.write_step(step, times.spans, start=start, end=perf_counter())


def _export(config: RunConfig, inputs: Inputs, store: Store, pool: BufferPool, stop: StopRequest, log: RunLog) -> None:
    export_model(
        inputs.model.spec,
        store,
        pool,
        base_dir=inputs.base_dir,
        output_dir=config.output_dir,
        dtype=config.dtype,
        buffers=inputs.buffers,
        base_model=None if Path(config.base_model or "").exists() else config.base_model,
        progress=stop.check,
    )
    log.say(f"saved {config.output_dir}; load it with transformers' from_pretrained")
    log.say(
        f"the training state stays in {', '.join(map(str, config.storage.paths))}; "
        "delete it when it is no longer needed"
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
        taken_bytes=_taken_bytes(config),
    )


def _taken_bytes(config: RunConfig) -> int:
    """What an earlier store of this run holds already, or frees when it is replaced."""
    files = [path / DATA_FILE_NAME for path in config.storage.paths]
    return sum(file.stat().st_size for file in files if file.is_file())


def _check_space(config: RunConfig, plan: Plan, hardware: HardwareProfile) -> None:
    """The store and the scratch file must fit together. Each directory is checked again when it is filled."""
    have_bytes = hardware.nvme.free_bytes + _taken_bytes(config)
    if plan.nvme_bytes > have_bytes:
        raise EnvironmentFailure(
            f"no space for the store: need {format_bytes(plan.nvme_bytes)} in "
            f"{', '.join(map(str, config.storage.paths))}, have {format_bytes(have_bytes)}",
            "free some space, name other directories in storage.paths, or set storage.durability: none for half of it",
        )


def _write_run_files(config: RunConfig, spec: ModelSpec, hardware: HardwareProfile, plan: Plan, log: RunLog) -> None:
    run_dir = _run_dir(config)
    values = {"hardware.json": hardware.to_json(), "model.json": spec.to_json(), "plan.json": plan.to_json()}
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        for name, value in values.items():
            (run_dir / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warn(f"{run_dir}: cannot be written ({error.strerror}); training goes on without it")


def _run_dir(config: RunConfig) -> Path:
    return config.output_dir / "run"


def _gradient_dtype(config: RunConfig) -> torch.dtype:
    return DTYPES[config.dtype if config.gradient_dtype == "auto" else config.gradient_dtype]


def _activations(config: RunConfig) -> Literal["auto", "keep", "recompute"]:
    """What the plan can carry out so far: nothing is swapped."""
    return config.activations if config.activations in ("auto", "keep") else "recompute"


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # It would fill every placeholder of the tape with NaN, and touch its memory for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _max_bytes_written(config: RunConfig) -> int | None:
    limit = config.storage.max_tb_written
    return None if limit is None else int(limit * 1e12)
