"""Checks everything that a run has left: every byte of its store, and its export.

    1. every saved generation of the store, chunk by chunk, against its checksums; also the snapshot's generation
    2. the export's files: their headers, every value, and the checksums that the export noted in its marker
    3. the export's tokenizer against the run's
    4. the export, loaded by transformers or diffusers
    5. the export's weights against those of the generation that it was made from, bit for bit
    6. the export's outputs against those of that generation, computed with one block in memory at a time

Invariants: nothing is changed. A check that depends on something that was found wrong is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.text.tokenizer import NoTokenizer, tokenizer_hash
from ratel_cli.engine.reading.block_reader import BlockReader, GenerationBlocks
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure, excerpt
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.export.denoiser import load_denoiser
from ratel_cli.model.export.reload import check_values, holds_export, load_language_model, loaded_bytes, read_parameter
from ratel_cli.model.files.denoiser_config import is_denoiser
from ratel_cli.model.files.directory import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    DENOISER_WEIGHTS_NAME,
    WEIGHTS_NAME,
    find_weight_files,
    resolve_base_model,
    weights_bytes,
)
from ratel_cli.model.files.marker import WrittenFile, has_written_content, read_marker
from ratel_cli.model.files.shards import ShardReader
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.report.words.verify import Check
from ratel_cli.run.context import RunContext, open_context, stoppable_bar
from ratel_cli.run.files.run_directory import paths_in
from ratel_cli.run.inputs.base import check_model
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.tokenizer import read_tokenizer, without_tokenizer_keys
from ratel_cli.run.train.open import OpenedRun, open_run, snapshot_of_all
from ratel_cli.store.generation import Generation
from ratel_cli.store.joined import Readable
from ratel_cli.store.store import Store
from ratel_cli.training.stopping import StopRequest
from ratel_cli.units import counted, format_bytes, format_count, format_rate, format_seconds

_ReadValues = Callable[[str, int, int], torch.Tensor]
"""Reads elements of a parameter of the export, given its name, the first element and their number."""
_CHANGED = "changed or removed since the export"


def verify_run(config: RunConfig, log: RunLog) -> list[Check]:
    """Check the store of a run, and its export if there is one. Raises RatelError if a check cannot be made."""
    with open_context(config, log) as context:
        context.listen()
        run = open_run(context)
        current = run.store.progress.step
        steps = [current, *(saved for saved in run.store.pinned_steps[::-1] if saved != current)]
        checks = _check_generations(context, [run.slices(step) for step in steps])
        whole = [run.generation(step) for step, check in zip(steps, checks, strict=True) if not check.is_wrong]
        checks += _check_snapshot(run)
        if not holds_export(config.output_dir):
            log.say(f"there is no export in {config.output_dir}; only the store was verified")
            return checks
        checks += _check_files(config.output_dir, run.base.weights_name, context.stop, log)
        if isinstance(run.base, LanguageBase):
            checks += _check_tokenizer(config, run.base, is_changed=checks[-1].verdict.startswith(_CHANGED))
        model, loading = _load(
            partial(run.base.load, config.output_dir, DTYPES[config.dtype]),
            library=run.base.library,
            num_bytes=run.base.loaded_bytes(config.output_dir),
        )
        return [*checks, loading, *_compare(run, whole, model)]


def verify_directory(directory: Path, log: RunLog) -> list[Check]:
    """Check a directory with a model, without its run. Raises BadInput if it holds no model."""
    prepare_process()
    if (directory / ADAPTER_CONFIG_NAME).is_file() and not (directory / "config.json").is_file():
        return _verify_adapter(directory, log)
    if not (directory / "config.json").is_file() or not holds_export(directory):
        raise BadInput(
            f"{directory}: neither a run's output directory nor a model: it has no config.json or no {WEIGHTS_NAME}"
        )
    denoises, num_bytes = is_denoiser(directory), loaded_bytes(directory)
    name, library = (DENOISER_WEIGHTS_NAME, "diffusers") if denoises else (WEIGHTS_NAME, "transformers")
    load = partial(load_denoiser, dtype=None) if denoises else load_language_model
    with StopRequest() as stop:
        checks = _check_files(directory, name, stop, log)
        return [*checks, _load(partial(load, directory), library=library, num_bytes=num_bytes)[1]]


def _verify_adapter(directory: Path, log: RunLog) -> list[Check]:
    """Check a directory with an adapter, which is loaded onto the base model that it names."""
    from ratel_cli.model.export.adapter_files import load_adapted, named_base  # with PEFT, which others do not need

    name, revision = named_base(directory)
    base = resolve_base_model(name, revision=revision)
    num_bytes = weights_bytes(directory) + loaded_bytes(base)

    def load() -> nn.Module:
        return load_adapted(load_language_model(base), directory)

    with StopRequest() as stop:
        checks = _check_files(directory, ADAPTER_WEIGHTS_NAME, stop, log)
        return [*checks, _load(load, library="PEFT", num_bytes=num_bytes)[1]]


def _check_generations(
    context: RunContext, generations: Sequence[Sequence[Generation]], *, where: str | None = None
) -> list[Check]:
    """One row for each generation, the current one first, with the slices of all ranks. `where` names a store that is
    not the run's own."""
    num_bytes = sum(block.num_bytes for part in generations[0] for block in part.blocks)
    checks: list[Check] = []
    start = perf_counter()
    with context.bar(f"verifying the {where or 'store'}", len(generations) * num_bytes) as advance:
        for number, generation in enumerate(generations):
            check = Check(
                what=f"step {generation[0].progress.step}, {where or ('saved' if number else 'current')}",
                num_bytes=num_bytes,
                checked="every chunk",
                verdict="whole",
            )
            try:
                for part in generation:
                    part.check_all(context.pool, progress=advance)
            except IntegrityFailure as failure:
                check = replace(check, verdict=failure.message, is_wrong=True)
            checks.append(check)
    seconds = perf_counter() - start
    total_bytes = len(generations) * num_bytes
    rate = format_rate(total_bytes / seconds)
    context.log.say(f"read {format_bytes(total_bytes)} in {format_seconds(seconds)}, {rate}")
    return checks


