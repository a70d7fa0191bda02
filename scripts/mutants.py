"""Small changes that break a promise of Ratel, and whether the short tier of the tests notices each of them.

    python -m scripts.mutants                    every mutant, one after the other
    python -m scripts.mutants --only draws       those with this in their name
    python -m scripts.mutants --list

Each mutant is tried in a copy of the repository: one piece of text in one file is replaced, then the tests run that are
expected to notice it, and, if they do not, the rest of `make test`. A mutant that survives shows a promise that nothing
holds. The last line sums up; the exit code is 0 if all were caught, and 1 if one survived or could not be tried.

Invariant: a mutant breaks behaviour that is promised (bits, steps, bytes, plans, errors), not a detail; and its old text
stands exactly once in its file, which `tests/scripts/test_mutants.py` holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratel_cli import _native

ROOT = Path(__file__).parents[1]
COPIED_FOLDERS = ("ratel_cli", "tests", "scripts", "configs", "docs", "kernels", ".ci")
GPU_TESTS = ("tests/gpu", "tests/simulated_gpu")
TEXTS = "tests/scripts/test_mutants.py"
"""Would notice every mutant, since it looks for the old texts."""
SECONDS = 1800
"""The most that one call of pytest may take; a mutant that hangs is caught."""
Verdict = Literal["caught", "survived", "not tried"]
VERDICTS: tuple[Verdict, ...] = ("caught", "survived", "not tried")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change."""

    name: str
    file: str
    """Path of the file in `ratel_cli`."""
    old: str
    new: str
    breaks: str
    """The promise."""
    tests: str
    """Files in `tests` that notice it, separated by blanks."""

    @property
    def test_paths(self) -> tuple[str, ...]:
        return tuple(f"tests/{name}" for name in self.tests.split())


