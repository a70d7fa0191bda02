"""Ratel's engine on a tiny model and a real store in a temporary directory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ratel_cli import _native
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.settings import OptimizerSettings, adamw_settings
from ratel_cli.engine.optimizer.update import UpdateSettings
from ratel_cli.engine.ranks.commits import commit_together
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.engine.steps.build import EngineParts, open_device
from ratel_cli.engine.steps.following import EngineSettings
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.io.buffers import BufferPool, PinMemory
from ratel_cli.io.queue import EngineChoice, IoQueue, open_queue
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapter_files import AdaptedSource
from ratel_cli.model.export.adapters import adapted_matrices, base_spec, drawn_adapter, inject, magnitudes_of
from ratel_cli.model.export.checkpoint import CheckpointSource
from ratel_cli.model.export.merged_weights import AdaptedMatrix
from ratel_cli.model.files.import_weights import WeightSource, imported_weights
from ratel_cli.model.files.in_place import base_files_of, placed_in_files
from ratel_cli.model.files.quantised_model import QuantisingSource, plain_spec, quantise_layers, quantised_weights
from ratel_cli.model.files.skeleton import DTYPES, NAMES_OF_DTYPES, build_skeleton, supported_attention
from ratel_cli.model.values.adapter_settings import AdapterSettings, base_name
from ratel_cli.model.values.freezing import freeze
from ratel_cli.model.values.rate_groups import ONE_RATE, RateGroups
from ratel_cli.planning.profile.placement import GroupShape, Overlap, Placement
from ratel_cli.run.train.branch import beginning
from ratel_cli.schedule.rules import rules_of
from ratel_cli.sizes import CHUNK_ELEMENTS, GROUP_ELEMENTS, DtypeName, QuantisedForm
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.base_files import list_bytes_of
from ratel_cli.store.fill import fill
from ratel_cli.store.layout import Geometry
from ratel_cli.store.store import Progress, Store, StoreIdentity
from tests.engine.architectures import VOCAB_SIZE
from tests.fakes import values_of
from tests.reference import Recipe

NOTHING_AHEAD = Placement()
IDENTITY = StoreIdentity(model_hash="m", config_hash="c", data_hash="d", seed=42, software="s")


def random_steps(
    num_steps: int, num_micro_batches: int, *, packed: bool = True, num_tokens: int = 12
) -> list[list[MicroBatch]]:
    """Random tokens, two samples in a row where `packed`, some targets ignored."""
    generator = torch.Generator().manual_seed(num_steps * 100 + num_micro_batches)

    def batch() -> MicroBatch:
        ids = torch.randint(0, VOCAB_SIZE, (2, num_tokens), generator=generator)
        targets = torch.randint(0, VOCAB_SIZE, (2, num_tokens), generator=generator)
        targets[:, num_tokens // 2 - 1] = -100
        positions = torch.arange(num_tokens)
        if packed:
            positions = positions % (num_tokens // 2)
        return MicroBatch(
            input_ids=ids,
            targets=targets,
            position_ids=positions.expand(2, -1).contiguous(),
            sample_ids=(0, 1),
            num_targets=int((targets != -100).sum()),
            num_tokens=ids.numel(),
        )

    return [[batch() for _ in range(num_micro_batches)] for _ in range(num_steps)]


def initial_weights(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """fp32 weights by name, norms and biases drawn too, so that no gradient is zero by symmetry. Made once."""
    key = config.to_json_string()
    if key not in _WEIGHTS:
        _WEIGHTS[key] = _draw_weights(config)
    return _WEIGHTS[key]


_WEIGHTS: dict[str, dict[str, torch.Tensor]] = {}


def _draw_weights(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    own = copy.deepcopy(config)  # the model notes its dtype in it
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation=attention_of(config))
    return {
        name: (parameter + 0.02 * torch.randn_like(parameter)).detach() for name, parameter in model.named_parameters()
    }


def attention_of(config: PretrainedConfig) -> str:
    """The implementation of attention that a run takes. Found once for each type of model."""
    if config.model_type not in _ATTENTION:
        _ATTENTION[config.model_type] = supported_attention(config, "sdpa")
    return _ATTENTION[config.model_type]


_ATTENTION: dict[str, str] = {}


def packs(config: PretrainedConfig) -> bool:
    """Whether samples are packed for this model. Found once for each config, before any block is on a GPU."""
    key = config.to_json_string()
    if key not in _PACKS:
        skeleton = build_skeleton(config, dtype="float32", attn_implementation=attention_of(config))
        _PACKS[key] = find_blocks(skeleton, name="tiny").packs
    return _PACKS[key]


_PACKS: dict[str, bool] = {}


class Source:
    """Weights in memory as an import source."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._weights[name].reshape(-1)[start:stop]