def _check_snapshot(run: OpenedRun) -> list[Check]:
    """The rows of the run's snapshot, of which each rank has its slices; none if the config asks for no snapshot."""
    context = run.context
    wanted = context.config.storage.snapshot
    if wanted is None:
        return []
    places = [paths_in([wanted.path], rank) for rank in range(len(run.stores))]
    for place in places:
        if not Store.exists(place):
            verdict = f"there is none in {place[0]} yet, or its drive is missing"
            return [Check(what="snapshot", num_bytes=0, checked="presence", verdict=verdict)]
    queue = context.open_queue()
    try:
        stores = [context.open_store(place, queue=queue, read_only=True) for place in places]
        check_model(stores[0], context.config, run.base.model.spec, wanted.path)
        generations = snapshot_of_all(stores)
    except (BadInput, EnvironmentFailure, IntegrityFailure) as failure:
        return [Check(what="snapshot", num_bytes=0, checked="manifest", verdict=failure.message, is_wrong=True)]
    return _check_generations(context, [generations], where="snapshot")


def _check_files(directory: Path, weights_name: str, stop: StopRequest, log: RunLog) -> list[Check]:
    """One row for each file of weights: its header, every value, and the checksum that the export noted.

    And one for all other files of an export. The checksums are in the marker, which is copied with the directory.
    """
    marker = read_marker(directory)
    written = {} if marker is None else {file.name: file for file in marker.files}
    try:
        files = find_weight_files(directory, weights_name=weights_name)
    except BadInput as error:
        return [Check(what=directory.name, num_bytes=0, checked="index", verdict=error.message, is_wrong=True)]
    checks: list[Check] = []
    total_bytes = sum(path.stat().st_size for path in files.paths)
    with stoppable_bar(log, stop, "verifying the export", total_bytes) as advance:
        for name, path in zip(files.names, files.paths, strict=True):
            check = Check(what=path.name, num_bytes=path.stat().st_size, checked="header", verdict="")
            try:
                with ShardReader(path) as reader:
                    check = replace(check, checked=counted(len(reader.tensors), "tensor"))
                    digest = check_values(reader, progress=advance)
                checks.append(_compared(check, digest, written.get(name)))
            except (BadInput, IntegrityFailure) as failure:
                checks.append(replace(check, verdict=failure.message, is_wrong=True))
    others = [file for name, file in written.items() if name not in files.names]
    return [*checks, _check_others(directory, others)] if others else checks


def _compared(check: Check, digest: str, written: WrittenFile | None) -> Check:
    """The row of a file of weights whose values are finite."""
    if written is None or not written.xxh3_128:
        return replace(check, verdict="every value finite; there is no checksum to compare it with")
    if digest != written.xxh3_128:
        return replace(check, verdict="has not the checksum that it was exported with", is_wrong=True)
    return replace(check, verdict="whole, every value finite")


def _check_others(directory: Path, written: Sequence[WrittenFile]) -> Check:
    """The row of an export's files that are no weights. A change is reported; it may be the user's."""
    changed = [file.name for file in written if not has_written_content(directory, file)]
    verdict = f"{_CHANGED}: {', '.join(map(excerpt, changed))}" if changed else "whole"
    num_bytes = sum(file.num_bytes for file in written)
    return Check(what="other files", num_bytes=num_bytes, checked=counted(len(written), "file"), verdict=verdict)