# fmt: off
MUTANTS = (
    Mutant("draws without the seed", "engine/state.py", 'f"{seed}/{step}', 'f"0/{step}', "draws differ by seed", "engine/test_randomness.py"),
    Mutant("draws without the step", "engine/state.py", "{seed}/{step}/", "{seed}/0/", "draws differ by step", "engine/test_randomness.py"),
    Mutant("draws without the block", "engine/state.py", "{step}/{block}/", "{step}/0/", "draws differ by block", "engine/test_randomness.py"),
    Mutant("draws without the micro-batch", "engine/state.py", "{block}/{micro_batch}", "{block}/0", "draws differ by micro-batch", "engine/test_randomness.py"),
    Mutant("loss of one micro-batch", "engine/step.py", "loss=loss_total / state.num_targets", "loss=loss_total / len(state.batches)", "the loss is the mean over all targets of the step", "engine/test_exactness.py"),
    Mutant("loss scale stays in", "engine/step.py", "gradient_scale=1.0 / loss_scale", "gradient_scale=1.0", "gradients are divided by the loss scale", "engine/test_exactness.py"),
    Mutant("a loss of NaN is decided", "engine/step.py", "if not math.isfinite(loss_total):", "if False:", "a loss that is not finite is named", "engine/test_step.py"),
    Mutant("micro-batches share a gradient", "engine/step.py", "output.backward(gradients[number], inputs", "output.backward(gradients[0], inputs", "each micro-batch has its own gradient", "engine/test_exactness.py"),
    Mutant("clipping without epsilon", "engine/optimizer/gradients.py", "max_norm / (norm + 1e-6), max", "max_norm / norm, max", "clipping has the bits of clip_grad_norm_", "engine/test_exactness.py"),
    Mutant("clipping enlarges", "engine/optimizer/gradients.py", "max=1.0", "max=2.0", "small gradients are not scaled up", "engine/test_exactness.py"),
    Mutant("sums in the compute dtype", "engine/optimizer/gradients.py", "dtype if single else torch.float32", "dtype", "gradients are summed in fp32", "engine/test_exactness.py"),
    Mutant("the last micro-batch counts", "engine/optimizer/gradients.py", "values.add_(gradient.reshape", "values.copy_(gradient.reshape", "gradients of all micro-batches are summed", "engine/test_exactness.py"),
    Mutant("a gradient leaves too early", "engine/step.py", "is_last=number == len(state.batches) - 1", "is_last=True", "a gradient leaves when all micro-batches are added", "engine/test_exactness.py"),
    Mutant("leaving gradients without a limit", "engine/optimizer/gradients.py", "max(0, self._leaving_bytes - len(memory))", "1 << 60", "predicted GPU memory is enough", "engine/test_gradients.py"),
    Mutant("a speculation goes on to the end", "engine/optimizer/speculation.py", "_CERTAIN * self._max_norm", "1e30", "speculating ends once clipping is certain", "engine/test_speculation.py engine/test_exactness.py"),
    Mutant("states that were updated in vain", "engine/optimizer/update.py", "self._pipeline.cancel(updated)", "self._pipeline.cancel(frozenset())", "resident states are those of the current generation", "engine/test_exactness.py"),
    Mutant("an unclipped step takes as long", "planning/plan.py", "replace(decisions, holds_gradients=False)", "decisions", "the plan tells what an unclipped step takes", "planning/test_plan.py"),
    Mutant("any split is advised", "planning/forecast/advice.py", "if then is not None and (best is None or then > best):", "if then is not None:", "advice is the fastest split", "planning/forecast/test_advice.py"),
    Mutant("norm of the scaled loss", "engine/optimizer/gradients.py", "if self._scale != 1.0:", "if False:", "the norm is that of the gradient", "engine/test_exactness.py"),
    Mutant("gradients on NVMe are not checked", "engine/optimizer/gradients.py", 'self._seal.check(self._lease.memory, f"gradient of {self.block.name}")', "pass", "damaged gradients are noticed", "engine/test_faults.py"),
    Mutant("bias correction a step late", "engine/optimizer/adamw.py", "settings.beta2**update.number", "settings.beta2 ** (update.number + 1)", "AdamW has torch's bits", "engine/test_exactness.py"),
    Mutant("decay of norms and biases", "engine/optimizer/adamw.py", "parameter.decay))", "True))", "norms and biases do not decay", "engine/test_exactness.py"),
    Mutant("parameters without a gradient decay", "engine/optimizer/adamw.py", "if has_gradient and first < last", "if first < last", "a parameter without a gradient keeps its bits", "engine/test_adamw.py"),
    Mutant("gradient of the first group", "engine/optimizer/adamw.py", "flat[first:last]", "flat[first - start : last - start]", "each group is updated by its own gradient", "engine/test_exactness.py"),
    Mutant("parts across chunks", "engine/optimizer/adamw.py", "PARAMETER_ALIGNMENT if checksums is None else checksums.chunk_elements", "PARAMETER_ALIGNMENT", "threads of AdamW take whole chunks", "engine/test_exactness.py"),
    Mutant("a clipped speculation stands", "engine/optimizer/update.py", "if clip == 1.0:", "if clip > 0.0:", "a speculation that was wrong is done again", "engine/test_exactness.py"),
    Mutant("speculation whatever was clipped", "engine/optimizer/update.py", "self._speculation.end(is_clipped=self.is_clipped)", "self._speculation.end(is_clipped=False)", "updates wait for the norm while clipping is frequent", "engine/test_step.py"),
    Mutant("resident weights after a failed step", "engine/optimizer/update.py", "self._resident.forget()  # the step", "pass  # the step", "a step that is run again takes nothing in memory on trust", "engine/test_step.py"),
    Mutant("settled before it is written", "engine/optimizer/update.py", "wait_unfinished(at_most=0)", "wait_unfinished(at_most=1)", "a step is committed when all of it is written", "engine/test_exactness.py"),
    Mutant("gradients that come and go", "engine/optimizer/update.py", "if now != then:", "if False:", "a parameter with a gradient in some steps only is rejected", "engine/test_step.py"),
    Mutant("stale states after a discard", "engine/optimizer/groups.py", "self._valid -= forgotten", "pass", "resident states are those of the current generation", "engine/test_step.py engine/test_exactness.py"),
    Mutant("states are not checked", "engine/optimizer/adamw.py", "self._current.check_digests(self._block, start, stop, before)", "pass", "damaged optimizer states are noticed", "engine/test_faults.py"),
    Mutant("old weights in forward", "engine/weights.py", "in_shadow = self._updates.is_in_shadow(block)", "in_shadow = False", "forward computes with the newest weights", "engine/test_exactness.py"),
    Mutant("activations are not checked", "engine/activations.py", "packed.seal.check(packed.memory, label.text)", "pass", "damaged activations are noticed", "engine/test_offloading.py"),
    Mutant("offloaded slices begin at zero", "engine/activations.py", "first + self.storage_offset", "first", "what is fetched is what was offloaded", "engine/test_offloading.py"),
    Mutant("dropout draws anew", "engine/replay/tape.py", "_generator(args, kwargs).set_state(state)", "pass", "recomputed operators draw what they drew", "engine/test_tape.py engine/test_exactness.py"),
    Mutant("offloaded before it is changed", "engine/replay/tape.py", "if self._mutated.isdisjoint(self.operators[position].writes)\n        }", "if True\n        }", "what changes later is not offloaded", "engine/test_tape.py"),
    Mutant("another operator is replayed", "engine/replay/tape.py", " or tape.funcs[position] is not func:", ":", "a forward that does not repeat itself stops", "engine/test_tape.py"),
    Mutant("a replay that ends early", "engine/replay/tape.py", "if self._position != len(self._tape.funcs):", "if False:", "a forward that does not repeat itself stops", "engine/test_tape.py"),
    Mutant("gradients without the loss scale", "engine/loss.py", "loss / num_targets * loss_scale", "loss / num_targets", "fp16 gradients are scaled", "engine/test_exactness.py"),
    Mutant("token 0 is ignored", "engine/loss.py", "ignore_index=IGNORED_TARGET", "ignore_index=0", "only -100 is ignored", "engine/test_exactness.py"),
    Mutant("an upload does not wait", "engine/device/cuda.py", "self._up.wait_event(buffer.free)", "pass", "device memory is not overwritten while it is in use", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("a download does not wait", "engine/device/cuda.py", "self._down.wait_event(_record(self._compute))", "pass", "a download waits for what computes it", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("a download is forgotten", "engine/device/cuda.py", "self._downloading.append(_Leaving(end, [tensor for tensor, _ in pieces]))", "pass", "what is downloaded stays until it has left", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("manifest over the current one", "store/commit.py", "generation % NUM_MANIFESTS", "(generation + 1) % NUM_MANIFESTS", "the older manifest is overwritten", "store/test_checksums.py"),
    Mutant("commits after a failed sync", "store/commit.py", "        self._is_stopped = True\n        raise", "        raise", "nothing is committed after a failed sync", "store/test_store_power.py"),
    Mutant("published before it is durable", "store/store.py", "self._commits.sync(manifest.progress.step)", "pass", "a manifest refers to durable bytes only", "store/test_store_power.py"),
    Mutant("no shadow", "store/store.py", "slot = min(self._free_slots())", "slot = self._commits.manifest.slot", "a step never overwrites the current generation", "store/test_store_power.py"),
    Mutant("pinned slots are free", "store/store.py", "return {manifest.slot, *pinned,", "return {manifest.slot,", "a saved step is never overwritten", "store/test_store_power.py"),
    Mutant("held slots are free", "store/store.py", ", *(generation.slot for generation in self._held)}", "}", "a held generation is not overwritten", "store/test_holds.py"),
    Mutant("no generation to fall back on", "store/store.py", "before = None if self.in_place else self._commits.manifest.current", "before = None", "a damaged step gives way to the one before", "store/test_checksums.py"),
    Mutant("torn manifests count", "store/manifest.py", " or zlib.crc32(body) != crc:", ":", "a torn manifest does not count", "store/test_manifest.py"),
    Mutant("lost manifests are not noticed", "store/manifest.py", "if len(valid) == 2 and newest.previous_sha256 != valid[0][1]:", "if False:", "a manifest that a drive lost is noticed", "store/test_manifest.py"),
    Mutant("the older manifest wins", "store/manifest.py", "newest, _ = valid[-1]", "newest, _ = valid[0]", "the newest manifest counts", "store/test_manifest.py"),
    Mutant("checksums without the step", "store/checksums.py", "self._store_id, self._step, block", "self._store_id, 0, block", "stale chunks are noticed", "store/test_checksums.py"),
    Mutant("checksums without the place", "store/checksums.py", "self._field_index[field], chunk)", "self._field_index[field], 0)", "misplaced chunks are noticed", "store/test_checksums.py"),
    Mutant("checksum tables are not checked", "store/checksums.py", "if found != root:", "if False:", "a damaged checksum table is noticed", "store/test_checksums.py"),
    Mutant("reads are not checked", "store/generation.py", "return follow(ticket, lambda: self._check(block, field, start, stop, memory))", "return ticket", "no damaged byte is used", "store/test_checksums.py"),
    Mutant("copies are not checked", "store/copy.py", "source.read(*part)", "source.read_unchecked(*part)", "a snapshot has no damaged byte", "store/test_copy.py"),
    Mutant("the state of another run", "store/open.py", "        if old != new\n    }", "        if False\n    }", "a run does not resume another one's store", "store/test_store_faults.py e2e/test_resume.py"),
    Mutant("truncated files open", "store/open.py", "if size_bytes < num_bytes:", "if False:", "a truncated store is noticed", "store/test_store_faults.py"),
    Mutant("half a step in place opens", "store/open.py", "if manifest.step_in_place is not None:", "if False:", "a step that was being written in place is reported", "store/test_store_faults.py"),
    Mutant("directories in any order", "store/headers.py", "if found.file_index != index:", "if False:", "swapped directories are noticed", "store/test_store_faults.py"),
    Mutant("the lock is shared", "store/lock.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "two runs never share a store", "store/test_lock.py"),
    Mutant("stores are replaced unasked", "store/create.py", "if reason is not None and not overwrite:", "if False:", "a store is replaced only if that is asked for", "store/test_store_creation.py"),
    Mutant("short transfers begin again", "io/requests.py", "self.offset += gained_bytes", "pass", "a short transfer continues where it ended", "io/test_queue_failures.py"),
    Mutant("a full drive is corruption", "io/requests.py", "if cause.errno in _NO_SPACE:", "if False:", "a full drive ends with the exit code of the environment", "io/test_queue_failures.py"),
    Mutant("torn pages are kept", "io/requests.py", "result - result % PAGE_BYTES", "result", "requests begin on pages", "io/test_requests.py"),
    Mutant("rows of stripes overlap", "io/striping.py", "cycle * self.weights[file_index] + row", "cycle + row", "no two addresses share a byte", "io/test_striping.py"),
    Mutant("scratch space is not checked", "io/scratch.py", "!= self._digest:", "== 0:", "bytes read are the bytes written", "engine/test_faults.py"),
    Mutant("swapped operators must not run", "planning/liveness.py", "if is_alive and operator.can_be_skipped and position in swapped:", "if is_alive and position in swapped:", "views and mutations run again", "planning/test_liveness.py"),
    Mutant("weights are always read once more", "planning/traffic.py", 'elif stage == "update":', "else:", "predicted traffic is exact", "planning/test_traffic.py"),
    Mutant("spilled gradients do not come back", "planning/traffic.py", "read[stage] += block.num_elements * state.gradient", "pass", "predicted traffic is exact", "planning/test_traffic.py"),
    Mutant("checksums cost nothing", "planning/traffic.py", 'written["forward"] += checksum_bytes(spec, state)', "pass", "predicted traffic is exact", "engine/test_step.py planning/test_traffic.py"),
    Mutant("two groups of states", "planning/capacity.py", "_NUM_GROUPS = 3", "_NUM_GROUPS = 2", "predicted memory is enough", "planning/test_capacity.py"),
    Mutant("pending updates take no memory", "planning/capacity.py", "pending = arrived[: self._placement.pending_updates]", "pending = arrived[:0]", "predicted memory is enough", "planning/test_capacity.py"),
    Mutant("gradients on NVMe though they fit", "planning/capacity.py", "num_in_memory = choices[num_fitting - 1]", "num_in_memory = choices[0]", "as many gradients as fit stay in memory", "planning/test_capacity.py"),
    Mutant("backward as fast as forward", "planning/costs.py", "backward = 2 * forward +", "backward = forward +", "backward computes twice what forward does", "planning/test_costs.py"),
    Mutant("one rate for both ways", "planning/costs.py", "work.down_bytes / link.from_gpu_bytes_per_second", "work.down_bytes / link.to_gpu_bytes_per_second", "each direction of the link has its rate", "planning/test_costs.py"),
    Mutant("both ways at any rate", "planning/costs.py", "min(nvme.mixed_bytes_per_second, 2 * read_rate, 2 * write_rate)", "nvme.mixed_bytes_per_second", "reading less never takes longer", "planning"),
    Mutant("twice the memory", "planning/problem.py", "limit_bytes=self.decisions.host_limit_bytes)", "limit_bytes=2 * self.decisions.host_limit_bytes)", "what is chosen fits", "planning/test_choose.py"),
    Mutant("the slowest depth", "planning/choose.py", "return min(evaluations, key", "return max(evaluations, key", "what is chosen is the fastest", "planning/test_choose.py"),
    Mutant("nearly as good is half as good", "planning/choose.py", "_AS_GOOD = 1.005", "_AS_GOOD = 1.5", "what is chosen is the fastest", "planning/test_choose.py"),
    Mutant("the worst candidate first", "planning/swap.py", "key=lambda item: (-item[0], item[1])", "key=lambda item: (item[0], item[1])", "what saves most per byte is swapped first", "planning/test_swap.py"),
    Mutant("the window is read too", "planning/activations.py", "_without_newest(written, SPILL_WINDOW_UNITS)", "_without_newest(written, 0)", "predicted traffic is exact", "planning/test_activations.py"),
    Mutant("no room for the next block", "planning/gpu_memory.py", "num_open + 1]", "num_open]", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("resident weights are read", "planning/placement.py", "block.index not in placement.resident_weights and all(", "all(", "predicted traffic is exact", "planning"),
    Mutant("what saves nothing is a candidate", "planning/recorded.py", "if saved.seconds <= least_seconds:", "if False:", "only what saves time is swapped", "planning/test_recorded.py"),
    Mutant("warm-up begins at one", "training/schedule.py", "return step / self.num_warmup_steps", "return (step + 1) / self.num_warmup_steps", "learning rates are those of transformers", "training/test_schedule.py"),
    Mutant("an overflow keeps the scale", "training/schedule.py", "self.scale / 2", "self.scale", "an overflow halves the loss scale", "training/test_schedule.py"),
    Mutant("skipped steps count as updates", "training/loop.py", "updates=before.updates + outcome.applied", "updates=before.updates + 1", "bias correction leaves out skipped steps", "training/test_loop.py"),
    Mutant("a stop loses a step", "training/loop.py", "            except Interrupted:\n                self._commit_pending()", "            except Interrupted:\n                pass", "a stop loses no step", "training/test_loop.py"),
    Mutant("wear is counted a step late", "training/loop.py", "written + slot_bytes > limit", "written > limit", "a run never writes more than it may", "training/test_loop.py"),
    Mutant("every bad step is divergence", "training/divergence.py", "if not is_repeated:", "if False:", "a fault of the machine is no divergence", "training/test_divergence.py"),
    Mutant("metrics of lost steps stay", "training/metrics.py", "_step_of(line) <= step", "_step_of(line) <= step + 1", "the log has committed steps only", "training/test_metrics.py"),
    Mutant("targets are not shifted", "data/packing.py", "targets[index, at : end - 1] = sample.labels[1:]", "targets[index, at:end] = sample.labels", "each position predicts the next token", "data/test_packing.py"),
    Mutant("positions run on", "data/packing.py", "position_ids[index, at:] = np.arange(width - at)\n            at = end", "pass\n            at = end", "positions restart with each sample", "data/test_packing.py"),
    Mutant("every position counts", "data/packing.py", "int((targets != IGNORED_TARGET).sum())", "int(targets.size)", "the loss is the mean over targets", "data/test_packing.py"),
    Mutant("rows overflow", "data/packing.py", "bisect_left(spaces, length)", "bisect_left(spaces, length - 1)", "no row is longer than the capacity", "data/test_packing.py"),
    Mutant("one order for all epochs", "data/dataset.py", "_ORDER_OF_EPOCHS + epoch)", "_ORDER_OF_EPOCHS)", "each epoch has its own order", "data/test_dataset.py"),
    Mutant("evaluation rows are trained on", "data/dataset.py", "np.sort(order[num_eval:])", "np.sort(order)", "held-out samples are not trained on", "data/test_dataset.py"),
    Mutant("the last rows of an epoch are dropped", "data/dataset.py", "-(-len(self._train_sequences) // self._sequences_per_step)", "max(1, len(self._train_sequences) // self._sequences_per_step)", "an epoch has every row", "data/test_dataset.py"),
    Mutant("the seed is no part of the data", "data/dataset.py", 'summary.tokens_sha256, **asdict(settings)}', 'summary.tokens_sha256, **asdict(settings), "seed": 0}', "a run with another order does not resume", "data/test_dataset_cache.py"),
    Mutant("loss on prompts", "data/encode.py", "if draft.prompt and not self._train_on_inputs:", "if False:", "prompts carry no loss", "data/test_encode.py"),
    Mutant("texts do not end", "data/encode.py", "tail.append(end)", "pass", "a text ends with the end token", "data/test_encode.py"),
    Mutant("a token between pieces is lost", "data/encode.py", "stride = self._sequence_len - 1", "stride = self._sequence_len", "every token of a text is predicted once", "data/test_encode.py"),
    Mutant("tokens beyond the vocabulary", "data/encode.py", "(ids < self._vocabulary)", "(ids <= self._vocabulary)", "tokens beyond the vocabulary are rejected", "data/test_encode.py"),
    Mutant("turns that are joined", "data/encode.py", "if inferred and first < last and ids[:first] != prefixes[index]:", "if False:", "training has the tokens of inference", "data/test_encode.py"),
    Mutant("a damaged cache is used", "data/token_cache.py", "if whole and summary", "if summary", "a damaged token cache is built again", "data/test_dataset_cache.py"),
    Mutant("roles of ShareGPT", "data/formats.py", "_ROLES.get(role, role)", "role", "ShareGPT's roles are translated", "data/test_dataset.py"),
    Mutant("vectors decay", "model/spec.py", "num_dimensions >= 2 and ", "", "vectors do not decay", "model/test_spec.py"),
    Mutant("norms by another spelling decay", "model/spec.py", "name.lower()", "name", "norms do not decay however they are spelt", "model/test_spec.py"),
    Mutant("two names for one key", "config/dialect.py", "elif key in translated:", "elif False:", "a key that is set twice is an error", "config/test_rejections.py"),
    Mutant("inverted keys are not", "config/dialect.py", "inverted = not value.content", "inverted = value.content", "an inverted alias is inverted", "config/test_config_load.py"),
    Mutant("arguments do not displace", "config/overrides.py", "if other != name and other in root.content", "if False and other in root.content", "an argument replaces what decides the same", "config/test_overrides.py"),
    Mutant("twice the same key", "config/yaml_marks.py", "elif key in entries:", "elif False:", "a key that is set twice is an error", "config/test_rejections.py"),
    Mutant("lines count from zero", "config/yaml_marks.py", "return replace(self._start, line=mark.line + 1", "return replace(self._start, line=mark.line", "an error names its line", "config/test_config_load.py"),
    Mutant("no nearest key", "config/aliases.py", "cutoff=0.6", "cutoff=0.99", "a mistyped key is recognised", "config/test_overrides.py"),
    Mutant("at least is more than", "config/messages.py", '("ge", "at least")', '("ge", "more than")', "a message says what a value must be", "config/test_hardware_file.py"),
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one mutant."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    note: str
    """The first test that failed, or why there was no verdict."""


def try_mutant(mutant: Mutant, root: Path = ROOT) -> Trial:
    """Run the tests on a copy of `root` with this one change."""
    started = time.monotonic()

    def trial(verdict: Verdict, note: str) -> Trial:
        return Trial(mutant=mutant, verdict=verdict, seconds=time.monotonic() - started, note=note)

    with copy_of(root) as copy:
        apply(mutant, copy)
        for tests in (mutant.test_paths, ()):
            code, output = run_tests(copy, tests)
            if code == 1:
                return trial("caught", first_failure(output))
            if code != 0:
                return trial("not tried", f"pytest ended with {code}: {output[-2000:]}")
        return trial("survived", f"{mutant.file}: {mutant.breaks}")


def apply(mutant: Mutant, root: Path) -> None:
    """Replace the text."""
    path = root / "ratel_cli" / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its old text stands {source.count(mutant.old)} times in {mutant.file}")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit code and output for these tests, or for the whole short tier; the first failure ends it."""
    for environment, arguments in pytest_calls(tests):
        command = [str(root / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"FAILED: no end after {SECONDS} seconds"
        if done.returncode != 0:
            return done.returncode, done.stdout
    return 0, ""


def pytest_calls(tests: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment and the arguments of each call. Tests of the GPU run on the simulated one, and apart."""
    on_gpu = [name for name in tests if name.startswith(GPU_TESTS)]
    others = [name for name in tests if name not in on_gpu]
    if others or not tests:
        ignored = GPU_TESTS if tests else (*GPU_TESTS, TEXTS)
        yield {}, [*others, *(f"--ignore={name}" for name in ignored)]
    if on_gpu or not tests:
        yield {"RATEL_SIMULATED_GPU": "1"}, on_gpu or list(GPU_TESTS)


def first_failure(output: str) -> str:
    """The line in which pytest names it."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else "no test was named"


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the repository with an environment of its own, in which `ratel_cli` is the copy's.

    Everything else comes from the environment that runs this.
    """
    with tempfile.TemporaryDirectory(prefix="ratel-mutant-") as name:
        copy = Path(name)
        for each in root.iterdir():
            if each.name in COPIED_FOLDERS:
                shutil.copytree(each, copy / each.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif each.is_file():
                shutil.copy2(each, copy)
        venv.create(copy / ".venv", symlinks=True)
        bin_directory = copy / ".venv" / "bin"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(copy / ".venv")}))
        inherited = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "copy.pth").write_text("".join(f"{path}\n" for path in (copy, *inherited)))
        program = bin_directory / "ratel"
        program.write_text(f'#!/bin/sh\nexec {bin_directory}/python -m ratel_cli "$@"\n')
        program.chmod(0o755)
        native = Path(_native.__file__)
        shutil.copy2(native, copy / "ratel_cli" / native.name)
        yield copy


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many are tried at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants, and try none")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.file:36} {mutant.breaks}")
        return 0
    tests = sorted({name for mutant in chosen for name in mutant.test_paths})
    with copy_of(ROOT) as copy:
        code, output = run_tests(copy, tests)
    if code != 0 or not chosen:
        print(output or f"no mutant has {options.only!r} in its name", file=sys.stderr)
        print("nothing was tried: without a mutant the tests must pass", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(options.jobs) as executor:
        trials = []
        for trial in executor.map(try_mutant, chosen):
            trials.append(trial)
            print(f"{trial.verdict:8} {trial.mutant.name:32} {trial.seconds:5.0f} s  {trial.note}", flush=True)
    counts = {verdict: sum(trial.verdict == verdict for trial in trials) for verdict in VERDICTS}
    print(f"{len(trials)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if counts["caught"] == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
