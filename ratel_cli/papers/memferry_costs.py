"""What each parameter of a model takes in each mode of MemFerry, by shapes and rates. Pure.

Reading in place moves, over the link to the GPU, for each micro-batch:

    a matrix of products       once for every `TILE_TOKENS` tokens: a product computes tiles of its result, and each row
                               of tiles reads all of the matrix
    a matrix of embeddings     the row of each token, in forward only
    other parameters           once

MemFerry measures these times. A product that reads in place takes as long as the longer of computing and the link, and
keeps the link busy for the time of what it reads. Backward reads a matrix as often as forward does, for the gradient of
its inputs, and again where it recomputes the product.

A layer's computing is divided among its matrices by their FLOPs; the rest (attention, norms) comes behind its last
parameter. Each use of a parameter that several segments share counts on its own, a tied head's too.

Invariant: `is_paper` follows MemFerry: reads in place leave the link to uploads, backward recomputes nothing (unless
`recomputes`), and the whole matrix of an embedding is uploaded. Otherwise rows of tokens go up in place of the matrix,
as Ratel trains where it does not read them in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.model.values.spec import ModelSpec, is_matrix, name_in_layer
from ratel_cli.papers.memferry import DirectLayer, OffloadedGradient
from ratel_cli.planning.profile.analytic import head_sum_bytes
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import AccessMode, Workload, most_rows, num_looked_up
from ratel_cli.planning.time.costs import ComputeSeconds, compute_seconds
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec
from ratel_cli.schedule.segments import Segment

TILE_TOKENS = 256
"""Rows of a tile of a matrix product's result. cuBLAS has tiles of 64 to 256 rows; smaller ones read more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """One parameter where a segment uses it."""

    weight_bytes: int
    """What the GPU holds of it if it is uploaded."""
    layer: DirectLayer
    """What it takes in each mode; its name is the parameter's, within the layer if it is in one."""
    gradient: OffloadedGradient
    """What its gradient takes, with the weights on the GPU."""


def kept_weight_bytes(uses: Sequence[WeightUse], modes: Sequence[AccessMode]) -> int:
    """Weights that stay on the GPU from their upload to backward: those that are not read in place in both."""
    return sum(use.weight_bytes for use, mode in zip(uses, modes, strict=True) if mode != "DHA")