def _check_tokenizer(config: RunConfig, base: LanguageBase, *, is_changed: bool) -> list[Check]:
    """The row of the export's tokenizer; none if the run has none. `is_changed`: maybe by the user, since then."""
    own = without_tokenizer_keys(config)
    check = Check(what="tokenizer", num_bytes=0, checked="ids, special tokens, template", verdict="equal to the run's")
    wanted = base.read_tokenizer().tokenizer
    try:
        found = read_tokenizer(own, config.output_dir, base.config).tokenizer
        is_same = tokenizer_hash(found) == tokenizer_hash(wanted)
    except BadInput as error:
        return [replace(check, verdict=error.message, is_wrong=True)]
    if isinstance(wanted, NoTokenizer):
        return []
    return [check if is_same else replace(check, verdict="differs from the run's", is_wrong=not is_changed)]


def _load(load: Callable[[], nn.Module], *, library: str, num_bytes: int) -> tuple[nn.Module | None, Check]:
    """The model, loaded by its library; None if that fails, or there is not enough memory for `num_bytes`."""
    check = Check(what=library, num_bytes=num_bytes, checked="from_pretrained", verdict="")
    available_bytes = default_limit_bytes()
    if num_bytes > available_bytes:
        verdict = f"not loaded: it needs {format_bytes(num_bytes)} of RAM, {format_bytes(available_bytes)} available"
        return None, replace(check, verdict=verdict)
    try:
        model = load()
    except (BadInput, IntegrityFailure) as failure:
        return None, replace(check, verdict=failure.message, is_wrong=True)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return model, replace(check, verdict=f"loads: {type(model).__name__}, {format_count(num_parameters)} parameters")


def _compare(run: OpenedRun, generations: Sequence[Readable], model: nn.Module | None) -> list[Check]:
    """The rows for the export's weights and logits, compared with the generation that it was made from."""
    if not generations:
        return []
    num_bytes = sum(block.num_stored * block.dtype_bytes for block in run.base.model.spec.blocks)
    check = Check(what="weights", num_bytes=num_bytes, checked="every bit", verdict="")
    same: Readable | None = None
    differing: list[str] = []
    try:
        with ExitStack() as resources:
            read = _reader_of(run, model, resources)
            for generation in generations:
                found = _first_difference(run, generation, read)
                if found is None:
                    same = generation
                    break
                differing.append(found)
    except (BadInput, IntegrityFailure) as failure:
        return [replace(check, verdict=failure.message, is_wrong=True)]
    if same is None:
        step = generations[0].progress.step
        verdict = f"{differing[0]} differs from step {step}, and the export equals no other saved step"
        return [replace(check, verdict=verdict, is_wrong=True)]
    equal = replace(check, verdict=f"equal to step {same.progress.step}")
    if model is None:
        return [equal]
    try:
        return [equal, _compare_outputs(run, same, model)]
    except IntegrityFailure as failure:
        return [equal, Check(what=run.base.outputs, num_bytes=0, checked="", verdict=failure.message, is_wrong=True)]


def _reader_of(run: OpenedRun, model: nn.Module | None, resources: ExitStack) -> _ReadValues:
    """Reads values of the loaded model, or of the export's files, as its library would, if no model was loaded."""
    if model is not None:
        return lambda name, start, number: read_parameter(model, name, start, number)
    config = run.context.config
    source = run.base.open_export(config.output_dir, resources)
    dtypes = run.base.model.spec.exported_dtypes(config.dtype)
    return lambda name, start, number: source.read(name, start, start + number).to(VALUE_DTYPES[dtypes[name]])


def _first_difference(run: OpenedRun, generation: Readable, read: _ReadValues) -> str | None:
    """The name of the first tensor of the export that differs from the generation's weights; None if all are equal.

    The weights are rounded as an export rounds them.
    """
    context, spec = run.context, run.base.model.spec
    dtype, progress = context.config.dtype, context.stop.check
    with StoredWeights(spec, generation, context.pool, dtype, progress=progress) as weights:
        for parameter in spec.parameters:
            start = 0
            for values in weights.slices(parameter.name, 0, parameter.num_elements):
                if not _same_bits(read(parameter.name, start, len(values)), values):
                    return parameter.name
                start += len(values)
    return None


def _compare_outputs(run: OpenedRun, generation: Readable, model: nn.Module) -> Check:
    context, device, base = run.context, torch.device("cpu"), run.base
    batch, theirs = base.tried(model)
    blocks = GenerationBlocks(generation)
    with BlockReader(base.model, blocks, context.pool, device=device, check_stop=context.stop.check) as reader:
        ours = BlockwiseForward(base.model, reader).outputs(batch)
    check = Check(
        what=base.outputs,
        num_bytes=ours.nbytes,
        checked=f"{batch.width} tokens",
        verdict=f"equal to those from step {generation.progress.step}, bit for bit",
    )
    if _same_bits(ours, theirs):
        return check
    largest = float((ours.float() - theirs.float()).abs().max()) if ours.shape == theirs.shape else float("inf")
    verdict = f"differ by up to {largest:.3g} from those computed from step {generation.progress.step}"
    return replace(check, verdict=verdict, is_wrong=True)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