class Zeros(dict[str, torch.Tensor]):
    """Stands for weights that are all zero, of any size, in no memory."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.zeros(1).expand(1 << 40)


def initial_weights_of_zeros() -> Mapping[str, torch.Tensor]:
    return Zeros()


class Machine:
    """Everything a run has open."""

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        pool: BufferPool,
        queue: IoQueue,
        make_engine: Callable[[Callable[[], None]], StepEngine[MicroBatch]],
        engine_for: Callable[[Placement, int | None], StepEngine[MicroBatch]],
        timeline: Timeline,
        *,
        device: str,
        ranks: Ranks,
        group_rates: tuple[float, ...] = (),
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.store = store
        self.pool = pool
        self.queue = queue
        self.make_engine = make_engine
        self._engine_for = engine_for
        self.timeline = timeline
        self.group_rates = group_rates
        self.device = device
        """Where it computes: "cpu" or "cuda"."""
        self.engine = make_engine(lambda: None)
        self.decided = 0

    def follow(self, placement: Placement, *, held_in_memory_bytes: int | None = None) -> None:
        """Let another engine take over from the first one."""
        self.engine = self._engine_for(placement, held_in_memory_bytes)

    def train(
        self,
        steps: Sequence[Sequence[MicroBatch]],
        recipe: Recipe,
        *,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> list[StepOutcome]:
        """Run the steps that the store has not committed yet; each is committed beneath the next, and the last."""
        outcomes = []
        for step in range(self.store.progress.step, len(steps)):
            before_step(step)
            outcomes.append(
                self.engine.run(
                    steps[step],
                    step=step,
                    update=step + 1,
                    learning_rate=recipe.learning_rate,
                    group_rates=self.group_rates,
                    loss_scale=recipe.loss_scale,
                    commit_previous=self.commit,
                    first_micro_batch=self.ranks.rank * len(steps[step]),
                )
            )
            self.decided = step + 1
        self.settle()
        return outcomes

    def settle(self) -> None:
        """Commit the step that is not yet."""
        if self.engine.is_unsettled:
            self.engine.settle()
            self.commit()

    def commit(self) -> None:
        commit_together(self.store, self.ranks, progress_at(self.decided))

    def weights(self) -> dict[str, torch.Tensor]:
        """The fp32 masters in the store, by name: of a rank, what lies in its slices, flat."""
        weights = {}
        for block in self.model.spec.sliced(self.ranks.slice).blocks:
            if not block.num_elements:
                continue
            fields = {}
            for field in block.record.fields:
                memory = memoryview(bytearray(field.num_bytes(block.num_elements)))
                with self.pool.lease(len(memory), "test") as lease:
                    self.store.current().read(block.index, field.name, 0, block.num_elements, lease.memory).wait()
                    memory[:] = lease.memory
                fields[field.name] = values_of(memory, field)
            if not block.is_trained:
                master = fields["frozen"].float()
            elif "p16" in fields:
                master = fields["p16"].float()
            elif block.dtype == "bfloat16":
                master = torch.empty(block.num_elements)
                join = _native.join_bfloat16 if "v32" in fields else _native.join_tied_bfloat16
                join(fields["hi16"], fields["lo16"], fields["v32" if "v32" in fields else "tie8"], master)
            else:
                master = fields["w32"]
            for parameter in block.parameters:
                weights[parameter.name] = master[parameter.start : parameter.stop].view(parameter.shape)
        return weights


def settings_of(recipe: Recipe) -> OptimizerSettings:
    """The settings of the recipe's optimizer, with the defaults of the config."""
    momentum, nesterov = recipe.momentum, recipe.nesterov
    if recipe.optimizer == "muon":
        momentum, nesterov = momentum or 0.95, not nesterov
    options = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": recipe.adjust_lr_fn}
    of_adamw = adamw_settings(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=recipe.weight_decay)
    return replace(of_adamw, options={**of_adamw.options, **options})


def progress_at(step: int) -> Progress:
    return Progress(step=step, updates=step, loss_scale=1.0, good_steps=0, tokens=0)