def weight_uses(
    spec: ModelSpec,
    profile: ModelProfile,
    workload: Workload,
    hardware: HardwareProfile,
    *,
    is_paper: bool,
    recomputes: bool = False,
) -> tuple[WeightUse, ...]:
    """All parameters in the order of forward; none where the CPU computes, since nothing is uploaded there.

    `profile` is that of a micro-batch of the workload. `recomputes`: backward recomputes even if `is_paper`.
    """
    if hardware.link is None:
        return ()
    costs = _Costs(
        spec=spec,
        profile=profile,
        workload=workload,
        hardware=hardware,
        link=hardware.link,
        is_paper=is_paper,
        recomputes=recomputes or not is_paper,
    )
    return (*costs.of_embedding(), *costs.of_layers(), *costs.of_head())


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """The costs of one model in one step on one machine."""

    spec: ModelSpec
    profile: ModelProfile
    workload: Workload
    hardware: HardwareProfile
    link: Link
    is_paper: bool
    recomputes: bool

    def of_embedding(self) -> Iterator[WeightUse]:
        half = self.workload.num_micro_batches * (self.profile.embedding_seconds or 0.0) / 2
        for block in self.spec.embedding.bound:
            for number, parameter in enumerate(block.parameters):
                if block.is_looked_up and number == 0:
                    yield self._looked_up(block, parameter, seconds=half)
                else:
                    yield self._vector(block, parameter.name, parameter)

    def of_layers(self) -> Iterator[WeightUse]:
        for segment, kind in zip(self.spec.layers, self.profile.layers, strict=True):
            yield from self._of_layer(segment, kind)

    def of_head(self) -> Iterator[WeightUse]:
        """Forward is a third of computing, the loss included; nothing is recomputed."""
        without_layers = replace(self.profile, layers=(), embedding_seconds=0.0)
        adding_bytes = 0 if self.is_paper else head_sum_bytes(self.spec, self.workload)
        seconds = compute_seconds(without_layers, self.workload, self.hardware, head_sum_bytes=adding_bytes).head
        found = [
            (block, parameter)
            for block in self.spec.head.bound
            for parameter in (block.parameters[:1] if block in self.spec.lent.blocks else block.parameters)
        ]
        elements = sum(each.num_elements for _, each in found if is_matrix(each.name, len(each.computed_shape)))
        for block, parameter in found:
            if not is_matrix(parameter.name, len(parameter.computed_shape)):
                yield self._vector(block, parameter.name, parameter)
                continue
            share = parameter.num_elements / elements
            read_bytes = self._matrix_bytes(block, parameter, tokens=self.workload.micro_batch_tokens)
            yield self._use(
                block,
                f"{parameter.name} (head)" if block in self.spec.lent.blocks else parameter.name,
                parameter.num_elements,
                forward=share * seconds / 3,
                backward=share * 2 * seconds / 3,
                forward_bytes=read_bytes,
                backward_bytes=read_bytes,
            )

    def _of_layer(self, segment: Segment, kind: int) -> Iterator[WeightUse]:
        profile, seconds = self.profile.profiles[kind], self._layer_seconds[kind]
        left, uses = 1.0, list[WeightUse]()
        recomputed = {candidate.operator: candidate.flops for candidate in profile.candidates}
        for block in segment.bound:
            for parameter in block.parameters:
                name = name_in_layer(parameter.name)
                if not is_matrix(parameter.name, len(parameter.computed_shape)):
                    uses.append(self._vector(block, name, parameter))
                    continue
                operator = f"{name.removesuffix('.weight')} mm"
                # Of a product that is no candidate, a token passes one of a stack.
                forward = 2 * self.workload.micro_batch_tokens * math.prod(parameter.shape[-2:])
                flops = recomputed.get(operator, forward)
                share = min(left, flops / profile.flops_forward) if profile.flops_forward else 0.0
                left -= share
                # Tokens of a micro-batch that are multiplied by one matrix of a stack: all of them, or an expert's.
                tokens = flops / (2 * max(1, parameter.num_elements))
                read_bytes = self._matrix_bytes(block, parameter, tokens=tokens)
                reads_again = operator in recomputed and self.recomputes
                uses.append(
                    self._use(
                        block,
                        name,
                        parameter.num_elements,
                        forward=share * seconds.forward,
                        backward=share * seconds.backward,
                        forward_bytes=read_bytes,
                        backward_bytes=(2 if reads_again else 1) * read_bytes,
                    )
                )
        yield from uses[:-1]
        for last in uses[-1:]:
            behind = replace(last.layer, then_forward=left * seconds.forward, then_backward=left * seconds.backward)
            yield replace(last, layer=behind)

    @cached_property
    def _layer_seconds(self) -> list[ComputeSeconds]:
        """Computing of one layer of each kind, of all micro-batches."""
        return [self._seconds_of(kind, each) for kind, each in enumerate(self.profile.profiles)]

    def _seconds_of(self, kind: int, profile: LayerProfile) -> ComputeSeconds:
        alone = replace(
            self.profile,
            layers=(kind,),
            flops_head=0,
            head_moved_bytes=0,
            embedding_seconds=0.0,
            head_seconds=0.0,
        )
        if self.recomputes:
            return compute_seconds(alone, self.workload, self.hardware)
        kinds = (*self.profile.profiles[:kind], replace(profile, flops_recomputed=0))
        return compute_seconds(replace(alone, profiles=kinds), self.workload, self.hardware)

    def _matrix_bytes(self, block: BlockSpec, parameter: ParameterSpec, *, tokens: float) -> int:
        """What forward of a micro-batch reads of a matrix, or of each matrix of a stack."""
        return block.dtype_bytes * parameter.num_elements * max(1, math.ceil(tokens / TILE_TOKENS))

    def _looked_up(self, block: BlockSpec, parameter: ParameterSpec, *, seconds: float) -> WeightUse:
        num_rows, *width = parameter.shape
        if not self.is_paper and most_rows(self.spec, self.workload) is not None:
            num_rows = num_looked_up(self.spec, self.workload.tokens)
        return self._use(
            block,
            parameter.name,
            num_rows * math.prod(width),
            forward=seconds,
            backward=seconds,
            forward_bytes=self.workload.micro_batch_tokens * math.prod(width) * block.dtype_bytes,
            backward_bytes=0,
        )

    def _vector(self, block: BlockSpec, name: str, parameter: ParameterSpec) -> WeightUse:
        """A parameter that is read once by each kernel that uses it. Its computing is counted elsewhere."""
        read_bytes = block.dtype_bytes * parameter.num_elements
        elements = parameter.num_elements
        return self._use(
            block, name, elements, forward=0.0, backward=0.0, forward_bytes=read_bytes, backward_bytes=read_bytes
        )

    def _use(
        self,
        block: BlockSpec,
        name: str,
        num_elements: int,
        *,
        forward: float,
        backward: float,
        forward_bytes: int,
        backward_bytes: int,
    ) -> WeightUse:
        """`forward` and `backward`: computing of all micro-batches. The bytes are read in place for each of them."""
        number, up = self.workload.num_micro_batches, self.link.to_gpu_bytes_per_second
        weight_bytes = num_elements * block.dtype_bytes
        forward_link, backward_link = number * forward_bytes / up, number * backward_bytes / up
        layer = DirectLayer(
            name=name,
            upload=weight_bytes / up,
            forward=forward,
            backward=backward,
            direct_forward=max(forward, forward_link),
            direct_backward=max(backward, backward_link),
            forward_link=0.0 if self.is_paper else forward_link,
            backward_link=0.0 if self.is_paper else backward_link,
        )
        return WeightUse(
            weight_bytes=weight_bytes,
            layer=layer,
            gradient=self._gradient(num_elements * block.gradient_dtype_bytes if block.is_trained else 0, backward),
        )

    def _gradient(self, num_bytes: int, backward: float) -> OffloadedGradient:
        """Each micro-batch adds to the gradient: it writes all of it, and but for the first one it reads it."""
        number = self.workload.num_micro_batches
        written = number * num_bytes / self.link.from_gpu_bytes_per_second
        read = (number - 1) * num_bytes / self.link.to_gpu_bytes_per_second
        return OffloadedGradient(num_bytes=num_bytes, backward=backward, direct_backward=max(backward, written, read))
