"""Problems and placements by chance: models of every kind of block, of one rank or several, on a CPU or a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from ratel_cli.hardware.spec import Network
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.planning.profile.activations import OffloadedActivations, offload
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import GroupShape, Overlap, Placement, UnitsOnGpu, Workload, most_rows
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.problem import Problem
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.schedule.rules import FROZEN, ParameterKind, Rule, rules_of
from ratel_cli.sizes import DtypeName
from ratel_cli.store.layout import WHOLE, RankSlice
from tests.planning.profiles import by_chance
from tests.planning.shapes import machine_by_chance

Shape = tuple[str, tuple[int, ...], bool]
OPTIMIZERS = ("adamw", "adamw_8bit", "lion", "sgd", "muon")
KINDS = ("full", "full", "frozen below", "last only", "attention", "adapter", "quantised adapter")
OVERLAPS: tuple[Overlap, ...] = ("optimized", "optimized", "optimized", "naive", "separate")
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One problem with one placement, of which nobody says that it is good."""

    problem: Problem
    placement: Placement
    offloaded: OffloadedActivations
    spilled_segments: int


class _Blocks:
    """The blocks of a model in the order of the store: what is trained in the model's dtype comes first."""

    def __init__(self, choice: random.Random, *, has_ranks: bool, num_layers: int) -> None:
        self.dtype = choice.choice(DTYPES)
        self.kind = choice.choice(KINDS)
        optimizer = choice.choice([each for each in OPTIMIZERS if not (has_ranks and each == "muon")])
        is_coarse = self.dtype == "bfloat16" and choice.random() < 0.2
        self.rules = rules_of(
            optimizer, has_momentum=choice.random() < 0.5, bf16_master="bf16" if is_coarse else "fp32"
        )
        self.gradient_dtype: DtypeName | None = choice.choice([None, None, "float32"])
        self.has_norms_in_fp32 = choice.random() < 0.3 and self.dtype != "float32"
        self.is_in_files = "adapter" in self.kind and choice.random() < 0.5
        self.head = num_layers + 1
        self.num_frozen = choice.randint(0, num_layers) if self.kind == "frozen below" else -1
        self.first: list[dict[str, object]] = []
        self.behind: list[dict[str, object]] = []

    def add(self, segment: int, name: str, parameters: list[Shape], **more: object) -> None:
        """The blocks of a segment: one for each rule and dtype. `more`: of the first one."""
        groups: dict[tuple[Rule, bool], list[Shape]] = {}
        for each in parameters:
            is_frozen = self._is_frozen(segment, each[0])
            is_weight = 0 < segment < self.head
            rule = self.rules.of(ParameterKind(each[1], is_embedding=not is_weight, is_weight_of_layer=is_weight))
            groups.setdefault((FROZEN if is_frozen else rule, self.has_norms_in_fp32 and "norm" in each[0]), []).append(
                each
            )
        for number, ((rule, is_in_fp32), found) in enumerate(groups.items()):
            for own in [[each] for each in found] if rule.stands_alone else [found]:
                matrices = [each for each in own if len(each[1]) > 1]
                if rule is FROZEN and self.kind.startswith("quantised") and 0 < segment < self.head and matrices:
                    self._add_quantised(segment, name, own, matrices)
                    continue
                dtype = "float32" if is_in_fp32 else self.dtype
                block = {
                    "segment": segment,
                    "name": f"{name} {number}",
                    "parameters": own,
                    "dtype": dtype,
                    "gradient_dtype": "float32" if is_in_fp32 else self.gradient_dtype,
                    "rule": rule,
                    **(more if number == 0 else {}),
                }
                is_first = number == 0 and not is_in_fp32 and rule is not FROZEN
                (self.first if is_first else self.behind).append(block)

    def _add_quantised(self, segment: int, name: str, own: list[Shape], matrices: list[Shape]) -> None:
        held = {each: shape for each, shape, _ in matrices}
        packed = [(each, (math.prod(shape) // 2 + 64,), False) for each, shape, _ in matrices]
        rest = [each for each in own if each not in matrices]
        of_both = {"segment": segment, "rule": FROZEN}
        if rest:
            self.behind.append({**of_both, "name": f"{name} rest", "parameters": rest, "dtype": self.dtype})
        self.behind.append(
            {**of_both, "name": f"{name} packed", "parameters": packed, "dtype": "uint8", "quantised": held}
        )

    def _is_frozen(self, segment: int, name: str) -> bool:
        match self.kind:
            case "full":
                return False
            case "frozen below":
                return segment <= self.num_frozen
            case "last only":
                return segment < self.head
            case "attention":
                return "qkv" not in name
            case _:
                return "lora" not in name

    def laid_out(self) -> tuple[BlockSpec, ...]:
        found = []
        for index, each in enumerate([*self.first, *self.behind]):
            block = lay_out_block(index=index, **each)  # type: ignore[arg-type]
            if self.is_in_files and not block.is_trained and not block.borrowers and not block.is_looked_up:
                block = replace(block, file_bytes=block.compute_bytes + 8192)
            found.append(block)
        return tuple(found)


def draw_spec(choice: random.Random, *, has_ranks: bool) -> ModelSpec:
    """A model, tied or not, of one or two kinds of layers, some of which share a block; trained whole or in part."""
    num_layers, h, vocab = choice.choice([1, 2, 3, 5, 8, 13]), choice.choice([32, 64, 256]), 100
    vocab = choice.choice([100, 5000, 20000])
    blocks = _Blocks(choice, has_ranks=has_ranks, num_layers=num_layers)
    is_tied = choice.random() < 0.4
    is_looked_up = is_tied or choice.random() < 0.85
    num_experts, has_two_kinds = choice.choice([0, 0, 4]), choice.random() < 0.4
    more: dict[str, object] = {"is_looked_up": True} if is_looked_up else {}
    more |= {"borrowers": (blocks.head,)} if is_tied else {}
    blocks.add(0, "embedding", [("wte.weight", (vocab, h), True)], **more)
    if choice.random() < 0.3:
        blocks.add(0, "positions", [("wpe.weight", (64, h), True)])
    for index in range(num_layers):
        is_other = has_two_kinds and index % 2 == 1
        wide, prefix = 2 * h if is_other else h, f"layers.{index}."
        parameters: list[Shape] = [
            (prefix + "norm1.weight", (h,), False),
            (prefix + "qkv.weight", (3 * wide, h), True),
            (prefix + "out.weight", (h, wide), True),
            (prefix + "norm2.weight", (h,), False),
        ]
        if num_experts and not is_other:
            parameters.append((prefix + "experts.up", (num_experts, 2 * h, h), True))
            parameters.append((prefix + "experts.down", (num_experts, h, 2 * h), True))
        else:
            parameters += [(prefix + "up.weight", (4 * wide, h), True), (prefix + "down.weight", (h, 4 * wide), True)]
        if "adapter" in blocks.kind:
            parameters.append((prefix + "qkv.lora_A.default.weight", (8, h), True))
            parameters.append((prefix + "qkv.lora_B.default.weight", (3 * wide, 8), True))
        blocks.add(index + 1, f"layer {index}", parameters)
    sharing = choice.choice([None, None, "layers", "to head"])
    if sharing and num_layers > 1:
        borrowers = sorted(choice.sample(range(2, blocks.head), choice.randint(1, num_layers - 1)))
        borrowers += [blocks.head] if sharing == "to head" else []
        rule = blocks.rules.main
        blocks.behind.append(
            {
                "segment": 1,
                "name": "shared",
                "parameters": [("shared.weight", (2 * h, h), True), ("shared.norm", (h,), False)],
                "dtype": blocks.dtype,
                "gradient_dtype": blocks.gradient_dtype,
                "rule": FROZEN if "adapter" in blocks.kind else rule,
                "borrowers": tuple(borrowers),
            }
        )
    tail: list[Shape] = [("norm.weight", (h,), False)]
    blocks.add(blocks.head, "head", tail if is_tied else [*tail, ("lm_head.weight", (vocab, h), True)])
    return ModelSpec(
        name="drawn",
        architecture="x",
        blocks=blocks.laid_out(),
        segment_names=("embedding", *(f"layer {index}" for index in range(num_layers)), "head"),
        dtype=blocks.dtype,
        hidden_size=h,
        vocab_size=vocab,
        carried_bytes=choice.choice([0, 0, 128]),
        batch_bytes=choice.choice([24, 536]),
        looks_up_rows=choice.random() < 0.85,
    )


def draw(seed: int) -> Drawn:
    """The problem and the placement of this number."""
    choice = random.Random(seed)
    size = choice.choice([1, 1, 1, 2, 3])
    spec = draw_spec(choice, has_ranks=size > 1)
    while not any(block.is_trained for block in spec.blocks):
        spec = draw_spec(choice, has_ranks=size > 1)
    workload = Workload(
        micro_batch_size=choice.randint(1, 4),
        num_micro_batches=choice.choice([1, 1, 2, 3, 5]),
        sequence_len=choice.choice([16, 64, 512]),
        chunk_tokens=choice.choice([None, 20, 100, 700]),
    )
    hardware = machine_by_chance(choice)
    if size > 1:
        hardware = replace(hardware, network=Network(bytes_per_second=1e9))
    if choice.random() < 0.5:
        profile = by_chance(choice, num_layers=spec.num_layers, most_kib=choice.choice([1, 64, 4000]))
    else:
        traits = LayerTraits(num_heads=4, head_dim=max(8, spec.hidden_size // 4))
        profile = analytic_profile(spec, workload, traits=traits)
    overlap = choice.choice(OVERLAPS)
    decisions = Decisions(
        holds_gradients=choice.random() < 0.5,
        num_slots=2,
        host_limit_bytes=1 << 50,
        overlap=overlap,
        device_limit_bytes=None,
    )
    problem = Problem(
        spec=spec,
        workload=workload,
        profile=profile,
        hardware=hardware,
        decisions=decisions,
        process_bytes=0,
        rank_slice=RankSlice(choice.randrange(size), size) if size > 1 else WHOLE,
        gpu_holds_head=choice.random() < 0.6,
    )
    placement = _draw_placement(choice, problem, has_ranks=size > 1)
    holds = decisions.holds_gradients or overlap == "separate"
    return Drawn(
        problem=problem,
        placement=placement,
        offloaded=_draw_offloaded(choice, problem),
        spilled_segments=choice.randint(0, len(spec.segments)) if holds else 0,
    )


def _draw_offloaded(choice: random.Random, problem: Problem) -> OffloadedActivations:
    unit_bytes = [choice.randint(1, 100_000) for _ in problem.spec.layers]
    number = problem.workload.num_micro_batches
    spilled = choice.choice([0, 0, choice.randint(0, number * (len(unit_bytes) - 1))])
    stay_from = choice.choice([None, choice.randint(spilled, number * len(unit_bytes))])
    return offload(
        unit_bytes,
        num_micro_batches=number,
        spilled_units=spilled,
        gpu_units_from=stay_from if problem.hardware.link is not None else None,
    )


def _draw_placement(choice: random.Random, problem: Problem, *, has_ranks: bool) -> Placement:
    indices, num_layers = range(len(problem.spec.segments)), problem.spec.num_layers
    overlap, is_on_gpu = problem.decisions.overlap, problem.hardware.link is not None
    num_deferred = 0
    if not problem.decisions.holds_gradients and overlap != "separate":
        num_deferred = choice.choice([0, 0, 1, 2, len(indices)])
    some = [range(choice.randint(0, len(indices))), choice.sample(indices, choice.randint(0, len(indices)))]
    placement = Placement(
        prefetch_blocks=2 if has_ranks else choice.randint(0, 3),
        pending_updates=0 if overlap == "separate" else choice.randint(0, 4),
        resident_weights=frozenset() if has_ranks else frozenset(choice.choice(some)),
        resident_states=frozenset(choice.sample(indices, choice.randint(0, len(indices)))),
        deferred=frozenset(indices[len(indices) - num_deferred :]) if num_deferred > 0 else frozenset(),
        groups=GroupShape(elements=choice.choice([4096, 32768, 1 << 21]), in_flight=choice.choice([1, 2])),
    )
    if not is_on_gpu:
        return placement
    unit = choice.choice([0, 10**5, 10**6])
    units = UnitsOnGpu(forward_bytes=choice.randint(0, 2 * unit + 1), ahead_bytes=choice.randint(0, unit + 1))
    return replace(
        placement,
        gpu_embedding_rows=most_rows(problem.computed, problem.workload),
        gpu_weights=frozenset(range(choice.randint(1, num_layers + 1), num_layers + 1)),
        gpu_window_bytes=choice.choice([0, 1 << 16, 1 << 19, 1 << 40]),
        gpu_holds_sums=choice.random() < 0.5,
        gpu_holds_head=problem.gpu_holds_head,
        gpu_holds_lookup=problem.gpu_holds_head and choice.random() < 0.5,
        gpu_leaving_bytes=choice.choice([0, 1 << 22]),
        gpu_units=choice.choice([None, units]),
    )