def _the_cpu(timeline: Timeline) -> AbstractContextManager[Device]:
    return open_device(torch.device("cpu"), timeline)


def adapted(
    skeleton: PreTrainedModel,
    adapter: AdapterSettings,
    quantised: QuantisedForm | None,
    *,
    seed: int,
    with_experts: bool = False,
) -> Mapping[str, torch.Tensor]:
    """Put the adapter into the skeleton, which is quantised first if that is asked for. Returns how it begins."""
    config = skeleton.config
    plain = build_skeleton(config, dtype=NAMES_OF_DTYPES[config.dtype], attn_implementation=attention_of(config))
    if quantised is not None:
        quantise_layers(skeleton, quantised, with_experts=with_experts)
    inject(skeleton, adapter)
    return drawn_adapter(plain, adapter, seed=seed)


def quantising(source: Source, config: PretrainedConfig, model: DecoderModel) -> WeightSource:
    """The source, with the bytes of the model's quantised layers if it has some."""
    if not any(each.quantised_shape for each in model.spec.parameters):
        return source
    layers = {base_name(name): layer for name, layer in quantised_weights(model.skeleton).items()}
    plain = build_skeleton(config, dtype=model.spec.dtype, attn_implementation=attention_of(config))
    return QuantisingSource(source, layers, plain)


def saved(
    directory: Path, config: PretrainedConfig, weights: Mapping[str, torch.Tensor], model: DecoderModel
) -> CheckpointSource:
    """The weights as transformers saves them in the model's dtype, in several files, open."""
    dtype = model.spec.dtype
    plain = build_skeleton(config, dtype=dtype, attn_implementation=attention_of(config))
    state = {name: values.to(DTYPES[dtype]) for name, values in weights.items()}
    loaded = type(plain).from_pretrained(None, config=plain.config, state_dict=state, dtype=DTYPES[dtype])
    loaded.save_pretrained(directory, max_shard_size="100KB")
    return CheckpointSource(directory, plain, plain_spec(base_spec(model.spec), plain))


def _source(
    resources: ExitStack,
    config: PretrainedConfig,
    weights: Mapping[str, torch.Tensor],
    model: DecoderModel,
    base_directory: Path | None,
    *,
    drawn: Mapping[str, torch.Tensor],
    magnitudes: Mapping[str, AdaptedMatrix],
) -> WeightSource:
    """Where the first generation comes from. The model is changed if a part of it stays in files."""
    if base_directory is None:
        return AdaptedSource(quantising(Source(weights), config, model), lambda: drawn, magnitudes)
    base = resources.enter_context(saved(base_directory, config, weights, model))
    source = AdaptedSource(base, lambda: drawn, magnitudes)
    model.spec = placed_in_files(model.spec, source)
    return source


