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
COPIED_FOLDERS = ("ratel_cli", "tests", "scripts", "examples", "configs", "docs", "kernels", ".ci")
GPU_TESTS = ("tests/gpu", "tests/simulated_gpu")
NIGHTLY_TESTS = ("tests/gpu/test_simulated_time.py", "tests/gpu/test_exposed_uploads.py")
"""Of the nightly tier alone."""
_BY_DAY = ("-m", "not nightly")
"""The short and the full tier."""
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
    Mutant("draws without the seed", "engine/steps/state.py", 'f"{seed}/{step}', 'f"0/{step}', "draws differ by seed", "engine/test_randomness.py"),
    Mutant("draws without the step", "engine/steps/state.py", "{seed}/{step}/", "{seed}/0/", "draws differ by step", "engine/test_randomness.py"),
    Mutant("draws without the block", "engine/steps/state.py", "{step}/{block}/", "{step}/0/", "draws differ by block", "engine/test_randomness.py"),
    Mutant("draws without the micro-batch", "engine/steps/state.py", "{block}/{micro_batch}", "{block}/0", "draws differ by micro-batch", "engine/test_randomness.py"),
    Mutant("loss of one micro-batch", "engine/steps/step.py", "loss=loss_total / state.mean.num_targets", "loss=loss_total / len(state.batches)", "the loss is the mean over all targets of the step", "engine/test_exactness.py"),
    Mutant("loss scale stays in", "engine/steps/step.py", "gradient_scale=1.0 / loss_scale", "gradient_scale=1.0", "gradients are divided by the loss scale", "engine/test_exactness.py"),
    Mutant("a loss of NaN is decided", "engine/steps/step.py", "if not math.isfinite(loss_total):", "if False:", "a loss that is not finite is named", "engine/test_step.py"),
    Mutant("micro-batches share a gradient", "engine/segments/layer.py", "state.gradients[number])\n                inputs", "state.gradients[0])\n                inputs", "each micro-batch has its own gradient", "engine/test_exactness.py"),
    Mutant("backward goes on below what is trained", "schedule/segments.py", "next((index for index, segment in enumerate(segments) if segment.trained), len(segments) - 1)", "0", "backward ends where nothing below is trained", "engine/test_frozen_parts.py"),
    Mutant("units of layers without backward are not counted", "engine/cache/activations.py", "self._num_skipped += number", "pass", "the plan's units are the engine's", "engine/test_frozen_parts.py engine/test_offloading.py"),
    Mutant("frozen gradients are computed", "planning/profile/analytic.py", "if product.parameter in frozen)", "if False)", "the plan leaves out gradients of frozen matrices", "e2e/test_frozen_parts.py"),
    Mutant("a graph has a quantised matrix", "model/files/quantised_modules.py", "            if name is None:\n                return keep(saved)", "            if True:\n                return keep(saved)", "no graph has the matrix or its bytes", "model/test_quantised.py"),
    Mutant("nobody else hears of what experts save", "model/files/quantised_modules.py", "keep: Callable[..., object] = hooks[0] if hooks else _itself", "keep: Callable[..., object] = _itself", "experts have their gradients however they are recomputed", "engine/test_quantised.py"),
    Mutant("an expert's rows are those of the first one", "model/files/quantised_modules.py", "noted.offset - first * of_matrix)", "noted.offset)", "an expert is expanded alone", "model/test_quantised.py"),
    Mutant("codes of magnitudes are rounded down", "model/files/quantised.py", "* (0.5 * (_TABLE_PLACES - 1)) + 0.5)", "* (0.5 * (_TABLE_PLACES - 1)))", "the bytes are those of bitsandbytes", "model/test_quantised.py"),
    Mutant("halves of a byte are swapped", "model/files/coded_tensors.py", "[packed >> 4, packed & 15]", "[packed & 15, packed >> 4]", "files of bitsandbytes are read as it reads them", "model/test_quantised_files.py"),
    Mutant("zero points are not less one", "model/files/coded_tensors.py", "return (codes + 1) & self._mask if is_less_one else codes", "return codes", "GPTQ is read by its definition", "model/test_quantised_files.py"),
    Mutant("what is quantised is quantised again", "model/files/quantised_model.py", "if stored is not None:", "if False and stored is not None:", "codes of bitsandbytes are kept", "e2e/test_quantised_bases.py"),
    Mutant("an adapter is of another kind than its store", "run/inputs/base.py", "    if config.adapter is not None:\n", "    if False:\n", "a run keeps its adapter", "e2e/test_adapters.py"),
    Mutant("a tower gets adapters", "model/export/adapters.py", "excluded = _other_parts(model, settings.task)", "excluded = list[str]()", "adapters are of what text uses", "e2e/test_other_parts.py"),
    Mutant("a tower within the decoder gets adapters", "model/export/adapters.py", "_unused_children(model, inside, task) if is_whole", "[] if is_whole", "adapters are of what text uses", "engine/test_adapters.py"),
    Mutant("layers of a head get no adapter", "model/export/adapters.py", " or not model.config.sub_configs", "", "adapters are of what text uses", "engine/test_adapters.py"),
    Mutant("a router gets an adapter", "model/export/adapters.py", "    _reject_other_functions(layers)\n", "", "what PEFT cannot run is refused", "engine/test_adapters.py"),
    Mutant("float16 may be infinite", "model/files/import_weights.py", "        if block.dtype == \"float16\":\n", "        if False:\n", "weights that float16 cannot hold are refused", "model/test_finite.py"),
    Mutant("infinite float16 is exported", "model/export/export_weights.py", "if is_narrow and not", "if False and not", "weights that float16 cannot hold are refused", "model/test_finite.py"),
    Mutant("a run that learns nothing succeeds", "run/train/train.py", "        self._reject_unapplied()\n", "", "a run that applies no step exports nothing", "e2e/test_not_finite.py"),
    Mutant("stacks of all layers get an adapter", "model/export/adapters.py", "config.target_parameters if chosen == everywhere else sorted(chosen)", "config.target_parameters", "adapters are in the chosen layers alone", "model/test_adapted_names.py"),
    Mutant("an adapter may lack a tensor", "model/export/adapter_files.py", "    _check_tensors(loaded, directory)\n", "", "a wrong export is found", "e2e/test_verify.py"),
    Mutant("any gain keeps a run going", "training/best.py", "abs(value - best) > rule.threshold", "abs(value - best) > 0", "early stopping is that of transformers", "training/test_best.py"),
    Mutant("a lost step stays the best", "training/saved_steps.py", "self._of_first(rule.best_among(self._earlier, saved))", "self.best", "the result is the best step of those that are saved", "training/test_best.py"),
    Mutant("steps of the user go for the best one", "training/saved_steps.py", "limit = num_slots if settings.save_steps is None", "limit = 0 if settings.save_steps is None", "nothing of the user's is dropped while there is space", "training/test_best.py"),
    Mutant("the best step is dropped", "training/saved_steps.py", "needed = {step, self.best_saved.step} if self.saves_best", "needed = {step} if self.saves_best", "the best step stays saved", "training/test_best.py"),
    Mutant("an evaluation that is missing stays so", "training/loop.py", "if last is not None and known[0][1] and", "if False and last is not None and", "a run that was killed ends as one that was not", "training/test_best.py"),
    Mutant("no noise on the embedding", "model/cut/embedding_noise.py", "return self._add_noise(module, arguments, output)", "return output", "noise has the bits of transformers", "engine/test_embedding_noise.py"),
    Mutant("experts are merged by turns", "model/export/merged_weights.py", "second.reshape(second.shape[0], -1, adapted.num_experts)", "second.reshape(second.shape[0], adapted.num_experts, -1).transpose(1, 2)", "merging has the bits of PEFT for stacks of experts", "e2e/test_adapters.py"),
    Mutant("magnitudes begin with the base alone", "model/export/adapter_files.py", "product = second @ first * adapted.scaling", "product = second @ first * 0", "DoRA begins as PEFT has it", "engine/test_adapters.py"),
    Mutant("parameters share a version", "model/cut/binding.py", ".view(shape).data", ".view(shape)", "adapters of experts train as in PEFT", "engine/test_adapters.py"),
    Mutant("embedding and head decay at their own rate", "model/cut/binding.py", "placed.decay and each.rate != ENDS", "placed.decay", "axolotl does not decay them", "engine/test_rate_groups.py"),
    Mutant("groups have the peak of the run", "training/schedule.py", "tuple(peak * self._share(step) for peak", "tuple(self.peak * self._share(step) for _", "groups have rates of their own", "training/test_schedule.py"),
    Mutant("a merge has the dtype of the run", "run/inputs/adapted_base.py", "ExportFiles(source.layout(None), ", "ExportFiles(source.layout(config.dtype), ", "a merge has the dtype of the base model's files", "e2e/test_adapters.py"),
    Mutant("codes stand for the model from before", "run/inputs/adapted_base.py", 'in QUANTISED_FORMS and into == "dequantised"', "in QUANTISED_FORMS", "both losses of a merge are shown", "e2e/test_quantised.py"),
    Mutant("an adapter is added twice", "model/export/merged_weights.py", "else product) * adapted.scaling", "else product) * 2 * adapted.scaling", "merging has the bits of PEFT", "e2e/test_adapters.py"),
    Mutant("a head draws behind the embedding", "model/cut/layer_runner.py", "generator.set_state(state)", "pass", "every part draws by a seed of its own", "library/test_encoders.py"),
    Mutant("an adapter is drawn from another seed", "model/export/adapters.py", "        torch.manual_seed(seed)\n", "        torch.manual_seed(seed + 1)\n", "an adapter begins as PEFT's", "engine/test_adapters.py"),
    Mutant("a pattern matches anywhere in a name", "model/values/freezing.py", "if expression.match(name)", "if expression.search(name)", "patterns mean what they mean in axolotl", "model/test_freezing.py"),
    Mutant("clipping without epsilon", "engine/optimizer/gradients.py", "max_norm / (norm + 1e-6), max", "max_norm / norm, max", "clipping has the bits of clip_grad_norm_", "engine/test_exactness.py"),
    Mutant("clipping enlarges", "engine/optimizer/gradients.py", "max=1.0", "max=2.0", "small gradients are not scaled up", "engine/test_exactness.py"),
    Mutant("backward on a thread of its own", "engine/steps/step.py", "torch.autograd.set_multithreading_enabled(False)", "torch.autograd.set_multithreading_enabled(True)", "how much GPU memory is in use depends on the order of calls alone", "gpu/test_memory.py"),
    Mutant("sums in the compute dtype", "engine/optimizer/accumulators.py", "self._dtype = dtype if single else torch.float32", "self._dtype = dtype", "gradients are summed in fp32", "engine/test_exactness.py"),
    Mutant("the last micro-batch counts", "engine/optimizer/accumulators.py", "values.add_(gradient.reshape", "values.copy_(gradient.reshape", "gradients of all micro-batches are summed", "engine/test_exactness.py"),
    Mutant("a gradient leaves too early", "engine/segments/layer.py", "is_last, activations = number == state.last,", "is_last, activations = True,", "a gradient leaves when all micro-batches are added", "engine/test_exactness.py"),
    Mutant("a sum in host memory begins anew", "engine/optimizer/host_sums.py", "is_first=before is None", "is_first=True", "sums in host memory have the bits of those on the GPU", "engine/test_host_sums.py"),
    Mutant("padding by its id among rows", "model/values/row_lookup.py", "place if is_there else None", "self._padding_id", "the padding token's row gets no gradient", "model/test_row_lookup.py"),
    Mutant("a substitute has no row", "model/values/row_lookup.py", "torch.tensor(substitutes).long()", "torch.tensor([]).long()", "a token that is looked up in the place of another has a row", "model/test_row_lookup.py"),
    Mutant("rows in another order", "model/values/row_lookup.py", "torch.tensor(substitutes).long()]))", "torch.tensor(substitutes).long()])).flip(0)", "rows are in the order of their tokens", "model/test_row_lookup.py"),
    Mutant("rows that no token names", "engine/reading/embedding_rows.py", "out.zero_()", "pass", "a row that no token names has a gradient of zero", "engine/test_embedding_rows.py"),
    Mutant("rows in a row's parts", "engine/reading/embedding_rows.py", "place * width + first - row * width :", "place * width :", "a group that begins within a row gets its part", "engine/test_embedding_rows.py"),
    Mutant("the norm of rows alone", "engine/optimizer/gradients.py", "else rows.whole(rounded))", "else rounded)", "norms have the bits of the whole matrix", "gpu/test_exactness.py gpu/test_embedding_rows.py"),
    Mutant("the matrix goes up", "engine/steps/step.py", "self._reader.expect(uses, rows=state.rows)", "self._reader.expect(uses)", "the embedding's matrix stays in host memory", "gpu/test_embedding_rows.py"),
    Mutant("rows of a matrix that is read", "model/cut/probe.py", "if row is None or row < num_rows:", "if row is None:", "code that reads the matrix itself gets it", "model/test_row_lookup.py"),
    Mutant("leaving gradients without a limit", "engine/optimizer/gradients.py", "max(0, self._leaving_bytes - len(memory))", "1 << 60", "predicted GPU memory is enough", "engine/test_gradients.py"),
    Mutant("flash attention is not asked", "hardware/gpu.py", '    os.environ[_FLASH_ATTENTION] = "1"\n', "", "flash attention is deterministic where the config says so", "model/test_flash_attention.py"),
    Mutant("flash attention stays deterministic", "hardware/gpu.py", "        if own is None:\n            os.environ.pop(_FLASH_ATTENTION, None)", "        if own is None:\n            pass", "what a run sets in the environment ends with it", "model/test_flash_attention.py"),
    Mutant("any version of flash attention", "model/values/flash_attention.py", "    if not is_new_enough:", "    if False:", "flash attention that ignores what it is asked is rejected", "model/test_flash_attention.py"),
    Mutant("a speculation goes on to the end", "engine/optimizer/speculation.py", "_CERTAIN * self._max_norm", "1e30", "speculating ends once clipping is certain", "engine/test_speculation.py engine/test_exactness.py"),
    Mutant("states that were updated in vain", "engine/optimizer/update.py", "self._pipeline.cancel(updated)", "self._pipeline.cancel(frozenset())", "resident states are those of the current generation", "engine/test_exactness.py"),
    Mutant("a card with the place of the data", "run/train/card.py", "os.path.basename(os.path.abspath(dataset.path))", "os.path.abspath(dataset.path)", "a model card names no path of the machine", "e2e/test_card.py"),
    Mutant("a card of the last step", "run/train/card.py", ".up_to(step).steps", ".steps", "the card of a saved step has the losses up to it", "e2e/test_card.py"),
    Mutant("a tracker gets what is not committed", "run/train/train.py", "self._trackers.report(self._store.progress.step)", "self._trackers.report(metrics.step)", "trackers get committed steps alone", "e2e/test_trackers.py"),
    Mutant("a tracker gets steps again", "run/train/tracker_child.py", "number > sent:", "number > 0:", "no step is sent twice", "run/test_trackers.py e2e/test_trackers.py"),
    Mutant("a run that goes back stays", "run/train/tracker_child.py", "if sent > setup.committed_step:", "if False:", "a run that goes back begins a new run of the tracker", "run/test_trackers.py e2e/test_trackers.py"),
    Mutant("the whole directory goes to the hub", "run/train/hub.py", "[glob.escape(file.name) for file in marker.files]", '["*"]', "only the export is uploaded", "run/test_hub.py"),
    Mutant("an unclipped step takes as long", "planning/search/clipping.py", "replace(decisions, holds_gradients=False)", "decisions", "the plan tells what an unclipped step takes", "planning/test_plan.py"),
    Mutant("another plan begins with nothing", "engine/optimizer/update.py", "self._resident.follow(self._blocks_of(placement.resident_weights))", "self._resident.forget()", "what is resident stays when the plan changes", "engine/test_follow.py"),
    Mutant("another plan stops nothing", "engine/optimizer/groups.py", "self.forget_states(frozenset(self._states) - resident_states)", "pass", "what no longer stays is released", "engine/test_follow.py"),
    Mutant("a recorded step is recorded for ever", "training/loop.py", "self._recording = None", "pass", "one step is recorded", "training/test_loop.py"),
    Mutant("the recorded step has the last word", "planning/time/refined.py", "forward = median([recorded_forward, *seen_forward])", "forward = recorded_forward", "operator times are the median of the first steps", "planning/test_refined.py run/test_adaptation.py"),
    Mutant("only a drive that never rests is slow", "planning/time/refined.py", "(_BUSIEST_SHARE if seen > max(others) else _BOUND_SHARE)", "_BOUND_SHARE", "drives that turn out slower are planned for", "planning/test_refined.py run/test_adaptation.py"),
    Mutant("what is saved is not counted", "planning/time/refined.py", "share * (recomputed - saved)", "share * recomputed", "the plan of the steps is known", "planning/test_refined.py"),
    Mutant("RAM holds any model", "papers/rivals.py", "elif host_bytes > model.host_bytes:", "elif False:", "a system that keeps states in RAM does not fit a model that is larger", "papers/test_in_memory.py"),
    Mutant("an idle drive is slow", "planning/time/refined.py", "if factor > 1.0 or is_bound:", "if True:", "a drive that waits is not slow", "planning/test_refined.py"),
    Mutant("a layer is tried in step 1", "run/train/finetune.py", "    if cached is None:\n", "    if False:\n", "what cannot run is found before anything is written", "e2e/test_trial.py"),
    Mutant("other operators move nothing", "planning/time/costs.py", "head += profile.head_moved_bytes / memory_rate", "pass", "what other operators move takes time", "planning/test_costs.py"),
    Mutant("products alone move bytes", "engine/steps/footprint_watch.py", "if packet not in _PRODUCTS and (", "if packet in _PRODUCTS and (", "the bytes of other operators are those counted by hand", "engine/test_footprint.py"),
    Mutant("own threads are others", "hardware/load.py", "cores = number - (idle + own) / elapsed", "cores = number - idle / elapsed", "a run's own threads are not other work", "hardware/test_load.py"),
    Mutant("AdamW is subtracted twice", "run/train/planner.py", "lost_seconds = share * updated", "lost_seconds = 2 * share * updated", "blocks' times are without what AdamW takes of them", "run/test_planner.py"),
    Mutant("one step changes the plan", "run/train/adaptation.py", "len(self._departed) < NUM_STEPS or", "", "three steps in a row depart", "run/test_adaptation.py"),
    Mutant("plans without end", "run/train/adaptation.py", "self._num_waited, self._wait = 0, 2 * self._wait", "pass", "plans change ever more seldom", "run/test_adaptation.py"),
    Mutant("another plan for nothing", "run/train/adaptation.py", "(1 - _GAIN_OF_NEW_PLAN) * _seconds(now, clipped)", "2 * _seconds(now, clipped)", "a plan is changed for a gain", "run/test_adaptation.py"),
    Mutant("idle drives fill nothing", "engine/optimizer/groups.py", "block.num_elements > 0 and block.index in self._resident", "False and block.index in self._resident", "states that stay are read while nothing is updated", "engine/test_follow.py"),
    Mutant("wear in vain is free", "planning/search/clipping.py", "needed = self.time_per_wear *", "needed = 0.0 *", "writing in vain counts", "engine/test_speculation.py"),
    Mutant("time in vain is free", "planning/search/clipping.py", "vain_shares * (self.vain_seconds + needed)", "vain_shares * needed", "updating in vain counts", "engine/test_speculation.py"),
    Mutant("advice plans with clipping", "planning/forecast/ratel_forecast.py", "(decisions.holds_gradients and setting.clips)", "decisions.holds_gradients", "advice tells what clipping costs", "planning/forecast/test_ratel_forecast.py"),
    Mutant("any split is taken", "planning/search/split.py", "fastest = max(each.tokens_per_second for each in fitting)", "fastest = 0.0", "the split is the fastest that fits", "planning/test_split.py"),
    Mutant("splits that do not fit", "planning/search/split.py", "fitting = [each for each in rates if each.fits]", "fitting = rates", "the split is the fastest that fits", "planning/test_split.py"),
    Mutant("the plan splits again", "run/train/store.py", 'return config if isinstance(start, StartOver) else as_recorded(config)', "return config", "a run keeps the split that it began with", "e2e/test_planned_split.py"),
    Mutant("the plan chooses chunks again", "run/inputs/settings.py", "is_planned = config.split is None or config.is_chunk_planned", "is_planned = config.split is None", "a run keeps the chunks that it began with", "e2e/test_head_chunk.py"),
    Mutant("the engine has its own chunks", "run/train/engine.py", "chunk_tokens=plan.workload.chunk_tokens", "chunk_tokens=None", "the engine follows the plan's chunks", "run/test_split.py e2e/test_head_chunk.py"),
    Mutant("chunks of 64 MiB on every card", "planning/search/head_chunk.py", "for doublings in range(5)", "for doublings in range(1)", "chunks of the head grow with the card", "planning/test_head_chunk.py"),
    Mutant("the smallest chunk in doubt", "planning/search/head_chunk.py", "return min(choices, key=lambda size: (cost(size), -size))", "return min(choices)", "no size of the chunks is predicted to be better", "planning/test_head_chunk.py"),
    Mutant("a micro-batch of the head begins anew", "engine/optimizer/host_sums.py", "total[piece].copy_(rounded) if is_first else", "total[piece].copy_(rounded) if True else", "a tied head summed in host memory has the same bits", "gpu/test_exactness.py"),
    Mutant("rows of the head are forgotten", "engine/optimizer/lookup_sum.py", "            part = part + own\n", "            part = own\n", "a tied head summed in host memory has the same bits", "gpu/test_exactness.py"),
    Mutant("chunks of the head wait for no download", "engine/optimizer/host_sums.py", "self._device.free_downloads()", "pass", "predicted GPU memory is enough", "gpu/test_planned_memory.py"),
    Mutant("a head's gradient moves for nothing", "planning/duties/sums.py", 'yield Work("waited", "sums", head, up_bytes + down_bytes, "backward")', "pass", "a head that is summed in host memory costs time", "planning/test_costs.py"),
    Mutant("larger chunks take no more memory", "planning/memory/gpu_memory.py", "<= other._uses(key).peak_bytes(", "<= 2 * other._uses(key).peak_bytes(", "a size that may be better is planned", "planning/test_head_chunk.py"),
    Mutant("chunks are added up for nothing", "planning/time/costs.py", "adding = head_sum_bytes /", "adding = 0 * head_sum_bytes /", "adding up the head's gradients takes time", "planning/test_costs.py"),
    Mutant("norm of the scaled loss", "engine/optimizer/gradients.py", "return values.mul_(self._scale) if is_free else values * self._scale", "return values", "the norm is that of the gradient", "engine/test_exactness.py"),
    Mutant("bias correction a step late", "engine/optimizer/settings.py", "options[\"beta2\"] ** update.number", "options[\"beta2\"] ** (update.number + 1)", "AdamW has torch's bits", "engine/test_exactness.py"),
    Mutant("decay of norms and biases", "engine/optimizer/group_update.py", "last - start, parameter.decay)", "last - start, True)", "norms and biases do not decay", "engine/test_exactness.py"),
    Mutant("every step rounds alike", "engine/optimizer/group_update.py", "{self._seed}/{number}/{each", "{self._seed}/1/{each", "stochastic rounding has the bits of its definition", "engine/test_optimizers.py"),
    Mutant("slices round from 0 on", "engine/optimizer/group_update.py", "parameter.first + first - parameter.start", "first - parameter.start", "stochastic rounding does not depend on ranks", "ranks/test_exact.py"),
    Mutant("parameters without a gradient decay", "engine/optimizer/group_update.py", "if has_gradient and first < last", "if first < last", "a parameter without a gradient keeps its bits", "engine/test_group_update.py"),
    Mutant("gradient of the first group", "engine/optimizer/groups.py", "gradient.elements(group.start, group.stop, self._pool)", "gradient.elements(0, group.stop - group.start, self._pool)", "each group is updated by its own gradient", "engine/test_exactness.py"),
    Mutant("parts across chunks", "engine/optimizer/group_update.py", "block.record.page_elements if checksums is None else checksums.chunk_elements", "block.record.page_elements", "threads of AdamW take whole chunks", "engine/test_exactness.py"),
    Mutant("a clipped speculation stands", "engine/optimizer/update.py", "if clip < 1.0:", "if False:", "a speculation that was wrong is done again", "engine/test_exactness.py"),
    Mutant("speculation whatever was clipped", "engine/optimizer/update.py", "self._speculation.end(is_clipped=clip < 1.0)", "self._speculation.end(is_clipped=False)", "updates wait for the norm while clipping is frequent", "engine/test_step.py"),
    Mutant("a failed read is forgotten", "engine/reading/host_weights.py", "                self._error = error", "                pass", "a failed read is an error for every user of the weights", "engine/test_host_weights.py"),
    Mutant("resident weights after a failed step", "engine/optimizer/update.py", "self._resident.forget()  # the step", "pass  # the step", "a step that is run again takes nothing in memory on trust", "engine/test_step.py"),
    Mutant("settled before it is written", "engine/optimizer/update.py", "self._resident.get(block))\n            self._pipeline.wait_unfinished(at_most=0)", "self._resident.get(block))\n            self._pipeline.wait_unfinished(at_most=1)", "a step is committed when all of it is written", "engine/test_exactness.py"),
    Mutant("gradients that come and go", "engine/optimizer/update.py", "if now != then:", "if False:", "a parameter with a gradient in some steps only is rejected", "engine/test_step.py"),
    Mutant("stale states after a discard", "engine/optimizer/groups.py", "self._valid -= forgotten", "pass", "resident states are those of the current generation", "engine/test_step.py engine/test_exactness.py"),
    Mutant("states are not checked", "engine/optimizer/group_update.py", "raise self._current.mismatch(self._block, start, stop, field_index=field_index, chunk=chunk)", "pass", "damaged optimizer states are noticed", "engine/test_faults.py"),
    Mutant("what is read ahead is not counted", "engine/reading/block_reader.py", "each.issued, each.last)", "each.first, each.last)", "eval and generate plan the memory that blocks take", "engine/test_forward.py"),
    Mutant("a partial sum takes the memory of its upload", "engine/optimizer/partial_sums.py", "in_use.close()  # what comes", "pass  # what comes", "host memory stays as it is until its upload is over", "gpu/test_program.py"),
    Mutant("one chunk of a shared matrix", "engine/replay/loss.py", "before.to(torch.float32, copy=True).add_(gradient)", "before.float()", "the gradients of all chunks count", "engine/test_program.py"),
    Mutant("the last segment brings no partial sum", "engine/segments/head.py", "shared_sums.add(contribution[num_own", "shared_sums.add(contribution[:0] and contribution[num_own", "the last use of a shared matrix counts", "engine/test_program.py"),
    Mutant("a pass that is given up goes on", "engine/reading/block_reader.py", "self.reset()\n        self._timeline", "self._timeline", "a block computes with its own weights", "engine/test_forward.py"),
    Mutant("all micro-batches in one pass", "engine/steps/forward.py", "if taken_bytes + largest_bytes > self._held_bytes:", "if not self._held_bytes:", "hidden states of a pass stay within their memory", "engine/test_forward.py"),
    Mutant("eval counts the last sequence twice", "run/ask/evaluate.py", "for step in range(rows.steps_per_epoch):", "for step in range(rows.steps_per_epoch + 1):", "eval counts every token with loss once", "e2e/test_eval.py"),
    Mutant("the head is opened a layer early", "run/ask/whole_model.py", "if index == spec.num_layers - 1:", "if index == spec.num_layers - 2:", "generate computes with one block's weights at a time", "run/test_whole_model.py"),
    Mutant("prompts padded on the right", "run/ask/generate.py", "[settings.pad_token_id] * (width - len(each)) + each", "each + [settings.pad_token_id] * (width - len(each))", "generate gives the tokens of the model's own generate", "e2e/test_generate.py"),
    Mutant("prompts without the prompt for the answer", "data/text/chat_child.py", 'return Found(text=render(messages, "plain"), spans=[])', 'return Found(text=render(messages, "none"), spans=[])', "a prompt ends as it does before an answer in training", "e2e/test_generate.py"),
    Mutant("keys and values are not counted", "run/ask/generate.py", "return (model.spec.num_layers + 2) * width", "return 2 * width", "generate plans the memory of keys and values", "run/test_generate.py"),
    Mutant("old weights in forward", "engine/steps/build.py", "in_shadow = updates.is_in_shadow(block)", "in_shadow = False", "forward computes with the newest weights", "engine/test_exactness.py"),
    Mutant("a read unit waits for its turn", "engine/cache/offloader.py", "self.read is None or self.read.done)", "self.read is None)", "a unit goes up as soon as it has been read", "engine/test_offloading.py"),
    Mutant("a spilled unit waits for its memory", "engine/cache/activations.py", "if not self._device.is_host:", "if not self._device.is_host and (self._coming is None or self._coming.place is None):", "uploads of spilled units overlap with computing", "gpu/test_simulated_time.py"),
    Mutant("uploads in one queue", "engine/device/gpu.py", "stream = self._up[lane]", "stream = self._up[\"weights\"]", "uploads of units do not queue behind weights", "gpu/test_device.py"),
    Mutant("offloaded slices begin at zero", "engine/cache/offloader.py", "first + self.offset", "first", "what is fetched is what was offloaded", "engine/test_offloading.py"),
    Mutant("dropout draws anew", "engine/replay/tape.py", "generator_of(args, kwargs).set_state(state)", "pass", "recomputed operators draw what they drew", "engine/test_tape.py engine/test_exactness.py"),
    Mutant("offloaded before it is changed", "engine/replay/tape.py", "if self._mutated.isdisjoint(self.operators[position].writes)\n        }", "if True\n        }", "what changes later is not offloaded", "engine/test_tape.py"),
    Mutant("custom functions write unseen", "engine/replay/tape.py", "note(tensors_in((args, kwargs)))", "pass", "what a custom autograd function gets is not offloaded", "engine/test_tape.py"),
    Mutant("state goes from row to row", "model/values/module_state.py", "self._put_back(place, before)", "pass", "each call begins with the state that the model was built with", "engine/test_carried_state.py"),
    Mutant("uses of a block forget those above", "engine/optimizer/partial_sums.py", "roots.tensors.append(parameter)\n                roots.gradients.append(", "roots.tensors.append(parameter)\n                roots.gradients.append(0 * ", "the uses of a shared block add up", "engine/test_carried.py"),
    Mutant("a borrowed gradient has no micro-batch", "engine/optimizer/partial_sums.py", "key, present = (block.index, number), ", "key, present = (block.index, 0), ", "each micro-batch has its own partial sum", "engine/test_carried.py"),
    Mutant("partial sums stay", "engine/optimizer/partial_sums.py", "self._partials.pop((block.index, number)).lease.release()", "pass", "a partial sum ends with the first use of its block", "engine/test_shared_blocks.py"),
    Mutant("a borrowed block is not read", "schedule/lifetimes.py", "[use.segment.bound for use in uses]", "[use.segment.blocks for use in uses]", "each use of a shared block reads it", "engine/test_shared_blocks.py"),
    Mutant("partial sums take no memory", "planning/duties/sums.py", "sums.first, sums.last)", "sums.last, sums.last)", "partial sums are planned", "engine/test_planned_lifetimes.py"),
    Mutant("carried gradients come last", "model/values/carried.py", "roots.gradients.append(leaf.grad)\n        leaf.grad = None", "roots.gradients.append(torch.zeros_like(leaf))", "gradients of carried tensors are added as autograd adds them", "engine/test_carried.py"),
    Mutant("made tensors get no gradient", "model/values/carried.py", "_add_root(roots, made, leaf)\n        for was", "pass\n        for was", "what a layer returns gets its readers' gradients", "engine/test_carried.py"),
    Mutant("mappings are not put back", "model/values/carried.py", "self._restore(before)\n        call", "call", "a replay reads what its forward has read", "engine/test_carried.py"),
    Mutant("what is carried keeps its graph", "model/values/carried.py", "mapping[key] = changed(mapping[key], _leaf)", "pass", "no graph goes from layer to layer", "engine/test_carried.py"),
    Mutant("what is carried takes no memory", "planning/profile/activations.py", "2 * tokens * spec.passed_bytes", "2 * tokens * spec.hidden_size * spec.dtype_bytes", "what layers get besides hidden states is planned", "planning/test_activations.py"),
    Mutant("code between layers goes unseen", "model/cut/probe.py", "or not is_same:", ":", "what depends on layers below is refused", "model/test_around_layers.py"),
    Mutant("masks decide about packing", "model/cut/trials.py", "if not _is_same(outputs, num_tokens, watched):", "if False:", "samples are packed where numbers show that they stay apart", "model/test_trials.py"),
    Mutant("products of another matrix", "model/cut/stand_ins.py", "torch.conj_physical(torch.fft.rfft(left, size))", "torch.fft.rfft(left, size)", "stand-ins multiply as the matrices that they stand for", "model/test_stand_ins.py"),
    Mutant("another operator is repeated", "engine/replay/repeating.py", " or self._funcs[position] is not func:", ":", "a unit that does not repeat its template is recorded", "engine/test_tape.py"),
    Mutant("another shape is repeated", "engine/replay/repeating.py", " or not all(map(_has_shape, parts, expected))", "", "a unit that does not repeat its template is recorded", "engine/test_tape.py"),
    Mutant("a unit that ends early is repeated", "engine/replay/repeating.py", "if self._position != len(self._funcs):", "if False:", "a unit that does not repeat its template is recorded", "engine/test_tape.py"),
    Mutant("routers repeat", "engine/replay/repeating.py", "if recorder.reads_values or any(operator.is_needed for operator in recorder.operators):", "if recorder.reads_values:", "what may take another course is recorded each time", "engine/test_tape.py"),
    Mutant("what Python reads goes unseen", "engine/replay/repeating.py", "if recorder.reads_values or any(", "if any(", "what may take another course is recorded each time", "engine/test_tape.py"),
    Mutant("a failed layer leaves something", "model/values/carried.py", "self._restore(before)  # it may be run again", "pass", "a unit that does not repeat its template begins anew", "engine/test_carried.py"),
    Mutant("named tokens are not tried", "model/cut/probe.py", "for token in (0, *special_tokens(config, num_rows)):", "for token in (0,):", "a GPU gets rows only where tokens have rows of their own", "model/test_row_lookup.py"),
    Mutant("repeated draws are those of the template", "engine/replay/repeating.py", "self._random_states[position] = generator_of(args, kwargs).get_state()", "self._random_states[position] = torch.zeros_like(generator_of(args, kwargs).get_state())", "random operators draw what they drew", "engine/test_tape.py engine/test_randomness.py"),
    Mutant("another operator is replayed", "engine/replay/tape.py", " or tape.funcs[position] is not func:", ":", "a forward that does not repeat itself stops", "engine/test_tape.py"),
    Mutant("a replay that ends early", "engine/replay/tape.py", "if self._position != len(self._tape.funcs):", "if False:", "a forward that does not repeat itself stops", "engine/test_tape.py"),
    Mutant("gradients without the loss scale", "engine/replay/loss.py", "else mean * self.loss_scale", "else mean", "fp16 gradients are scaled", "engine/test_exactness.py"),
    Mutant("token 0 is ignored", "model/cut/layer_runner.py", "ignore_index=IGNORED_TARGET", "ignore_index=0", "only -100 is ignored", "engine/test_exactness.py"),
    Mutant("an upload does not wait", "engine/device/gpu.py", "stream.wait_event(buffer.free)", "pass", "device memory is not overwritten while it is in use", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("a download does not wait", "engine/device/gpu.py", "self._down.wait_event(_record(self._compute))", "pass", "a download waits for what computes it", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("a download is forgotten", "engine/device/gpu.py", "self._downloading.extend(leaving)", "pass", "what is downloaded stays until it has left", "gpu/test_device.py gpu/test_exactness.py"),
    Mutant("manifest over the current one", "store/commit.py", "generation % NUM_MANIFESTS", "(generation + 1) % NUM_MANIFESTS", "the older manifest is overwritten", "store/test_checksums.py"),
    Mutant("commits after a failed sync", "store/commit.py", "        self._is_stopped = True\n        raise", "        raise", "nothing is committed after a failed sync", "store/test_store_power.py"),
    Mutant("published before it is durable", "store/store.py", "self._commits.sync(manifest.progress.step)", "pass", "a manifest refers to durable bytes only", "store/test_store_power.py"),
    Mutant("no shadow", "store/store.py", "slot = min(self._free_slots())", "slot = self._commits.manifest.slot", "a step never overwrites the current generation", "store/test_store_power.py"),
    Mutant("pinned slots are free", "store/store.py", "return {manifest.slot, *pinned,", "return {manifest.slot,", "a saved step is never overwritten", "store/test_store_power.py"),
    Mutant("held slots are free", "store/store.py", ", *(generation.slot for generation in self._held)}", "}", "a held generation is not overwritten", "store/test_holds.py"),
    Mutant("no generation to fall back on", "store/store.py", "before = None if self.overwrites else self._commits.manifest.current", "before = None", "a damaged step gives way to the one before", "store/test_checksums.py"),
    Mutant("torn manifests count", "store/manifest.py", " or zlib.crc32(body) != crc:", ":", "a torn manifest does not count", "store/test_manifest.py"),
    Mutant("lost manifests are not noticed", "store/manifest.py", "if len(valid) == 2 and newest.previous_sha256 != valid[0][1]:", "if False:", "a manifest that a drive lost is noticed", "store/test_manifest.py"),
    Mutant("the older manifest wins", "store/manifest.py", "newest, _ = valid[-1]", "newest, _ = valid[0]", "the newest manifest counts", "store/test_manifest.py"),
    Mutant("checksums without the step", "store/checksums.py", "self._store_id, self._step, block", "self._store_id, 0, block", "stale chunks are noticed", "store/test_checksums.py"),
    Mutant("checksums without the place", "store/checksums.py", "block, index, chunk))", "block, index, 0))", "misplaced chunks are noticed", "store/test_checksums.py"),
    Mutant("checksum tables are not checked", "store/checksums.py", "if found != root:", "if False:", "a damaged checksum table is noticed", "store/test_checksums.py"),
    Mutant("frozen blocks are those of any store", "store/checksums.py", "_SEED.pack(self._store_id, self._step,", "_SEED.pack(bytes(16), self._step,", "bytes of another store do not pass", "store/test_frozen.py store/test_checksums.py"),
    Mutant("frozen blocks are copied each time", "store/fill.py", "if is_new or not block.is_frozen]", "if True]", "a snapshot moves frozen blocks once", "store/test_frozen.py"),
    Mutant("gaps of base files are left", "store/base_reader.py", "target[position:start] = 0", "pass", "a block in files is its array", "store/test_base_files.py"),
    Mutant("base files of any size", "store/base_reader.py", "if found != num_bytes:", "if False:", "a changed base file is refused", "store/test_base_files.py"),
    Mutant("base files are not checked", "store/base_reader.py", "            part.check()\n", "", "a changed base file is refused", "store/test_base_files.py"),
    Mutant("tensors that files have transposed", "model/export/checkpoint.py", "if content.strides == contiguous_strides(entry.shape):", "if True:", "a block in files is its array", "model/test_in_place.py"),
    Mutant("groups of int4 in order", "model/files/quantised.py", "if of_columns is None:", "if of_columns is None or len(of_columns) % number == 0:", "int4 has the numbers of the files", "model/test_quantised_files.py"),
    Mutant("a staged step counts", "store/store.py", "        self._phase = _Phase.STAGED\n        written", "        self._phase = _Phase.STAGED\n        self._commits.publish(manifest)\n        written", "what is staged counts once it is published", "store/test_frozen.py"),
    Mutant("one rank has all matrices", "schedule/slices.py", "(rank_slice.size - 1 - block.index) % rank_slice.size", "rank_slice.size - 1", "ranks share what is updated whole", "engine/test_rule_in_torch.py"),
    Mutant("torch gets gradients as they come", "engine/optimizer/torch_update.py", ".mul_(update.gradient_scale)", "", "a rule in torch has the bits of plain PyTorch", "engine/test_rule_in_torch.py"),
    Mutant("each range has a fixed field's values", "store/layout.py", "self.fixed if num_elements > 0 and start == 0 else 0", "self.fixed if num_elements > 0 else 0", "every byte of a record is written once", "store/test_store_format.py"),
    Mutant("ranks cut units", "store/layout.py", "num_units * rank // self.size * unit", "num_elements * rank // self.size", "two ranks do not share a unit", "store/test_layout.py"),
    Mutant("reads are not checked", "store/region.py", "self.table().check_chunks(block, field, start, stop, memory)", "pass", "no damaged byte is used", "store/test_checksums.py"),
    Mutant("copies are not checked", "store/fill.py", "self.generation.read(index, field.name, start, stop, part)", "self.generation.read_unchecked(index, start, stop, {field.name: part})", "a snapshot has no damaged byte", "store/test_fill.py"),
    Mutant("the state of another run", "store/open.py", "        if old != new\n    }", "        if False\n    }", "a run does not resume another one's store", "store/test_store_faults.py e2e/test_resume.py"),
    Mutant("the earlier length's rates", "run/train/train.py", "learning_rates(config, self._inputs.num_steps, ", "learning_rates(config, max(4, self._store.progress.step), ", "a run that gets more steps follows the longer schedule", "e2e/test_length.py"),
    Mutant("an earlier run gets another length", "run/train/decided.py", "if store is not None and not rounds_as_now:", "if False:", "a run keeps the length that it was begun with", "e2e/test_length.py"),
    Mutant("what is left of a step is dropped", "run/inputs/length.py", "math.ceil(exact) if", "max(1, round(exact)) if", "lengths are those of Trainer", "data/test_run_length.py"),
    Mutant("fewer steps than are done", "run/inputs/length.py", "if first_step > now:", "if False:", "a run is not cut below the steps that are done", "e2e/test_length.py"),
    Mutant("the length in the identity", "run/inputs/settings.py", "*DECIDES_THE_BITS, *others}", "*DECIDES_THE_BITS, *others, *DECIDES_THE_LENGTH}", "a run goes on with more steps", "run/test_settings.py"),
    Mutant("moments are forgotten", "run/train/branch.py", "return Copied(self.generation)", "return copied_weights(self.generation, self.generation.progress)", "a run that starts from another one has its moments", "e2e/test_branch.py"),
    Mutant("moments are kept", "model/files/import_weights.py", "encode_record(block.record, buffers.tensors((W32, *block.record.fields), stop - start))", "pass", "a fresh optimizer has no moments", "model/test_copy_weights.py"),
    Mutant("steps begin anew", "store/fill.py", "return self.generation.progress", "return Progress(step=0, updates=0, loss_scale=1.0, good_steps=0, tokens=0)", "a run that starts from another one goes on after its step", "e2e/test_branch.py"),
    Mutant("any origin", "run/files/origin.py", "    if is_same:", "    if True:", "a run is not taken for one that began elsewhere", "run/test_origin.py"),
    Mutant("the other run's writes", "training/wear_limit.py", "return self.first_step + (self.max_bytes", "return (self.max_bytes", "storage.max_tb_written counts what this run writes", "training/test_loop.py"),
    Mutant("idle buffers of the plan before", "run/train/engine.py", "context.pool.trim()\n            else:", "pass\n            else:", "idle buffers leave what the new plan counts on", "run/test_engine.py"),
    Mutant("a broken machine passes", "report/words/doctor.py", 'if diagnosis.verdict == "broken"]', 'if diagnosis.verdict == "worse"]', "ratel doctor fails where something is broken", "cli/test_doctor.py"),
    Mutant("a drive below layers", "hardware/mounts.py", "if parts and depth < _MAX_DEPTH:", "if False:", "drives are found through LVM and RAID", "hardware/test_checkup_drives.py"),
    Mutant("check asks for no tracker", "run/train/first_checks.py", "    errors.attempt((\"report_to\",), partial(check_trackers, config))\n", "", "check and finetune refuse the same", "e2e/test_agreement.py"),
    Mutant("the export beside no store", "run/train/space.py", "    beside = taken[device_of(export)]\n", "    beside = 0\n", "a run whose export will not fit next to its store is refused before its first step", "run/test_space.py"),
    Mutant("a snapshot of the same settings", "run/train/snapshots.py", "if record is None or not is_of_other_run(config, path, record):", "if record is None or record.run:", "a snapshot of another run with equal settings is not overwritten", "e2e/test_restore.py"),
    Mutant("truncated files open", "store/open.py", "if size_bytes < num_bytes:", "if False:", "a truncated store is noticed", "store/test_store_faults.py"),
    Mutant("half a step in place opens", "store/open.py", "if manifest.step_in_place is not None:", "if False:", "a step that was being written in place is reported", "store/test_store_faults.py"),
    Mutant("directories in any order", "store/headers.py", "if found.file_index != index:", "if False:", "swapped directories are noticed", "store/test_store_faults.py"),
    Mutant("the lock is shared", "store/lock.py", "fcntl.LOCK_SH if shared else fcntl.LOCK_EX", "fcntl.LOCK_SH", "two runs never share a store", "store/test_lock.py"),
    Mutant("stores are replaced unasked", "store/create.py", "if reason is not None and not overwrite:", "if False:", "a store is replaced only if that is asked for", "store/test_store_creation.py"),
    Mutant("short transfers begin again", "io/requests.py", "self.offset += gained_bytes", "pass", "a short transfer continues where it ended", "io/test_queue_failures.py"),
    Mutant("a full drive is corruption", "io/requests.py", "if cause.errno in _NO_SPACE:", "if False:", "a full drive ends with the exit code of the environment", "io/test_queue_failures.py"),
    Mutant("sums are not rounded", "run/ask/plain_training.py", "return master.grad.to(parameter.dtype).float()", "return master.grad", "the plain PyTorch of `ratel bench` is the loop that a run equals", "run/test_bench.py"),
    Mutant("torn pages are kept", "io/requests.py", "result - result % PAGE_BYTES", "result", "requests begin on pages", "io/test_requests.py"),
    Mutant("pinned again for each width", "io/buffers.py", "region = self._take_own(size_bytes, purpose) if pin is not None else None", "region = None", "buffers for rows of any width are pinned once", "io/test_buffers.py"),
    Mutant("outgrown buffers pile up", "io/buffers.py", "                self._drop_largest(purpose)\n", "", "idle pinned buffers are bounded", "io/test_buffers.py"),
    Mutant("gathered rows beyond the plan", "engine/reading/weights.py", ", at_most_bytes=largest_bytes)", ")", "rows take the memory that was planned, in buffers that are reused", "gpu/test_embedding_rows.py"),
    Mutant("gradients of rows beyond the plan", "engine/optimizer/gradients.py", "at_most_bytes=self._most_elements * size,", "", "rows take the memory that was planned, in buffers that are reused", "gpu/test_embedding_rows.py"),
    Mutant("rows of a tied head beyond the plan", "engine/optimizer/lookup_sum.py", "None if self._most_rows is None else", "None if True else", "rows take the memory that was planned, in buffers that are reused", "gpu/test_embedding_rows.py"),
    Mutant("rows take a tied head's buffer", "engine/optimizer/lookup_sum.py", '"rows of the tied head\'s gradient"', '"gradient of the tied head"', "rows take the memory that was planned, in buffers that are reused", "gpu/test_embedding_rows.py"),
    Mutant("rows summed in host memory beyond the plan", "engine/optimizer/host_sums.py", "None if most_rows is None else", "None if True else", "rows take the memory that was planned, in buffers that are reused", "gpu/test_embedding_rows.py"),
    Mutant("rows of stripes overlap", "io/striping.py", "taken[file_index] += 1", "pass", "no two addresses share a byte", "io/test_striping.py"),
    Mutant("refused for ever", "io/buffers.py", "        if self._num_waited >= self._num_to_wait:", "        if False:", "memory that could not be pinned is tried again", "io/test_buffers.py gpu/test_device.py"),
    Mutant("pinning under the lock", "io/buffers.py", "            return _Region(size_bytes, purpose, pin)", "            with self._lock:\n                return _Region(size_bytes, purpose, pin)", "no lease waits while memory is pinned for another", "io/test_buffers.py"),
    Mutant("memory in the making is free", "io/buffers.py", "            self._reserve(size_bytes)\n        if region is None:", "            self.leased_bytes += 0 if region is None else size_bytes\n        if region is None:", "leases never pass the limit", "io/test_buffers.py"),
    Mutant("registered in one piece", "io/pinning.py", "piece_end = min(end, (address // PIECE_BYTES + 1) * PIECE_BYTES)", "piece_end = end", "memory is registered in pieces, and copied so", "io/test_buffers.py gpu/test_device.py"),
    Mutant("half of a buffer stays registered", "io/pinning.py", "                _unregister(self._device, registered)\n                if", "                if", "memory that was refused can be pinned later", "gpu/test_device.py"),
    Mutant("spilled gradients are pinned", "engine/optimizer/block_gradient.py", "crosses_link=rows is not None", "crosses_link=True", "only what crosses the link is pinned", "engine/test_gradients.py"),
    Mutant("a pinned buffer is given up", "io/buffers.py", "if region is None and pin is None and not self._has_bytes_for(size_bytes):", "if False:", "pinned buffers are not made again in each step", "io/test_buffers.py"),
    Mutant("measured memory is pinned", "hardware/measure.py", '"measuring RAM", crosses_link=False', '"measuring RAM"', "only what crosses the link is pinned", "gpu/test_runs.py"),
    Mutant("pinned memory leaves none", "engine/steps/pinned.py", "return placement.groups.buffer_bytes(spec.blocks) + states", "return 0", "what is pinned ahead is not given up for the optimizer", "gpu/test_link.py"),
    Mutant("units are pinned in the step", "engine/steps/pinned.py", "        if number > 0:\n            yield PinnedBuffers(purpose_of_units", "        if False:\n            yield PinnedBuffers(purpose_of_units", "memory is pinned before the steps", "gpu/test_link.py"),
    Mutant("nothing is pinned before step 1", "run/train/train.py", "        pin_ahead(self._context, self._inputs.model.spec, plan)\n", "", "memory is pinned before the steps", "gpu/test_runs.py"),
    Mutant("a thread waits on another GPU", "engine/device/gpu.py", "    use_device(event.device)\n", "", "no thread touches another GPU", "simulated_gpu/test_simulated_gpu.py"),
    Mutant("a thread pins on another GPU", "io/pinning.py", "        use_device(self._device)\n", "", "no thread touches another GPU", "simulated_gpu/test_simulated_gpu.py"),
    Mutant("always held to a limit", "hardware/gpu.py", "    return wanted_bytes < int(", "    return 0 < int(", "torch's allocator has a limit of its own only where the user's is below the card", "gpu/test_runs.py"),
    Mutant("never held to a limit", "run/train/engine.py", "limit_bytes = plan.device_allocation_bytes if is_held_to_limit else None", "limit_bytes = None", "limits.gpu_memory holds", "gpu/test_runs.py"),
    Mutant("the user's allocator settings are lost", "hardware/gpu.py", "    if any(name in os.environ for name in _ALLOCATOR):", "    if False:", "the user's allocator settings stand", "gpu/test_runs.py"),
    Mutant("one queue to the GPU", "hardware/checkup_gpu.py", "int(connections) < _NUM_STREAMS", "False", "doctor names settings that slow a GPU down", "hardware/test_checkup_gpu.py"),
    Mutant("kernels that leak pass", "hardware/checkup_gpu.py", "is_leaky = _FIRST_LEAKY <= numbers <= _LAST_LEAKY", "is_leaky = False", "doctor names kernels that lose pinned memory", "hardware/test_checkup_gpu.py"),
    Mutant("optimizer states are pinned", "engine/optimizer/groups.py", "crosses_link=False", "crosses_link=True", "only what crosses the link is pinned", "gpu/test_link.py"),
    Mutant("hashing on the compute thread", "io/checksum_workers.py", "self._threads.submit(ticket.run, work)", "ticket.run(work)", "checksums are taken by threads of their own", "io/test_checksum_workers.py gpu/test_simulated_time.py"),
    Mutant("scratch space is not checked", "io/scratch.py", "!= self._digests[offset]:", "== 0:", "bytes read are the bytes written", "io/test_scratch.py engine/test_offloading.py"),
    Mutant("swapped operators must not run", "planning/profile/liveness.py", "if is_alive and can_be_skipped and position in swapped:", "if is_alive and position in swapped:", "views and mutations run again", "planning/test_liveness.py"),
    Mutant("those that a swap has freed still read", "planning/profile/liveness.py", "if readers[index] in self._run and readers[index] not in gone:", "if readers[index] in self._run:", "swaps one by one are swaps at once", "planning/test_liveness.py"),
    Mutant("free heap is needed", "hardware/host.py", "ctypes.CDLL(None).malloc_trim(0)", "pass", "a plan begins with what the process keeps", "hardware/test_host.py"),
    Mutant("a signal is lost in a destructor", "cli/app.py", "self._again.start()", "pass", "a signal is not lost where nothing can be raised", "cli/test_app.py"),
    Mutant("weights are always read once more", "planning/duties/updates.py", 'if stage == "update" and index not in resident:', "if index not in resident:", "predicted traffic is exact", "planning/test_traffic.py"),
    Mutant("spilled gradients do not come back", "planning/duties/gradients.py", 'yield Work("read", "held", index, sizes[index], stages[index])', "pass", "predicted traffic is exact", "planning/test_traffic.py"),
    Mutant("checksums cost nothing", "planning/duties/updates.py", 'yield Work("write", "states", -1, checksum_bytes(step.own), "forward")', "yield from ()", "predicted traffic is exact", "engine/test_step.py planning/test_traffic.py"),
    Mutant("two groups of states", "planning/profile/placement.py", "2 * self.in_flight + 1", "2 * self.in_flight", "predicted memory is enough", "planning/test_capacity.py engine/test_pipeline.py"),
    Mutant("two pending blocks on a GPU", "planning/search/choose.py", "depths = [(2, _MOST_PENDING), *_DEPTHS]", "depths = list(_DEPTHS)", "more blocks may be pending on a GPU", "planning/test_choose.py"),
    Mutant("small groups for many drives", "planning/search/choose.py", "GROUP_ELEMENTS << (num_drives - 1).bit_length())", "GROUP_ELEMENTS)", "the optimizer's groups grow with the drives", "planning/test_choose.py"),
    Mutant("one group in flight for one drive", "planning/search/choose.py", "GroupShape(elements=elements, in_flight=2)", "GroupShape(elements=elements, in_flight=1 + (num_drives > 1))", "a drive has a group to read and one to write at any time", "planning/test_choose.py"),
    Mutant("one group in flight", "engine/optimizer/pipeline.py", "self._in_flight = groups.in_flight", "self._in_flight = 1", "every drive has the next group to do", "engine/test_pipeline.py"),
    Mutant("one group in flight, in time", "engine/optimizer/pipeline.py", "self._in_flight = groups.in_flight", "self._in_flight = 1", "drives that are slow to answer do not stop the GPU", "gpu/test_simulated_time.py"),
    Mutant("pending updates take no memory", "planning/duties/gradients.py", "else arrivals[number + pending]", "else arrivals[number]", "predicted memory is enough", "planning/test_capacity.py"),
    Mutant("gradients on NVMe though they fit", "planning/memory/capacity.py", "num_in_memory = choices[num_fitting - 1]", "num_in_memory = choices[0]", "as many gradients as fit stay in memory", "planning/test_capacity.py"),
    Mutant("backward as fast as forward", "planning/profile/model_profile.py", "return 2 * self.flops_forward - self.frozen_flops", "return self.flops_forward - self.frozen_flops", "backward computes twice what forward does", "planning/test_costs.py"),
    Mutant("one rate for both ways", "planning/time/stages.py", ", down_bytes / link.from_gpu_bytes_per_second", ", down_bytes / link.to_gpu_bytes_per_second", "each direction of the link has its rate", "planning/test_costs.py"),
    Mutant("both ways at any rate", "planning/time/stages.py", "min(nvme.mixed_bytes_per_second, 2 * read_rate, 2 * write_rate)", "nvme.mixed_bytes_per_second", "reading less never takes longer", "planning"),
    Mutant("twice the memory", "planning/search/problem.py", "limit_bytes=self.decisions.host_limit_bytes)", "limit_bytes=2 * self.decisions.host_limit_bytes)", "what is chosen fits", "planning/test_choose.py"),
    Mutant("a link that is always full duplex", "planning/time/link.py", "        (up_bytes + down_bytes) / both_rate,\n", "", "both directions share the link", "planning/test_costs.py"),
    Mutant("activations book all of the link", "planning/time/link.py", "_BOOKED = 0.85", "_BOOKED = 1.0", "activations get 85 % of the link", "planning/test_costs.py"),
    Mutant("no memory for fragments", "hardware/spec.py", "return limit_bytes - limit_bytes // 25", "return limit_bytes", "a plan leaves 4 % of limits.gpu_memory", "planning/forecast/test_ratel_forecast.py"),
    Mutant("AdamW measured in a cache", "hardware/budget.py", "adamw_bytes=512 * MIB", "adamw_bytes=29 * MIB", "AdamW's rate comes from memory", "hardware/test_measure.py"),
    Mutant("a changed line counts", "training/metrics_log.py", "if end is not None and xxhash", "if False and end is not None and xxhash", "a changed bit in the metrics is found", "training/test_metrics.py"),
    Mutant("a damaged line ends the metrics", "training/metrics_log.py", "missing = missing - 1 if step is None", "missing = -1 if step is None", "what follows a damaged line stays", "training/test_metrics.py"),
    Mutant("ranks lose an option", "cli/arguments.py", "if value is None or value is False or without in", "if value is None or value is False or parameter.name == \"origin\" or without in", "a rank's command line is the caller's", "cli/test_app.py"),
    Mutant("a warning at every retry", "training/step_warnings.py", "if metrics.num_alloc_retries and not self._has_warned_of_memory:", "if metrics.num_alloc_retries:", "one warning when torch looks for GPU memory", "training/test_metrics.py"),
    Mutant("what is read in place leaves the link free", "papers/memferry.py", "return busy, ahead + busy - layer.forward_link", "return busy, ahead + busy", "reads in place and uploads share the link", "papers/test_memferry_timeline.py"),
    Mutant("uploads for backward need no window", "papers/memferry.py", "return moved <= window * (1 + _ROUNDING)", "return True", "weights for backward are there when they are needed", "papers/test_memferry_timeline.py papers/test_memferry_search.py"),
    Mutant("a choice that is ahead is dropped", "papers/memferry_search.py", "if place and ahead_of[place - 1] >= ahead:", "if place:", "no choice of modes is faster", "papers/test_memferry_search.py"),
    Mutant("a matrix is read once", "papers/memferry_costs.py", "* max(1, math.ceil(tokens / TILE_TOKENS))", "", "a product reads a matrix in place once for every 256 tokens", "papers/test_memferry_costs.py"),
    Mutant("any gradient stays on the GPU", "papers/memferry.py", "int(reserve * self.total_bytes)", "self.total_bytes", "kept gradients are within the reserve factor", "papers/test_memferry_gradients.py"),
    Mutant("wear for next to nothing", "planning/time/wear.py", "TIME_PER_WEAR: Final = 0.5", "TIME_PER_WEAR: Final = 0.05", "a percent of written bytes buys half a percent of time", "planning/test_wear.py"),
    Mutant("a level as good that writes more", "planning/search/choose.py", "return not writes_more and", "return", "what is written beyond the state buys time", "planning/test_wear.py"),
    Mutant("wear by an adapter's state", "planning/time/traffic.py", "return state_written_bytes(spec) + ADAMW.record(spec.dtype).num_bytes(frozen)", "return state_written_bytes(spec)", "frozen parameters leave a byte its price", "planning/test_wear.py"),
    Mutant("Muon without its look ahead", "schedule/muon.py", "if numbers.options[\"nesterov\"] else mean", "if not numbers.options[\"nesterov\"] else mean", "Muon has torch's bits", "engine/test_optimizers.py"),
    Mutant("Muon's rate for any shape", "engine/optimizer/settings.py", "step_size=learning_rate * ratio", "step_size=learning_rate", "a matrix's shape changes its rate", "engine/test_optimizers.py"),
    Mutant("Muon for the head", "model/cut/binding.py", "is_in_layer = 0 < segment < len(segments) - 1", "is_in_layer = True", "embedding and head are AdamW's", "engine/test_optimizers.py"),
    Mutant("more wear for a slower step", "planning/search/choose.py", "if self.sparing.time.total <= self._quickest.time.total else", "if self.sparing.time.total < 0 else", "what is written beyond the state makes no step slower", "planning/test_wear.py"),
    Mutant("one thread of AdamW beside a GPU", "planning/search/choose.py", "max(needed, memory), max(1, most // 2)", "needed, max(1, most // 2)", "AdamW keeps up with main memory where a GPU computes", "planning/test_choose.py"),
    Mutant("short rows are predicted as full ones", "planning/time/costs.py", "workload.full_micro_batches, 0.0", "workload.num_micro_batches, 0.0", "a step takes the time of its data", "planning/test_filling.py"),
    Mutant("saving counts time first", "planning/time/wear.py", "BYTES_FIRST = Objective(excess_first=True)", "BYTES_FIRST = Objective()", "storage.wear: save writes the least", "planning/test_wear.py"),
    Mutant("the slowest depth", "planning/search/choose.py", "return min(\n        evaluations,", "return max(\n        evaluations,", "what is chosen is the fastest", "planning/test_choose.py"),
    Mutant("nearly as good is half as good", "planning/search/choose.py", "_AS_GOOD = 1.005", "_AS_GOOD = 1.5", "what is chosen is the fastest", "planning/test_choose.py"),
    Mutant("the worst candidate first", "planning/search/swap.py", "key=lambda item: (-item[0], item[1])", "key=lambda item: (item[0], item[1])", "what saves most per byte is swapped first", "planning/test_swap.py"),
    Mutant("the window is read too", "planning/profile/activations.py", "_without_newest(written, SPILL_WINDOW_UNITS)", "_without_newest(written, 0)", "predicted traffic is exact", "planning/test_activations.py"),
    Mutant("a unit in use counts as saved", "planning/memory/gpu_uses.py", "self._working.backward + self._input_bytes,", "self._working.backward,", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("recomputing takes nothing", "planning/duties/activations.py", "num_bytes = costs.replay_held_bytes if keeps_swapped else costs.replay_bytes", "num_bytes = 0", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("no memory to make gradients in", "planning/duties/activations.py", "costs.making_bytes + gradient_bytes)", "costs.making_bytes)", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("gradients of activations are free", "engine/steps/footprint_watch.py", "peak[key] = max(peak[key], num_bytes + (workspace_bytes if key == TOKENS else 0))", "pass", "backward is planned from what autograd saves and makes", "engine/test_footprint.py"),
    Mutant("norms of gradients before they are rounded", "engine/optimizer/gradients.py", "del values  # the matrix of the rows comes in the place of their sum\n            self._norms[name] = _norm_on_gpu(rounded if rows", "self._norms[name] = _norm_on_gpu(values if rows", "the norm is that of the rounded gradient", "gpu/test_exactness.py engine/test_gradients.py"),
    Mutant("no room for the next block", "planning/duties/weights.py", '"weights", segment.index, ahead, at(position), end_of(position), at_most', '"weights", segment.index, 0, at(position), end_of(position), at_most', "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("a head makes half of its gradients", "planning/duties/head.py", "head.made_bytes, gradients, gradients)", "head.made_bytes // 2, gradients, gradients)", "each use takes no more of a GPU than is planned", "gpu/test_planned_memory.py"),
    Mutant("half of what waits for the embedding", "planning/duties/embedding.py", 'yield row("sums", sum_bytes, _MADE, _ROUNDED)', 'yield row("sums", sum_bytes // 2, _MADE, _ROUNDED)', "each use takes no more of a GPU than is planned", "gpu/test_planned_memory.py"),
    Mutant("what a layer takes on leaves at once", "planning/duties/activations.py", "if step.is_summed:  # what the micro-batch before", "if False:  # what the micro-batch before", "each use takes no more of a GPU than is planned", "gpu/test_planned_memory.py"),
    Mutant("no unit leaves in time", "engine/cache/activations.py", "self._device.free_downloads(max(", "max(0, max(", "where two units do not fit, forward waits for the one before", "engine/test_offloading.py"),
    Mutant("the next unit is whole at once", "engine/cache/activations.py", "None if self._units is None else self._units.ahead_bytes", "None", "where two units do not fit, the next one goes up in parts", "engine/test_offloading.py"),
    Mutant("the rest of a unit comes last", "engine/cache/activations.py", "            self._offloader.reserve(coming, most_bytes)\n", "", "where two units do not fit, the next one goes up in parts", "engine/test_offloading.py"),
    Mutant("backward prepares nothing more", "engine/cache/activations.py", "if name in most_bytes", "if False", "a unit in parts goes up while the GPU computes", "engine/test_offloading.py"),
    Mutant("attention's backward takes no workspace", "engine/steps/footprint_watch.py", "self._note_peak(_attention_workspace_bytes(tensors_in(args)))", "pass", "predicted GPU memory is enough", "engine/test_footprint.py"),
    Mutant("more of a unit than there is room for", "planning/memory/gpu_uses.py", "peak_bytes - rest.num_bytes - gradient_bytes)", "peak_bytes)", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("what of a unit is late costs nothing", "planning/time/link.py", "later_bytes - bytes_per_second * left_seconds)", "0.0)", "units that move while nothing computes take time", "planning/test_link.py"),
    Mutant("units in parts cost nothing", "planning/search/problem.py", "if units is None or units_from is None:", "if True:", "units that move while nothing computes take time", "planning/test_link.py"),
    Mutant("all units move", "planning/time/link.py", "max(0, units_from - layer * num_micro_batches)", "num_micro_batches", "units that move while nothing computes take time", "planning/test_link.py"),
    Mutant("a late unit costs nothing", "planning/time/costs.py", "waited_bytes + offloaded.exposed.up_bytes + late", "waited_bytes + late", "units that move while nothing computes take time", "planning/test_link.py"),
    Mutant("the window stays empty", "engine/reading/weights.py", "coming.is_prepared = True", "pass", "weights in the window go up while the GPU computes", "gpu/test_exposed_uploads.py"),
    Mutant("all sums go up ahead", "engine/optimizer/host_sums.py", "if num_elements > summed_elements(self._block):", "if False:", "predicted GPU memory is enough", "engine/test_host_sums.py"),
    Mutant("a sum is rounded into memory of its own", "engine/optimizer/gradients.py", "last.dtype == self._dtype and last.is_contiguous()", "False", "predicted GPU memory is enough", "gpu/test_planned_memory.py"),
    Mutant("no sum goes up ahead", "engine/optimizer/host_sums.py", "while self._to_fetch:", "while False:", "sums go up while the GPU computes", "engine/test_host_sums.py"),
    Mutant("what is not in the window is not exposed", "planning/time/stages.py", "exposed = work.exposed_bytes /", "exposed = 0 * work.exposed_bytes /", "weights that go up while nothing computes take time", "planning/test_costs.py"),
    Mutant("the window takes more than fits", "planning/profile/placement.py", "return segment.cuts[number - 1]", "return segment.cuts[-1]", "predicted GPU memory is enough", "planning/test_gpu_memory.py"),
    Mutant("resident weights are read", "planning/duties/weights.py", "if block.segment in resident:", "if False:", "predicted traffic is exact", "planning"),
    Mutant("what saves nothing is a candidate", "planning/profile/recorded.py", "if saving.seconds <= least_seconds:", "if False:", "only what saves time is swapped", "planning/test_recorded.py"),
    Mutant("the rate of the next step", "training/loop.py", "learning_rate=self._settings.schedule.at(progress.step)", "learning_rate=self._settings.schedule.at(progress.step + 1)", "a run has the rates, norms and weights of transformers' Trainer", "e2e/test_same_as_trainer.py"),
    Mutant("warm-up begins at one", "training/schedule.py", "return step / self.num_warmup_steps", "return (step + 1) / self.num_warmup_steps", "learning rates are those of transformers", "training/test_schedule.py"),
    Mutant("a schedule falls to zero", "training/schedule.py", "return factor * (1 - least) + least", "return factor", "a schedule ends at its least rate, as in transformers", "training/test_schedule.py"),
    Mutant("an overflow keeps the scale", "training/schedule.py", "self.scale / 2", "self.scale", "an overflow halves the loss scale", "training/test_schedule.py"),
    Mutant("skipped steps count as updates", "training/loop.py", "updates=before.updates + applied", "updates=before.updates + 1", "bias correction leaves out skipped steps", "training/test_loop.py"),
    Mutant("a stop loses a step", "training/loop.py", "            except Interrupted:\n                self._commit_pending()", "            except Interrupted:\n                pass", "a stop loses no step", "training/test_loop.py"),
    Mutant("wear is counted a step late", "training/wear_limit.py", "// self.slot_bytes - 1", "// self.slot_bytes", "a run never writes more than it may", "training/test_loop.py"),
    Mutant("every bad step is divergence", "training/divergence.py", "if not is_repeated:", "if False:", "a fault of the machine is no divergence", "training/test_divergence.py"),
    Mutant("a report replaces anything", "cli/report.py", "if os.path.lexists(target) and not overwrite and not is_report(target)", "if False", "a report replaces only a report", "report/test_page.py"),
    Mutant("a report is not escaped", "report/page/page_tables.py", r'r"\1<wbr/>", escape(name))', r'r"\1<wbr/>", name)', "text of files is text in the report", "report/test_page.py"),
    Mutant("a report may load things", "report/page/page.py", "default-src 'none'; style-src", "default-src *; style-src", "a report loads nothing", "report/test_page.py"),
    Mutant("a cut log goes unsaid", "training/history.py", "is_cut_short=bool(rest.strip())", "is_cut_short=False", "a report says that the log is cut short", "training/test_history.py"),
    Mutant("status counts lost steps", "run/ask/status.py", "if committed_step is not None and not is_training:", "if False:", "the step of a killed run is the committed one", "e2e/test_resume.py"),
    Mutant("status does not see the lock", "store/lock.py", "    except BlockingIOError:\n        return StoreUse(is_locked=True", "    except BlockingIOError:\n        return StoreUse(is_locked=False", "status knows whether a process has the store", "run/test_status.py"),
    Mutant("metrics of lost steps stay", "training/metrics_log.py", "missing = missing - 1 if step is None else committed_step - step.step", "missing = missing - 1 if step is None else committed_step + 1 - step.step", "the log has committed steps only", "training/test_metrics.py"),
    Mutant("the steps of this process", "run/train/train.py", "            first_step=first_step,\n            has_gpu", "            first_step=0,\n            has_gpu", "the panel counts the steps of the run, also when it resumes", "e2e/test_terminal.py"),
    Mutant("the warm-up tells the time left", "training/recent.py", "self._recent.clear()  #", "pass  #", "the time that is left is that of typical steps", "training/test_recent.py"),
    Mutant("a coloured file gets the panel", "console.py", " and self._stream.isatty()", "", "a file gets plain lines, whatever FORCE_COLOR says", "test_console.py"),
    Mutant("the panel is erased to the end of the screen", "console.py", 'else "\\r\\x1b[K" + "\\x1b[A\\x1b[2K" * height)', 'else f"\\r\\x1b[{max(1, height)}A\\x1b[J")', "the panel leaves nothing in a terminal's history", "test_console.py"),
    Mutant("the settings of the file", "run/ask/report.py", "    return trained\n", "    return config\n", "a report shows the settings that the run was trained with", "report/test_page.py"),
    Mutant("check stops at the inputs", "run/ask/check.py", "(found or not is_right) and not", "False and not", "`check` reports rows, memory and space at once", "e2e/test_check_machine.py"),
    Mutant("steps of all plans", "report/page/run_report.py", "if predicted.setdefault(each.clipped, seconds) != seconds:", "if predicted.setdefault(each.clipped, seconds) < 0:", "predicted and measured are of the same steps", "report/test_page.py"),
    Mutant("the signal of a new size is not heard", "console.py", "signal.signal(signal.SIGWINCH, self._note_change)", "signal.signal(signal.SIGWINCH, lambda *_: None)", "nothing of the panel is left on a terminal, resized or not", "test_console.py"),
    Mutant("a narrower terminal keeps remains", "console.py", "max(1, -(-line.cell_len // width))", "1", "nothing of the panel is left on a terminal, resized or not", "e2e/test_terminal.py"),
    Mutant("step lines of any width", "report/words/run.py", "<= width or not rank", "<= 10 * width or not rank", "a step is one line of at most 60 columns", "report/test_run.py"),
    Mutant("targets are not shifted", "data/samples/packing.py", "targets[index, at : end - 1] = sample.labels[1:]", "targets[index, at:end] = sample.labels", "each position predicts the next token", "data/test_packing.py"),
    Mutant("padded rows get positions", "data/samples/packing.py", "gives_positions=packed_tokens is not None", "gives_positions=True", "a model gets what transformers' collators give it", "data/test_packing.py engine/test_exactness.py"),
    Mutant("positions run on", "data/samples/packing.py", "position_ids[index, at:] = np.arange(width - at)\n            at = end", "pass\n            at = end", "positions restart with each sample", "data/test_packing.py"),
    Mutant("every position counts", "data/samples/packing.py", "int((targets != IGNORED_TARGET).sum())", "int(targets.size)", "the loss is the mean over targets", "data/test_packing.py"),
    Mutant("rows overflow", "data/samples/packing.py", "bisect_left(spaces, length)", "bisect_left(spaces, length - 1)", "no row is longer than the capacity", "data/test_packing.py"),
    Mutant("one order for all epochs", "data/batches/dataset.py", "_ORDER_OF_EPOCHS + epoch)", "_ORDER_OF_EPOCHS)", "each epoch has its own order", "data/test_dataset.py"),
    Mutant("evaluation rows are trained on", "data/batches/dataset.py", "np.sort(order[num_eval:])", "np.sort(order)", "held-out samples are not trained on", "data/test_dataset.py"),
    Mutant("the last rows of an epoch are dropped", "data/batches/dataset.py", "-(-len(self._train_sequences) // self._sequences_per_step)", "max(1, len(self._train_sequences) // self._sequences_per_step)", "an epoch has every row", "data/test_dataset.py"),
    Mutant("the seed is no part of the data", "data/batches/dataset.py", '"tokens_sha256": tokens, **self._settings.described(), **mixture}', '"tokens_sha256": tokens, **self._settings.described(), **mixture, "seed": 0}', "a run with another order does not resume", "data/test_dataset_cache.py"),
    Mutant("code between two stacks goes unseen", "model/cut/around_layers.py", "if not _is_same(theirs, ours):", "if False:", "what the whole model does with two texts is tried", "model/test_two_stacks.py"),
    Mutant("two lookups are added before the head", "engine/segments/embedding.py", "if lookup_sum is not None and embedded.second is not None:", "if False:", "an embedding that is looked up twice has the bits of autograd", "library/test_encoders.py"),
    Mutant("what only the second stack has is lost", "engine/segments/embedding.py", "sums.add([_sum(each) for each in zip(*parts, strict=True)])", "sums.add(parts[-1])", "both stacks have gradients before their layers", "library/test_encoders.py"),
    Mutant("gradients lie as leaves do", "engine/optimizer/gradients.py", "hook = leaf.register_hook(made.append) if leaf.requires_grad and not leaf.is_contiguous() else None", "hook = None", "gradients lie as in plain PyTorch", "library/test_modules.py"),
    Mutant("a parameter that code behind the layers shares is a layer's alone", "model/cut/find_layers.py", "*([num_layers + 1] if is_after else [])", "*([num_layers + 1] if is_after and not own else [])", "a block may have two uses", "library/test_modules.py"),
    Mutant("what passes all layers of a module is not seen", "model/cut/find_layers.py", "if usage.passing:", "if False:", "a skip connection around the layers is rejected", "library/test_modules.py"),
    Mutant("an open module may be called", "model/cut/stack.py", "if self._is_left or not self._runner.is_running:", "if False:", "an open module is the model's alone", "library/test_modules.py"),
    Mutant("noise does not depend on the seed", "data/batches/latents.py", 'f"{settings.seed}/{draws}"', 'f"0/{draws}"', "noise follows from the seed and the step", "e2e/test_latents.py data/test_latents.py"),
    Mutant("an evaluation has other noise each time", "data/batches/latents.py", 'f"evaluation {first}"', 'f"evaluation {torch.rand(())}"', "held-out samples have the same noise every time", "data/test_latents.py"),
    Mutant("rows of parquet are counted from the wrong one", "data/batches/latent_formats.py", "[places[done:stop] - first]", "[places[done:stop] - places[done]]", "parquet has the bits of safetensors", "data/test_latent_formats.py"),
    Mutant("a null in parquet is a number", "data/batches/latent_formats.py", "        if part.null_count:", "        if False:", "a table that cannot be used is rejected", "data/test_latent_formats.py"),
    Mutant("images are denoised whatever memory there is", "run/ask/generate_images.py", "working_bytes=max(layer, logits_bytes(spec, num_tokens) + 3 * hidden_bytes)", "working_bytes=-(1 << 34)", "images that do not fit are not begun", "e2e/test_latents.py"),
    Mutant("a class has no guidance", "run/ask/generate_images.py", "return without + guidance * (wanted - without)", "return wanted", "images are what diffusers makes", "e2e/test_latents.py"),
    Mutant("a condition is multiplied for each token", "planning/profile/analytic.py", "or name_in_layer(parameter.name) in of_samples", "", "the operations of a diffusion transformer are planned", "planning/test_diffusion.py"),
    Mutant("a decoder sees the padding of the encoder", "model/cut/two_stacks.py", "self.decoder.embed(of_decoder if mask is None else {**of_decoder, _MASK: mask})", "self.decoder.embed(of_decoder)", "padding of the source changes nothing", "library/test_encoders.py"),
    Mutant("sources have loss", "data/sources/encode_rows.py", "[*[IGNORED_TARGET] * len(source), *target]", "[*source, *target]", "a source has no labels", "data/test_texts_for_encoders.py"),
    Mutant("an encoder sees padding", "model/cut/decoder.py", "return self.layer_runner.embed(self._filled(batch).inputs)", "return self.layer_runner.embed(self._filled(replace(batch, mask=None)).inputs)", "padding changes nothing", "library/test_encoders.py"),
    Mutant("the same tokens are masked in each epoch", "data/text/masking.py", "[self.seed, _DRAWS, epoch + 1, number]", "[self.seed, _DRAWS, 0, number]", "other tokens are masked in each epoch", "data/test_masking.py data/test_texts_for_encoders.py"),
    Mutant("a short text has no masked token", "data/text/masking.py", "if len(may) and not is_chosen.any():", "if False:", "a sample has a masked token", "data/test_masking.py"),
    Mutant("masked tokens predict the next one", "data/samples/packing.py", '            if task == "causal_lm":', "            if True:", "a masked token is its own target", "data/test_texts_for_encoders.py"),
    Mutant("special tokens may be masked", "data/sources/encode_rows.py", "labels[len(self._prefix) : len(self._prefix) + len(ids)] = ids", "labels[:] = input_ids", "special tokens are not masked", "data/test_texts_for_encoders.py"),
    Mutant("a missing layer is drawn", "model/export/checkpoint.py", "if self._new_head is not None and (of_head | computed).issuperset(missing):", "if self._new_head is not None:", "only a head is drawn", "model/test_checkpoint.py"),
    Mutant("a loss of classes is always the cross-entropy", "model/cut/decoder.py", "return self.loss(hidden, self.targets[first : first + hidden.shape[1]])", "return loss_sum(hidden, self.targets[first : first + hidden.shape[1]])", "a loop's own loss is computed", "library/test_encoders.py"),
    Mutant("heads of another kind are exported", "model/export/checkpoint.py", "self._has_other_head = bool(unexpected)", "self._has_other_head = False", "an export loads with its own class", "e2e/test_encoders.py"),
    Mutant("all rows are right", "model/cut/decoder.py", "(hidden[0].argmax(dim=-1) == self.targets[first : first + hidden.shape[1]]).sum()", "hidden.shape[1]", "an accuracy is that of plain transformers", "e2e/test_encoders.py"),
    Mutant("loss on prompts", "data/sources/encode.py", "if draft.prompt and self.train_on_inputs is not True:", "if False:", "prompts carry no loss", "data/test_encode.py"),
    Mutant("texts do not end", "data/sources/encode.py", "tail.append(end)", "pass", "a text ends with the end token", "data/test_encode.py"),
    Mutant("a token between pieces is lost", "data/sources/encode.py", "stride = self._sequence_len - 1", "stride = self._sequence_len", "every token of a text is predicted once", "data/test_encode.py"),
    Mutant("tokens beyond the vocabulary", "data/sources/encode.py", "(ids < self._vocabulary)", "(ids <= self._vocabulary)", "tokens beyond the vocabulary are rejected", "data/test_encode.py"),
    Mutant("turns that are joined", "data/text/template_chats.py", "if char_spans[first, 0] >= start and input_ids[:first].tolist() == prefixes[start]:", "if char_spans[first, 0] >= start:", "training has the tokens of inference", "data/test_encode.py"),
    Mutant("a damaged cache takes the user's files with it", "data/samples/token_cache.py", "            _remove_files(directory)\n", "            shutil.rmtree(directory)\n", "files of the user's stay", "data/test_dataset_cache.py e2e/test_user_files.py"),
    Mutant("shared tokens that others can change", "data/text/shared_tokens.py", "if not (_is_private(self._directory) and _is_private(path)):", "if False:", "shared tokens that others can change are not used", "data/test_shared_tokens.py"),
    Mutant("shared tokens that others can read", "data/samples/token_cache.py", "mode=0o777 if private_lock is None else 0o700, ", "", "nobody else reads shared tokens", "data/test_shared_tokens.py"),
    Mutant("shared tokens go while they are read", "data/text/shared_tokens.py", "lock = _lock(path, fcntl.LOCK_SH)", "lock = os.open(path, os.O_RDONLY)", "shared tokens stay while a command reads them", "data/test_shared_tokens.py"),
    Mutant("answers out of order", "data/text/chat_pool.py", "for part in self._parts for answer", "for part in reversed(self._parts) for answer", "the number of processes that render changes nothing", "data/test_chat_pool.py"),
    Mutant("an error before its place", "data/sources/ingest.py", "is_ended, failure = True, error", "raise", "the number of processes that render changes nothing", "data/test_chat_pool.py"),
    Mutant("an unknown character is an added token", "data/text/prompt_tokens.py", "if text[first:last] == self._contents[int(ids[at])]:", "if True:", "a prompt has the tokens that it has alone", "data/test_prompt_tokens.py"),
    Mutant("a damaged archive ends early", "input_files.py", "                raise self._failure from error\n", "                return 0\n", "a damaged compressed file is an error", "test_input_files.py"),
    Mutant("a damaged cache is used", "data/samples/token_cache.py", "if whole and summary", "if summary", "a damaged token cache is built again", "data/test_dataset_cache.py"),
    Mutant("weights of datasets", "data/batches/dataset.py", "np.repeat(ids, int(whole))", "np.repeat(ids, 1)", "an epoch visits samples as the weights say", "data/test_mixing.py"),
    Mutant("weights change no hash", "data/batches/dataset.py", "**self._settings.described(), **mixture}", "**self._settings.described()}", "a run with other weights does not resume", "data/test_mixing.py"),
    Mutant("the export has the old template", "run/inputs/tokenizer.py", "changed[TEMPLATE_NAME] = template", "pass", "the exported tokenizer has the template of the run", "e2e/test_data_keys.py"),
    Mutant("a mask that is not the run's", "run/ask/data.py", "int(label) != IGNORED_TARGET", "True", "`ratel data` marks the tokens that have loss", "e2e/test_data_command.py"),
    Mutant("windows of a stream are not mixed apart", "data/batches/dataset.py", "for number, first in enumerate(range(0, len(sample_ids), window)):", "for number, first in enumerate(range(0, len(sample_ids), len(sample_ids))):", "a longer streamed run begins with the same steps", "data/test_streaming.py"),
    Mutant("a stream is read to its end", "data/sources/ingest.py", "not supply.is_enough(self._writer.lengths)", "True", "a stream is read as far as the run needs it", "data/test_streaming.py"),
    Mutant("function calls of LLaMA-Factory", "config/others/dataset_info.py", '"function_tag": "function_call",\n}', "}", "function calls are trained as answers", "data/test_dataset_info.py"),
    Mutant("loss on headers", "data/text/chat_child.py", "start, other, skips_header = start + header, None if header else other, skips_header or header > 0", "skips_header = skips_header or header > 0", "headers of turns carry no loss", "data/test_forms.py"),
    Mutant("a turn ends with its words", "data/text/chat_child.py", "return found.end() if found else end", "return end", "a turn ends with its own stop token, wherever the template writes it", "data/test_stop_tokens.py"),
    Mutant("no stop token for the last turn", "data/text/chat_child.py", '"text": found.text + stop,', '"text": found.text,', "the last turn gets the stop token that the next message would begin with", "data/test_stop_tokens.py"),
    Mutant("tokens of an earlier rule", "data/sources/load_tokens.py", '"turns": _RULE_OF_TURNS, "stop_ids": sorted(encoding.stop_ids)', '"turns": _RULE_OF_TURNS', "tokens belong to the stop tokens that they were made with", "data/test_stop_tokens.py"),
    Mutant("loss on TRL's prompts", "data/text/chat_child.py", "spans=[(start, marks.own_end(text, (start, len(text))))]", "spans=[(0, len(text))]", "only completions carry loss", "data/test_forms.py"),
    Mutant("every role is trained", "data/text/conversations.py", 'if (message["role"] in roles if flag is None else flag) and index not in muted:', "if index not in muted:", "roles_to_train chooses the turns", "data/test_forms.py"),
    Mutant("EOS of every turn", "data/text/template_chats.py", 'if draft.train_on_eos == "all" or (draft.train_on_eos == "turn" and is_trained):', "if True:", "train_on_eos chooses the EOS tokens", "data/test_forms.py"),
    Mutant("lost calls are not counted", "data/sources/ingest.py", "self._remarks.update(encoded.remarks)", "pass", "what a template leaves out is counted", "data/test_forms.py"),
    Mutant("new keys change every hash", "data/text/rows.py", "if key in _FIRST_KEYS or value != DEFAULTS[key]", "if True", "an earlier run finds its token cache", "data/test_forms.py"),
    Mutant("keys that nothing reads", "dataset_keys.py", "key in _KNOWN - read", "key in ()", "a key of a dataset that nothing reads is an error or a remark", "data/test_dataset_keys.py"),
    Mutant("function calls of ShareGPT", "data/text/conversations.py", "if message[\"role\"] == _FUNCTION_CALL:", "if False:", "function calls are trained as answers whatever the config says", "data/test_forms.py"),
    Mutant("weights of messages", "data/text/template_chats.py", "for span in chat.muted:", "for span in ():", "a message of weight 0 has no loss", "data/test_row_meanings.py"),
    Mutant("loss on all turns of mistral-common", "data/text/mistral_chats.py", '[span for run in runs if run.role == "assistant" for span in run.spans]', "[span for run in runs for span in run.spans]", "only assistant turns have loss", "data/test_mistral_chats.py"),
    Mutant("joined messages of different loss", "data/text/mistral_chats.py", "if len(flags) > 1:\n        first", "if False:\n        first", "messages that mistral-common joins have the same loss", "data/test_mistral_chats.py"),
    Mutant("system prompts in the turn of a user have loss", "data/text/mistral_chats.py", "_check_system_prompts(runs, trained)\n", "pass\n", "loss is limited to the roles that are trained", "data/test_mistral_chats.py"),
    Mutant("ids of results are not those of their calls", "data/text/mistral_messages.py", 'message["tool_call_id"] = new[str(written)]', "pass", "a result has the id of its call", "data/test_mistral_chats.py"),
    Mutant("transformers chooses mistral-common by itself", "run/inputs/tokenizer.py", "trust_remote_code=False, mistral_format=False\n        )", "trust_remote_code=False\n        )", "packages that are installed do not change the tokens", "e2e/test_mistral.py"),
    Mutant("shared white space", "data/text/template_chats.py", "        return first + 1\n", "        return first\n", "a token that the prompt shares has no loss", "data/test_thinking.py"),
    Mutant("the prompt without thinking", "data/text/chat_child.py", "return start, None if quiet == start else quiet", "return start, None", "loss begins behind the prompt without thinking", "data/test_thinking.py"),
    Mutant("padding of Arrow", "data/text/rows.py", "for key, item in value.items() if item is not None}", "for key, item in value.items()}", "keys that Arrow pads do not reach the template", "data/test_row_meanings.py"),
    Mutant("images are left out silently", "data/sources/formats.py", 'if column is not None and self.media == "reject":', "if False:", "a row with an image is rejected", "data/test_row_meanings.py"),
    Mutant("long samples are kept", "data/sources/encode.py", "if excess_tokens and not self._truncates:\n            return", "if False:\n            return", "excess_length_strategy: drop leaves long samples out", "data/test_excess_length.py"),
    Mutant("roles of ShareGPT", "data/text/conversations.py", 'known = _SHAREGPT_ROLES | _TOOL_ROLES if "role" in names else _TOOL_ROLES', "known = _TOOL_ROLES", "ShareGPT's roles are translated", "data/test_dataset.py"),
    Mutant("vectors do not decay", "model/cut/binding.py", "placed.decay and each.rate != ENDS", "placed.decay and each.rate != ENDS and len(placed.shape) > 1", "weight decay follows Trainer", "engine/test_exactness.py model/test_families.py"),
    Mutant("torch's norms decay", "model/values/spec.py", "not is_in_layer_norm and ", "", "weight decay follows Trainer", "model/test_spec.py engine/test_exactness.py"),
    Mutant("norms by another spelling decay", "model/values/spec.py", ".search(name.lower()) is None", ".search(name) is None", "norms do not decay however they are spelt", "model/test_spec.py"),
    Mutant("a rule of decay changes silently", "run/train/store.py", "recorded.get(name, decay) is not decay]", "False]", "a run resumes with the rule that it began with", "e2e/test_run_files.py"),
    Mutant("tables in the run's dtype", "model/files/skeleton.py", "            _compute_buffers(model)\n", "", "buffers are those of from_pretrained", "model/test_buffers.py"),
    Mutant("what is kept is rounded", "model/files/skeleton.py", "    keep_in_fp32(model)\n", "", "everything has the dtype of from_pretrained", "model/test_kept_precision.py"),
    Mutant("kept parameters are rounded", "model/values/kept_precision.py", "module._parameters[attribute] = made[parameter]", "pass", "everything has the dtype of from_pretrained", "model/test_kept_precision.py"),
    Mutant("kept ties are cut", "model/values/kept_precision.py", "if parameter not in made:", "if True:", "tied parameters stay one", "model/test_kept_precision.py"),
    Mutant("a block has any dtype", "model/cut/binding.py", "found == of_block)", "True)", "a block has one dtype and one rule", "model/test_kept_precision.py engine/test_mixed_blocks.py"),
    Mutant("frozen parameters are trained", "model/cut/cut_model.py", "requires_grad=block.is_trained)", "requires_grad=True)", "what is frozen never changes", "engine/test_mixed_blocks.py"),
    Mutant("gradients in fp32 are rounded", "model/cut/binding.py", "gradient_dtype if each.dtype == dtype else None", "gradient_dtype", "gradients of parameters in fp32 are not rounded", "engine/test_mixed_blocks.py"),
    Mutant("weights leave after their first use", "engine/reading/weights.py", "coming[lifetime.last].ends", "coming[lifetime.first].ends", "weights stay as long as they are planned to", "engine/test_exactness.py"),
    Mutant("uploads leave after their first use", "engine/reading/weights.py", "coming[upload.first : upload.last]", "coming[upload.first : upload.first]", "weights stay on the GPU as long as they are planned to", "gpu/test_memory.py"),
    Mutant("a lifetime ends a use early", "schedule/lifetimes.py", "before.first, position)", "before.first, position - 1)", "weights are there for each use", "schedule/test_lifetimes.py"),
    Mutant("a lifetime begins a use late", "schedule/lifetimes.py", "Lifetime(thing, position - ahead, position, position)", "Lifetime(thing, position - ahead + 1, position, position)", "memory is planned from when it is leased", "schedule/test_lifetimes.py"),
    Mutant("nothing stays for a next use", "schedule/lifetimes.py", "number_between <= ahead", "number_between < ahead", "what is there is not read again", "schedule/test_lifetimes.py"),
    Mutant("a use does not wait for its update", "engine/reading/weights.py", "self._updates.wait_updated(block)", "pass", "forward computes with the newest weights", "engine/test_exactness.py"),
    Mutant("a use does not wait for its read", "engine/reading/weights.py", "weights.wait(self._timeline, use.stage)", "pass", "forward computes with weights that have been read", "engine/test_exactness.py engine/test_faults.py"),
    Mutant("a read does not wait for the write", "engine/reading/weights.py", "if any(self._updates.is_updating(block) and not", "if any(False and not", "forward computes with the newest weights", "engine/test_exactness.py engine/test_planned_lifetimes.py"),
    Mutant("the window does not wait for the update", "engine/reading/weights.py", "if not is_read or not all(map(self._updates.is_updated, coming.segment.bound)):", "if not is_read:", "a GPU computes with the newest weights", "gpu/test_late_transfers.py"),
    Mutant("the window does not wait for the read", "engine/reading/weights.py", "if not is_read or not all(", "if not coming.weights or not all(", "a GPU computes with weights that have been read", "gpu/test_late_transfers.py"),
    Mutant("as many updates as may come are pending", "engine/optimizer/update.py", "wait_unfinished(at_most=self._placement.pending_updates)", "wait_unfinished(at_most=1000)", "memory is what was planned, however late updates are written", "engine/test_planned_lifetimes.py"),
    Mutant("held gradients wait until the step is settled", "engine/optimizer/update.py", "arriving.held.pop(block).release()", "arriving.held.pop(block)", "a gradient is given back when nothing needs it", "engine/test_planned_lifetimes.py"),
    Mutant("what is being written takes no memory", "planning/duties/updates.py", "left, last = shape.in_flight, segment.index + 1", "left, last = shape.in_flight, segment.index", "memory is what was planned, however late updates are written", "engine/test_planned_lifetimes.py"),
    Mutant("what is left to write takes no memory", "planning/duties/gradients.py", "ends = opens if is_pending else written", "ends = written", "memory is what was planned, however late updates are written", "engine/test_planned_lifetimes.py"),
    Mutant("held gradients take no memory in forward", "planning/duties/gradients.py", "written + 1, issued - 1)", "written + 1, step.turn)", "held gradients are planned until they are asked for", "engine/test_planned_lifetimes.py"),
    Mutant("groups take no memory in forward", "planning/duties/updates.py", "step.turn + _written_in_forward(step, way, pending, resident)", "step.turn", "buffers of groups are planned", "engine/test_planned_lifetimes.py"),
    Mutant("labels are those of the tokens themselves", "library/batches.py", "IGNORED_TARGET)[:, 1:]", "IGNORED_TARGET)[:, :-1]", "the label of a token is what the one before it predicts", "library/test_own_loop.py"),
    Mutant("padding is learned", "library/batches.py", "labels.masked_fill(mask == 0, IGNORED_TARGET)", "labels", "padding has no loss", "library/test_own_loop.py"),
    Mutant("gradients without a step are applied", "library/model.py", "self._engine.discard()", "self._engine.apply(1e-3)", "what no step followed is dropped", "library/test_own_loop.py"),
    Mutant("a loss of one's own stays", "model/cut/decoder.py", "            self.loss = before", "            pass", "a loss is that of its call", "library/test_own_loop.py"),
    Mutant("a step begins before the one before is committed", "library/has_state.py", "self._store.commit(self._pending)", "pass", "each step is committed", "library/test_own_loop.py"),
    Mutant("a step without a rate is updated as it arrives", "engine/optimizer/update.py", "if learning_rate is None or settings.holds_all", "if settings.holds_all", "the rate comes when all gradients are there", "library/test_own_loop.py"),
    Mutant("what does not fit leaves a closed engine", "library/model.py", "self._engine = self._plan = None\n        self._engines.close()", "self._engines.close()", "after a batch that does not fit, smaller ones train on", "library/test_own_loop.py"),
    Mutant("a decided step outlives its interruption", "engine/optimizer/update.py", "if not isinstance(self._phase, Decided) or self._phase.waits_for_rate:", "if not isinstance(self._phase, Decided):", "an interrupted step is abandoned", "library/test_own_loop.py"),
    Mutant("random numbers of the caller are drawn anew", "library/model.py", "with torch.random.fork_rng(devices,", "with torch.random.fork_rng(devices, enabled=False,", "the caller's random numbers are as if the model were not there", "library/test_own_loop.py"),
    Mutant("the second moment has the sign that it carries", "model/values/records.py", "fields[field.name].abs() if", "fields[field.name].clone() if", "state() is that of torch's AdamW", "library/test_state.py"),
    Mutant("a state is read on after a step", "library/has_state.py", "if self._pending != generation.progress:", "if False:", "state() is that of one step", "library/test_state.py"),
    Mutant("any snapshot is replaced", "library/snapshots.py", "if identity is None or identity.data_hash != data_hash:", "if identity is None or not is_snapshot(identity):", "nothing of the user's is overwritten", "library/test_snapshot.py"),
    Mutant("a snapshot that was opened may be replaced", "library/states.py", "if copied is not None:", "if False:", "nothing of the user's is overwritten", "library/test_snapshot.py"),
    Mutant("another run's model is replaced", "library/model.py", "marker.run != own_output(config)", "False", "nothing of the user's is overwritten", "library/test_own_loop.py"),
    Mutant("only the first block is read", "engine/reading/weights.py", "for block in blocks:\n            if block.index in use.begins", "for block in blocks[:1]:\n            if block.index in use.begins", "a segment has all its blocks", "engine/test_mixed_blocks.py"),
    Mutant("the window ends with the first block", "engine/reading/weights.py", "_shares(use.segment.bound, bytes_ahead(", "_shares(use.segment.bound[:1], bytes_ahead(", "weights in the window go up while the GPU computes", "engine/test_shared_blocks.py"),
    Mutant("kept parameters are exported in 16 bit", "model/values/spec.py", "each.name: self.dtype_of(block, dtype)", "each.name: dtype", "an export has the dtypes of from_pretrained", "e2e/test_mixed_blocks.py"),
    Mutant("new rows are the old ones", "model/export/checkpoint.py", "new[max(start - end, 0) : stop - end]", "torch.zeros(stop - max(start, end))", "new tokens have rows that transformers would draw", "model/test_new_rows.py"),
    Mutant("new rows are drawn with another seed", "model/files/new_rows.py", "torch.manual_seed(self.seed)", "torch.manual_seed(self.seed + 1)", "new tokens have rows that transformers would draw", "model/test_new_rows.py"),
    Mutant("new rows are not trained", "run/inputs/build_language.py", "make = adapt(skeleton, config, task, directory, tokens=tokens)", "make = adapt(skeleton, config, task, directory, tokens=())", "an adapter trains the rows of new tokens", "e2e/test_new_tokens.py"),
    Mutant("what is frozen is exported from the store", "model/export/checkpoint.py", "frozen=spec.frozen_names - {of_spec[name] for name in self._shapes_in_files if name in of_spec},", "", "what is frozen comes out to the byte", "e2e/test_mixed_blocks.py"),
    Mutant("a frozen block is written each step", "schedule/blocks.py", "self.record.num_bytes(self.num_elements) if self.is_trained else 0", "self.record.num_bytes(self.num_elements)", "predicted traffic is exact", "engine/test_mixed_blocks.py"),
    Mutant("updates of blocks are pending alone", "engine/optimizer/pipeline.py", "each.gradient.block.segment for each", "each.gradient.block.index for each", "updates of as many segments are pending as the plan says", "engine/test_mixed_blocks.py engine/test_pipeline.py"),
    Mutant("the largest stack wins", "model/cut/find_blocks.py", "while modules and not lists:", "while modules:", "the layers are those of the language model", "model/test_find_blocks.py"),
    Mutant("experts stay fused", "model/export/export_layout.py", "            if reversal is not None:\n                contents |=", "            if reversal is None:\n                contents |=", "an export has the base's names", "model/test_export_layout.py"),
    Mutant("every model does with text what its owner does", "model/cut/around_layers.py", "    if not _is_same(found, wanted[1]):", "    if False:", "a model that does more with text than the module that has its layers is refused", "model/test_around_layers.py"),
    Mutant("any bytes are whole", "run/ask/verify.py", "    if digest != written.xxh3_128:", "    if False:", "a flipped bit in a copied export is found", "e2e/test_verify.py"),
    Mutant("classifiers pass", "model/files/kind.py", "    if kind is None and is_causal_type:", "    if is_causal_type:", "a model of another kind is named", "e2e/test_other_models.py"),
    Mutant("two names for one key", "config/dialect.py", "elif key in translated:", "elif False:", "a key that is set twice is an error", "config/test_rejections.py"),
    Mutant("one of two names of the data is lost", "config/others/their_datasets.py", "for key in given[1:]:", "for key in given[:0]:", "data that is named twice is an error", "config/test_rejections.py"),
    Mutant("arguments of torchtune's sets are harmless", "config/others/torchtune_data.py", "        report.decide(entry, _NO_KEY)", "        report.drop(entry, _NO_KEY)", "what decides the training is left to the user", "cli/test_import_torchtune.py"),
    Mutant("an instruction is its own input", "data/text/conversations.py", "columns[1] == columns[0] or record", "record", "a column that is named twice is read once", "data/test_forms.py"),
    Mutant("the mask of axolotl is left out", "config/importing.py", "        write_mask(each)\n", "", "an imported config has the other tool's mask", "cli/test_import.py"),
    Mutant("the mask of TRL is for completions too", "data/sources/encode.py", "return draft.completion_from is None", "return True", "of a prompt and its completion only the completion has loss", "data/test_forms.py"),
    Mutant("rows that a quote swallows", "data/files/csv_rows.py", "for each in like_rows:", "for each in like_rows[:0]:", "rows that a quote too many swallows are counted", "data/test_csv.py"),
    Mutant("a directory is read whole", "data/text/rows.py", "elif is_folder:", "elif False:", "a directory has the splits that datasets finds", "data/test_folders.py"),
    Mutant("saved files by name", "data/files/folders.py", "return [described.with_name(each) for each in names]", "return sorted(described.with_name(each) for each in names)", "rows of a saved dataset come in its order", "data/test_saved.py"),
    Mutant("a first turn without its header", "data/text/chat_child.py", "header_end if start is None else start", "first if start is None else start", "a turn before which nothing stands begins behind its header", "data/test_chat.py"),
    Mutant("files left out without a word", "data/files/folders.py", "if unread := sorted({*files} - {*chosen}):", "if unread := []:", "files that are not read are named", "data/test_folders.py"),
    Mutant("parts of local files", "data/text/rows.py", "return self._read(progress) if self.part is None else _read_part(self._read, self.part, progress)", "return self._read(progress)", "a part of local files is what is read", "data/test_rows.py"),
    Mutant("inverted keys are not", "config/dialect.py", "inverted = INVERSE[name][value.content]", "inverted = value.content", "an inverted alias is inverted", "config/test_other_trainers.py"),
    Mutant("arguments do not displace", "config/overrides.py", "if other != name and other in root.entries", "if False and other in root.entries", "an argument replaces what decides the same", "config/test_overrides.py"),
    Mutant("the warm-up is rounded down", "config/keys/schema.py", "steps = math.ceil(share)\n", "steps = int(share)\n", "a warm-up is rounded up, as in transformers", "config/test_config_load.py data/test_run_length.py"),
    Mutant("shares of all steps are rounded down", "config/keys/schema.py", "return max(1, math.ceil(num_steps * steps))", "return max(1, int(num_steps * steps))", "a share of all steps is rounded up, as in transformers", "config/test_config_load.py"),
    Mutant("what trains an adapter is ignored", "config/others/foreign.py", "if is_harmless else row.fate", "if True else row.fate", "a key that changes what is trained is never ignored", "config/test_rejections.py"),
    Mutant("0 turns every number off", "config/others/recorded.py", 'row["zero"].startswith("off")', "True", "a key that changes what is trained is never ignored", "config/test_foreign_rows.py"),
    Mutant("no bf16 is bf16", "config/others/translations.py", 'return "float32", off', "return None", "bf16: false is fp32, as in transformers", "config/test_other_trainers.py"),
    Mutant("another kind of value", "config/others/aliases.py", "if value is None or _takes(", "if True or _takes(", "a name is suggested for a value of its kind", "config/test_rejections.py"),
    Mutant("LLaMA-Factory trains every weight", "config/importing.py", "    write_switch(tool, root)\n", "", "an imported config trains what the other tool does by default", "config/test_imported_keys.py"),
    Mutant("what a tool does otherwise is not said", "config/importing.py", "reason=reason) for each in rows]", "reason=\"\") for each in rows]", "an import says what a key does otherwise there", "config/test_imported_keys.py"),
    Mutant("brackets around a prompt are harmless", "config/others/torchtune.py", "(*_WRITES_TURNS, *brackets)", "_WRITES_TURNS", "what decides the training is left to the user", "config/test_imported_keys.py"),
    Mutant("axolotl's warm-up is rounded up", "config/keys/schema.py", 'if self.warmup_rounding == "down":', 'if self.warmup_rounding == "":', "an imported config has the other tool's warm-up", "config/test_imported_keys.py"),
    Mutant("defaults of the other tool are left out", "config/importing.py", "if key not in content and not (", "if False and not (", "an imported config has the other tool's defaults", "cli/test_import.py"),
    Mutant("a pipe without a reader is a bug", "cli/app.py", "events & select.POLLERR", "events & select.POLLPRI", "a command whose output nobody reads ends quietly", "e2e/test_closed_pipe.py"),
    Mutant("what is left in the buffer is not written", "cli/app.py", "        sys.stdout.flush()", "        pass", "a command whose output nobody reads ends quietly", "e2e/test_closed_pipe.py"),
    Mutant("a config replaces a file", "run/files/new_file.py", "os.path.lexists(path) and not overwrite", "False", "`import`, `init`, `profile` and `schema` replace no file", "cli/test_import.py e2e/test_init.py config/test_json_schema.py cli/test_profile.py"),
    Mutant("a picture replaces a file", "cli/plan.py", "        reject_existing(picture, overwrite=overwrite)\n", "", "`plan --plot` replaces no file", "cli/test_plan.py"),
    Mutant("data writes into the run", "run/ask/data.py", "cache_dir=directory / TOKENS_NAME", 'cache_dir=config.output_dir / "run" / TOKENS_NAME', "`data` writes nothing", "e2e/test_data_command.py e2e/test_user_files.py"),
    Mutant("one error at a time", "errors.py", "first.others = tuple(others)", "first.others = ()", "all that is wrong with the inputs is reported at once", "e2e/test_check.py"),
    Mutant("a wrong config is all", "run/ask/check.py", "    elif config is not None:", "    elif False:", "`check` reads the model and the data of a wrong config", "e2e/test_check.py"),
    Mutant("check gives up after the model", "run/inputs/inputs.py", "read_data is None or (errors and not dry_run)", "True", "`check` reads the rows", "e2e/test_check.py"),
    Mutant("a started config without types", "run/start/starting_data.py", 'return wanted if same == found else "auto"', 'return "auto"', "`init` writes the type of the data", "e2e/test_init.py"),
    Mutant("the first relation that is broken alone", "config/keys/relation.py", "                yield found\n", "                yield found\n                return\n", "no error of a config hides another one", "config/test_relations.py"),
    Mutant("explain without relations", "config/describe.py", "words = (meaning_of(section, name), *relations_in_words(section, name))", "words = (meaning_of(section, name),)", "explain says what a key needs and excludes", "cli/test_explain.py"),
    Mutant("a schema without other names", "config/json_schema.py", "properties[alias] = {**ours, **words}", "pass", "the schema has other names of keys", "config/test_json_schema.py"),
    Mutant("preferences are imitated", "config/others/dataset_info.py", 'bool(info.get("ranking"))', "False", "preference data is refused by name", "config/test_other_trainers.py"),
    Mutant("ranks keep what they know", "run/train/reference.py", "            of_ranks = ranks.gathered(values.reshape(-1).tolist())", "            of_ranks = [values.reshape(-1).tolist()]", "no rank leaves answers to the others that they do not compute", "run/test_reference.py"),
    Mutant("any sample has the reference", "data/pairs/compared_samples.py", "self.cache.summary.tokens_sha256, self.compares", "self.compares", "other samples for evaluation are noticed", "e2e/test_reference_model.py"),
    Mutant("any base is the reference", "run/train/reference.py", "if reference.weights != reference.known_weights:", "if False:", "a base model that was replaced is no reference", "e2e/test_reference_model.py"),
    Mutant("ORPO's conversations stay open", "run/inputs/text_data.py", 'config.rl in ("orpo", "simpo")', "False", "conversations end as in TRL", "e2e/test_preferences.py"),
    Mutant("a replaced file follows links", "io/files.py", "        with open(new, \"xb\") as file:", "        with open(path, \"wb\") as file:", "a file is replaced whole, and not through a link", "io/test_replace_file.py"),
    Mutant("an adapter is always off", "config/others/their_adapters.py", "if all(is_off) and", "if any(is_off) and", "settings of an adapter are ignored only if it is off", "config/test_other_trainers.py"),
    Mutant("twice the same key", "config/yaml/yaml_marks.py", "elif key in entries:", "elif False:", "a key that is set twice is an error", "config/test_rejections.py"),
    Mutant("lines count from zero", "config/yaml/yaml_marks.py", "return replace(self._start, line=mark.line + 1", "return replace(self._start, line=mark.line", "an error names its line", "config/test_config_load.py"),
    Mutant("files of others are ours", "model/files/marker.py", "return is_same_time or _digest_of(path) == file.xxh3_128", "return True", "a file that the user changed is not replaced", "model/test_export_weights.py"),
    Mutant("any folder is ours", "model/files/marker.py", "if not is_empty and not overwrite and read_marker(output_dir) is None", "if False", "a folder of the user's is refused", "model/test_export_weights.py e2e/test_output.py"),
    Mutant("everything in run/ is ours", "run/files/run_files.py", "if name not in own and not overwrite:", "if False:", "a run replaces no file of the user's in run/", "run/test_run_files.py e2e/test_run_files.py"),
    Mutant("through a link", "run/files/run_files.py", "        if not stat.S_ISREG(mode):\n", "        if False:\n", "nothing is written through a link in run/", "run/test_run_files.py e2e/test_run_files.py"),
    Mutant("cleaned by name", "run/files/clean.py", "[name for name in names if name in own]", "names", "clean deletes no file of the user's in run/", "e2e/test_run_files.py"),
    Mutant("claimed at once", "run/inputs/records.py", "    if may_claim_at_once(config):", "    if True:", "a command that is refused does not claim a folder of the user's", "e2e/test_run_files.py"),
    Mutant("an export stays half", "run/files/output.py", "        renamed = finish_publishing(directory)\n", "        renamed = []\n", "a run finishes an export that broke off", "e2e/test_export.py"),
    Mutant("what misleads is deleted", "model/export/publishing.py", "        path.rename(spare)\n", "        path.unlink()\n", "an export deletes no file of the user's that it does not replace", "model/test_publishing.py"),
    Mutant("a mix of two models", "model/export/publishing.py", "key=lambda name: name in ENTRY_NAMES", "key=lambda name: name not in ENTRY_NAMES", "an export that is killed never loads as a mix", "model/test_publishing.py"),
    Mutant("a snapshot over a store", "run/files/output.py", "for path in (*theirs.storage.paths, *((snapshot", "for path in (theirs.storage.paths[0], *((snapshot", "a snapshot replaces no store of another run, on none of its drives", "e2e/test_restore.py"),
    Mutant("other data over a run", "run/train/store.py", "(config.split is None or stored.data_hash", "(True or stored.data_hash", "a store of other data is replaced only if the user insists", "e2e/test_resume.py"),
    Mutant("a base model inside", "run/files/output.py", "if output.is_relative_to(base):", "if False:", "the output is not inside the base model", "e2e/test_output.py"),
    Mutant("begun again over its export", "run/files/output.py", "if marker is not None and marker.step is not None:\n        found", "if False:\n        found", "a finished run without its store is not begun again", "e2e/test_output.py"),
    Mutant("a dry run claims", "run/inputs/records.py", "    if dry_run:\n        return temporary_records(config, resources)", "    if False:\n        return temporary_records(config, resources)", "a dry run writes nothing", "e2e/test_output.py"),
    Mutant("one store for all runs", "run/files/run_directory.py", "paths = tuple(path / own for path in given)", "paths = tuple(path / 'store' for path in given)", "each run has its own store", "run/test_run_directory.py e2e/test_output.py"),
    Mutant("recorded paths begin anywhere", "run/files/recorded_paths.py", "    if _is_here(base):\n        return _replaced(config, moved, {}) if moved else config\n", "    return config\n", "relative paths that a run has recorded begin where it was started", "run/test_recorded_paths.py e2e/test_elsewhere.py"),
    Mutant("recorded paths stay absolute", "run/files/recorded_paths.py", "{_place_of(base / path): path for path in _paths(recorded)}", "{}", "what a run records does not depend on the current directory", "run/test_recorded_paths.py e2e/test_elsewhere.py"),
    Mutant("a deletion that nobody knows of", "run/files/clean.py", 'if left.extent == "store" and left.stores', 'if False and left.stores', "a store that was deleted on purpose is not called lost", "e2e/test_clean_store.py"),
    Mutant("a config's errors wait for torch", "cli/check.py", "printed, log = config_errors(reading), RunLog()", "printed, log = (), RunLog()", "what is wrong with a config is printed before torch is imported", "test_imports.py"),
    Mutant("one rank reads a store at a time", "store/lock.py", "fcntl.LOCK_SH if shared else fcntl.LOCK_EX", "fcntl.LOCK_EX", "ranks read the run that they start from together", "store/test_lock.py"),
    Mutant("each rank plans its own micro-batches", "run/train/ranks.py", "if first_size and written.split is None:", "if False:", "all ranks have the micro-batches of rank 0", "ranks/test_agreement.py"),
    Mutant("ranks do not wait for each other's commits", "engine/ranks/commits.py", "    with timeline.stalled_on(\"network\"):\n        _meet(ranks, progress.step)\n", "", "no rank overwrites a step before all have committed the next one", "ranks/test_commits.py"),
    Mutant("slices are sent before their update", "engine/ranks/gathered.py", "            wait_updated()\n", "", "ranks gather the newest weights", "ranks/test_exact.py"),
    Mutant("a late signal ends one rank", "run/train/ranks.py", "    if any(received):  #", "    if True:  #", "a signal stops all ranks after the same step", "ranks/test_agreement.py"),
    Mutant("whole gradients that are exchanged take no memory", "planning/duties/exchange.py", "until = min(arrives + EXCHANGED_BEHIND, end)", "until = arrives", "a rank leases no more than is planned", "ranks/test_planned.py"),
    Mutant("a rank sends what it has of gradients", "planning/duties/exchange.py", "4 * (block.num_elements - own) + flags", "4 * others * own + flags", "planned bytes of the network are those of a step", "ranks/test_planned.py"),
    Mutant("the network is never waited for", "planning/time/stages.py", "others = max(linked, memory, adding, swapped)", "others = max(linked, memory, adding)", "a slow network bounds a step", "planning/test_cluster.py"),
    Mutant("settings of ranks may differ", "run/train/ranks.py", "json.dumps([common, repr(start)], sort_keys=True)", '""', "ranks agree on what they do together", "ranks/test_agreement.py"),
    Mutant("a store that is not found", "run/files/clean.py", "    if missing:\n", "    if False:\n", "clean keeps the records of a store that it does not find", "e2e/test_elsewhere.py"),
    Mutant("a copy trains the store", "run/train/store.py", 'if start != StartOver(replaces_others=True):', "if False:", "a run does not resume the store of another one", "e2e/test_elsewhere.py"),
    Mutant("a store of any run counts", "run/files/output.py", "return is_there and other_owner(config) is None", "return is_there", "no command reads the store of another run as this one's", "e2e/test_elsewhere.py"),
    Mutant("no copy is a copy", "run/files/output.py", "or store_id not in map(stored_id, map(Path, places))", "or True", "a store that was copied with its run belongs to the copy", "e2e/test_elsewhere.py"),
    Mutant("restored over another run", "run/train/restore.py", "    reject_restoring_over_other_run(config)\n", "", "restore replaces no store of another run", "e2e/test_elsewhere.py"),
    Mutant("a claim is taken for the user's", "model/files/marker.py", "all(path.name == NEW_MARKER_NAME for path in directory.iterdir())", "not any(directory.iterdir())", "a run that was killed as it made its output directory begins again", "e2e/test_output.py"),
    Mutant("readers must write", "store/lock.py", "if not read_only or exc.errno not in _MAY_NOT_WRITE:", "if True:", "reading a run needs no permission to write", "e2e/test_elsewhere.py"),
    Mutant("runs below count", "run/ask/status.py", "if not is_output_of_run(Path(name) / folder)", "if True", "a run does not count the files of a run below it", "run/test_status.py"),
    Mutant("any store is replaced", "run/train/store.py", 'if start == StartOver(replaces_others=False):', "if False:", "a store of other settings is replaced only if the user insists", "e2e/test_resume.py"),
    Mutant("names that only share words", "config/others/aliases.py", "similar = [each for each in similar if _differs_little(written, each)]", "similar = list(similar)", "a name is suggested if it is close without shared words", "config/test_rejections.py"),
    Mutant("no nearest key", "config/others/aliases.py", "n=3, cutoff=0.6", "n=3, cutoff=0.99", "a mistyped key is recognised", "config/test_overrides.py"),
    Mutant("at least is more than", "config/keys/messages.py", '("ge", "at least")', '("ge", "more than")', "a message says what a value must be", "config/test_hardware_file.py"),
    Mutant("a block computes again with later buffers", "library/block_call.py", "module._buffers[name] = values.clone()", "pass", "gradients are those of the block's own code", "library/test_hook.py"),
    Mutant("weights get out of a block", "library/block_call.py", "return value.clone() if is_view else value", "return value", "no result is a view of weights", "library/test_hook.py"),
    Mutant("blocks do not pass on what they get", "library/block_call.py", "given = [passed_on.get(each, each) for each in tensors]", "given = tensors", "gradients are added as autograd adds them", "library/test_hook.py"),
    Mutant("the second run is not compared", "library/block_call.py", "not all(map(torch.equal, map(digest, results), self._digests))", "False", "what cannot be computed again is an error", "library/test_hook_misuse.py"),
    Mutant("tensors from elsewhere lose their gradient", "library/block_call.py", "variable is not None and id(variable) not in own", "False", "hidden state that bypasses a block is an error", "library/test_hook_misuse.py"),
    Mutant("calls of one block are summed in fp32", "engine/steps/horizontal.py", "self._num_waiting[segment.index] == 1 and segment.index not in self._of_pass", "True", "gradients are added as autograd adds them", "library/test_hook.py"),
    Mutant("a step ends before its last round", "engine/steps/horizontal.py", "if self._num_rounds == self._rule.num_rounds:", "if self._num_rounds:", "a step has as many rounds as it is asked for", "library/test_hook.py"),
    Mutant("a child closes what its parent opened", "closing.py", "if not owner.is_of_parent:", "if True:", "a forked child touches nothing of its parent", "library/test_forked.py"),
    Mutant("hooks stay behind", "model/values/away.py", "setattr(parameter, name, hooks)", "pass", "a parameter's hooks see its gradients", "library/test_operations.py"),
    Mutant("values outside are not looked at", "engine/steps/block_calls.py", "digest(each) if at_values else None", "None", "what is written to a parameter outside of the blocks is an error", "library/test_operations.py"),
    Mutant("gradients that are left out count", "library/loop_rules.py", "        self._check_marks()\n\n    def _mark", "\n    def _mark", "what a loop does to gradients is done, or an error", "library/test_operations.py"),
    Mutant("graphs live through a step", "engine/steps/horizontal.py", "self._epoch += 1", "pass", "weights change only where a step ends", "library/test_hook_misuse.py"),
    Mutant("the curve ends before all is offloaded", "papers/ssdtrain.py", 'point("offload", "swap_all")', 'point("offload", 0.9)', "the curve's ends are the plans that are forced", "papers/test_ssdtrain.py"),
    Mutant("the tensor cache writes weights", "engine/cache/tensor_cache.py", "or self._stays(tensor)", "", "no weight is written", "library/test_offloading.py"),
    Mutant("the tensor cache reads what it has", "engine/cache/saved_tensors.py", "not self.uploads and self.lease is None", "not self.uploads", "what is being written is not read", "library/test_offloading.py"),
    Mutant("what was saved may change", "engine/cache/tensor_cache.py", "tensor = saved.unchanged()", "tensor = saved._tensor", "what changes after it was saved is an error", "library/test_offloading.py"),
    Mutant("the tensor cache writes each view", "engine/cache/tensor_cache.py", "if known is not None:", "if False:", "a storage is written once", "library/test_offloading.py"),
    Mutant("host memory of the tensor cache grows", "engine/reading/resident_buffers.py", "not self._is_settled and ", "", "host memory is taken in the first step alone", "engine/test_resident_buffers.py library/test_offloading_memory.py"),
    Mutant("host memory of the tensor cache has no limit", "engine/reading/resident_buffers.py", "self.num_bytes + size_bytes <= self._limit_bytes", "True", "host memory for tensors has a limit", "engine/test_resident_buffers.py"),
    Mutant("reads of the tensor cache may be late", "engine/cache/cache_amount.py", "self.most_bytes = int(_LESS * self.most_bytes)", "pass", "the amount that is found is never much slower than the best", "engine/test_tensor_cache_time.py"),
    Mutant("the tensor cache reads one block ahead", "engine/cache/saved_transfers.py", "if ahead_bytes > self.buffer_bytes and not must_come:", "if not must_come:", "what is faster to write is written", "engine/test_tensor_cache_time.py"),
    Mutant("a GPU's memory is free when the host knows it", "engine/device/gpu.py", "return not self.num_held or self.done", "return self.done", "offloading takes the memory of two blocks", "gpu/test_offloading.py"),
    Mutant("the host runs ahead of what it measures", "engine/cache/tensor_cache.py", "            if before is not None:\n                before()\n", "", "what hides is found though the host queues a forward at once", "gpu/test_offloading.py"),
    Mutant("what is read in place is not waited for", "engine/reading/weights.py", "self._device.mark()()  #", "pass  #", "host memory does not change while the GPU reads it", "gpu/test_read_in_place.py"),
    Mutant("what stays on a GPU is read in place", "engine/reading/weights.py", "return not use.stays_up and ", "return ", "what stays is uploaded once", "gpu/test_read_in_place.py"),
    Mutant("what is between layers that stay stays", "engine/reading/weights.py", "use.stays_up or use.segment is upload.of", "True", "between layers that stay on a GPU nothing else stays", "gpu/test_memory.py"),
    Mutant("no schedule starts a read", "engine/cache/tensor_cache.py", "following is not None and following is not self._pass", "False", "a schedule starts the reads of the next backward", "library/test_offloading_memory.py engine/test_tensor_cache_time.py"),
    Mutant("the tensor cache works in backward", "engine/cache/tensor_cache.py", "running_backward() is not None", "False", "what backward makes is not offloaded", "library/test_offloading.py"),
    Mutant("loaded parameters leave within an operator", "library/initialising.py", "if id(parameter) in stay or ", "if ", "an operator finds all its arguments", "library/test_init.py"),
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
    nightly = [name for name in tests if name in NIGHTLY_TESTS]
    on_gpu = [name for name in tests if name.startswith(GPU_TESTS) and name not in nightly]
    others = [name for name in tests if name not in (*on_gpu, *nightly)]
    if others or not tests:
        ignored = GPU_TESTS if tests else (*GPU_TESTS, TEXTS)
        yield {}, [*_BY_DAY, *others, *(f"--ignore={name}" for name in ignored)]
    if on_gpu or not tests:
        yield {"RATEL_SIMULATED_GPU": "1"}, [*_BY_DAY, *(on_gpu or GPU_TESTS)]
    if nightly:
        yield {"RATEL_SIMULATED_GPU": "1"}, ["-m", "nightly", *nightly]


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