@contextmanager
def machine(
    directory: Path,
    config: PretrainedConfig,
    recipe: Recipe,
    *,
    dtype: DtypeName = "float32",
    weights: Mapping[str, torch.Tensor] | None = None,
    io_engine: EngineChoice = "threads",
    queue: IoQueue | None = None,
    model: DecoderModel | None = None,
    barrier: Barrier | None = None,
    hold: bool = False,
    held_in_memory_bytes: int | None = None,
    in_place: bool = False,
    num_directories: int = 1,
    overlap: Overlap = "optimized",
    placement: Placement = NOTHING_AHEAD,
    group_elements: int = GROUP_ELEMENTS,
    groups_in_flight: int = 1,
    chunk_elements: int | None = None,
    activation_bytes: int = 1 << 26,
    micro_batch_tokens: int | None = None,
    spare_bytes: int = 0,
    devices: Callable[[Timeline], AbstractContextManager[Device]] = _the_cpu,
    pin: PinMemory | None = None,
    ranks: Ranks = ALONE,
    adapter: AdapterSettings | None = None,
    rates: RateGroups = ONE_RATE,
    group_rates: tuple[float, ...] = (),
    quantised: QuantisedForm | None = None,
    quantises_experts: bool = False,
    base_directory: Path | None = None,
) -> Iterator[Machine]:
    """A machine on a new store, or, without `weights`, on the store that an earlier one left in `directory`.

    A `queue` is only borrowed; without one there is a new one. `model` is that of an earlier machine, to save time.
    `base_directory`: where the weights are saved in `dtype`, and stay as far as they are frozen; of adapters alone.
    """
    drawn: Mapping[str, torch.Tensor] = {}
    magnitudes: Mapping[str, AdaptedMatrix] = {}
    if model is None:
        skeleton = build_skeleton(config, dtype=dtype, attn_implementation=attention_of(config))
        if adapter is not None:
            drawn = adapted(skeleton, adapter, quantised, seed=recipe.seed, with_experts=quantises_experts)
        if recipe.unfrozen is not None:
            freeze(skeleton, unfrozen=recipe.unfrozen, frozen=())
        gradients = NAMES_OF_DTYPES[recipe.gradient_dtype or recipe.dtype]
        assert recipe.bf16_master in ("fp32", "stochastic")
        rules = rules_of(recipe.optimizer, has_momentum=recipe.momentum > 0, bf16_master=recipe.bf16_master)
        model = find_blocks(skeleton, name="tiny", gradient_dtype=gradients, rates=rates, rules=rules)
        if adapter is not None and adapter.has_magnitudes:
            magnitudes = magnitudes_of(adapted_matrices(skeleton, model.spec))
        if recipe.noise_alpha is not None:
            model.add_noise(recipe.noise_alpha)
    groups = GroupShape(elements=group_elements, in_flight=groups_in_flight)
    paths = [directory / f"drive{index}" for index in range(num_directories)]
    num_elements = sum(block.num_elements for block in model.spec.blocks)
    settings = EngineSettings(
        optimizer=settings_of(recipe),
        updates=UpdateSettings(
            max_grad_norm=recipe.max_grad_norm,
            holds_all=hold or in_place,
            held_in_memory_bytes=held_in_memory_bytes,
            overlap=overlap,
        ),
        placement=replace(placement, groups=groups),
        seed=recipe.seed,
        gradient_scratch_bytes=0 if held_in_memory_bytes is None else 4 * num_elements,
        activation_scratch_bytes=activation_bytes if placement.spilled_units else 0,
        chunk_tokens=recipe.chunk_tokens,
        micro_batch_tokens=micro_batch_tokens,
        spare_bytes=spare_bytes,
    )
    with ExitStack() as resources:
        queue = queue or resources.enter_context(open_queue(io_engine, notice=lambda text: None))
        pool = resources.enter_context(BufferPool(None, pin=pin))
        if weights is None:
            store = resources.enter_context(Store.open(paths, queue=queue, identity=IDENTITY, barrier=barrier))
        else:
            source = _source(resources, config, weights, model, base_directory, drawn=drawn, magnitudes=magnitudes)
            own = model.spec.sliced(ranks.slice)
            base_files = base_files_of(own, source)
            geometry = Geometry(
                blocks=own.stored_blocks,
                rank_slice=ranks.slice,
                num_slots=1 if in_place else 2,
                shares=(1,) * num_directories,
                chunk_elements=chunk_elements or min(CHUNK_ELEMENTS, group_elements),
                list_bytes=list_bytes_of(base_files),
            )
            made = Store.create(paths, geometry, identity=IDENTITY, queue=queue, barrier=barrier, base_files=base_files)
            store = resources.enter_context(made)
            fill(store, imported_weights(own, source, beginning()), pool, progress=lambda num_bytes: None)
            pool.trim()
        timeline = Timeline()
        device = resources.enter_context(devices(timeline))

        def make_parts(check_stop: Callable[[], None]) -> EngineParts:
            return resources.enter_context(
                EngineParts(
                    model,
                    store,
                    queue=queue,
                    pool=pool,
                    device=device,
                    timeline=timeline,
                    paths=paths,
                    ranks=ranks,
                    check_stop=check_stop,
                )
            )

        def make_engine(check_stop: Callable[[], None]) -> StepEngine[MicroBatch]:
            return resources.enter_context(make_parts(check_stop).engine(settings))

        parts = make_parts(lambda: None)

        def engine_for(placement: Placement, held_in_memory_bytes: int | None) -> StepEngine[MicroBatch]:
            return resources.enter_context(
                parts.engine(
                    replace(
                        settings,
                        placement=replace(placement, groups=groups),
                        updates=replace(settings.updates, held_in_memory_bytes=held_in_memory_bytes),
                        gradient_scratch_bytes=0 if held_in_memory_bytes is None else 4 * num_elements,
                        activation_scratch_bytes=activation_bytes if placement.spilled_units else 0,
                    )
                )
            )

        yield Machine(
            model,
            store,
            pool,
            queue,
            make_engine,
            engine_for,
            timeline,
            device=device.torch_device.type,
            ranks=ranks,
            group_rates=group_rates,
        )
