"""A language model that is frozen, with an adapter that is trained: what differs from a language model alone.

`model/export/adapters.py` and `adapter_files.py` import PEFT, and this file does, and so only where a config asks for
an adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapter_files import (
    AdaptedSource,
    adapter_config_text,
    adapter_layout,
    load_adapted,
    read_adapter,
)
from ratel_cli.model.export.adapters import (
    adapted_matrices,
    base_spec,
    drawn_adapter,
    inject,
    is_of_adapter,
    magnitudes_of,
    trained_rows,
)
from ratel_cli.model.export.card import Card
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.export.export_layout import ExportLayout
from ratel_cli.model.export.export_weights import ExportFiles
from ratel_cli.model.export.merged_weights import MergedWeights, TrainedRows
from ratel_cli.model.export.sidecars import AdapterSidecars, BaseSidecars
from ratel_cli.model.files.directory import ADAPTER_WEIGHTS_NAME, has_weights
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.quantised import QUANTISED_FORMS, dequantised
from ratel_cli.model.files.quantised_files import packed_layouts, quantisation_of
from ratel_cli.model.files.quantised_model import (
    QuantisedWeight,
    QuantisingSource,
    is_inputs_first,
    keep_experts_packed,
    keep_layers_packed,
    pack_layers,
    plain_spec,
    quantise_layers,
    quantise_stacks,
    quantised_weights,
)
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.model.values.adapter_settings import AdapterSettings, base_name, is_of_tokens
from ratel_cli.run.files.run_directory import as_recorded_by_run
from ratel_cli.run.inputs.base import Weights
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.settings import adapter_of, quantised_form
from ratel_cli.sizes import MergeBase, QuantisedForm, Task
from ratel_cli.store.joined import Readable

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True, kw_only=True)
class AdaptedBase(LanguageBase):
    """A language model with an adapter."""

    weights_name, library = ADAPTER_WEIGHTS_NAME, "PEFT"
    settings: AdapterSettings
    peft_config: LoraConfig
    form: QuantisedForm | None = None
    """How the language model is quantised; None: it is not."""

    def __post_init__(self) -> None:
        """Raise BadInput if something is drawn where the model's own code runs twice: before the layers, and behind;
        or if text does not use a module that is to be trained whole."""
        spec = self.model.spec
        known = {each.name for each in spec.parameters}
        for name in (name for name, each in self.model.skeleton.named_parameters() if each.requires_grad):
            if name not in known:
                raise BadInput(f"lora_modules_to_save: {name} is in a part that text does not use", "name others")
        outside = (each.name for part in (spec.embedding, spec.head) for each in part.parameters)
        found = next((name for name in outside if is_of_adapter(name) and not is_of_tokens(name)), None)
        if found is not None and self.settings.dropout:
            raise BadInput(
                f"lora_dropout: {found} is outside the layers, where nothing can be dropped",
                "set lora_dropout: 0, or name modules of the layers in lora_target_modules",
            )

    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """See Base. The base's weights come from its files, the adapter's are drawn."""

        def drawn() -> dict[str, torch.Tensor]:
            return drawn_adapter(self._plain(), self.settings, seed=config.seed)

        has_magnitudes = self.settings.has_magnitudes
        adapted = adapted_matrices(self.model.skeleton, self.model.spec) if has_magnitudes else {}
        rows = {each.name: each for each in self._trained_rows}
        source = AdaptedSource(self._open_base(resources), drawn, magnitudes_of(adapted), rows)
        return source, self.layout(config)

    def layout(self, config: RunConfig) -> ExportLayout:
        """See Base. The adapter alone."""
        return adapter_layout(self.model.skeleton, self.model.spec, config.dtype)

    def sidecars(self, config: RunConfig) -> BaseSidecars:
        """See Base. The adapter's configuration, with the base model's path as the run's config has it, and the
        tokenizer."""
        base_model = os.path.expanduser(as_recorded_by_run(config).base_model or "")
        return AdapterSidecars(
            base_dir=self.directory,
            tokenizer=super().sidecars(config).tokenizer,
            config_text=adapter_config_text(self.peft_config, base_model=base_model, revision=config.revision_of_model),
        )

    def open_export(self, directory: Path, resources: ExitStack) -> WeightSource:
        """See Base. The base's weights come from its own files."""
        return AdaptedSource(self._open_base(resources), partial(read_adapter, directory, self.model.spec))

    def merge(
        self,
        config: RunConfig,
        generation: Readable,
        pool: BufferPool,
        output_dir: Path,
        *,
        card: Card,
        overwrite: bool,
        progress: Callable[[], None],
        into: MergeBase,
    ) -> list[str]:
        """Write what `merged` gives into the directory that `-o` has named. Returns notices. Raises as `export`."""
        with ExitStack() as resources:
            plain, source = self._open_plain(resources)
            return self.export(
                config,
                generation,
                pool,
                output_dir,
                ExportFiles(source.layout(None), super().sidecars(config)),
                card=card,
                overwrite=overwrite,
                option="-o",
                merged=partial(self.merged, source=source, plain=plain.model.skeleton, into=into),
                progress=progress,
            )

    def merged(
        self, weights: StoredWeights, *, source: CheckpointSource, plain: PreTrainedModel, into: MergeBase
    ) -> MergedWeights:
        """The base with the adapter in `weights` added to it, as PEFT adds it to what `source` has, in the dtypes of
        its files. `into`: of a base that the run quantises. `plain`: a skeleton without the adapter."""
        spec, quantised = self.model.spec, self._quantised
        stored = {base_name(each.name): (each.name, block) for block in spec.blocks for each in block.parameters}
        adapted = adapted_matrices(self.model.skeleton, spec)
        for name in adapted.keys() & quantised.keys():
            adapted[name] = replace(adapted[name], is_inputs_first=is_inputs_first(plain, name))
        made_of_codes = {
            name for name, each in quantised.items() if each.layout.form in QUANTISED_FORMS and into == "dequantised"
        }

        rows = {each.matrix: each for each in self._trained_rows}

        def base_matrix(name: str) -> torch.Tensor:
            matrix = frozen_matrix(name)
            if name in rows:
                rows[name].put_into(matrix, weights.whole(rows[name].name))
            return matrix

        def frozen_matrix(name: str) -> torch.Tensor:
            stored_name, block = stored[name]
            wanted, shape = VALUE_DTYPES[source.dtypes[name]], plain.get_parameter(name).shape
            has_all_bits = torch.promote_types(wanted, held := VALUE_DTYPES[block.dtype]) == held
            if name in made_of_codes:
                layout, dtype = quantised[name].layout, quantised[name].dtype
                matrix = dequantised(weights.whole(stored_name), layout, dtype).to(wanted)
                return matrix.T.contiguous() if is_inputs_first(plain, name) else matrix
            if block.is_trained or has_all_bits:
                return weights.whole(stored_name).to(wanted)
            matrix = torch.empty(shape, dtype=wanted)
            source.read_whole_into(name, matrix.view(-1))
            return matrix

        return MergedWeights(weights, adapted, base_matrix)

    def open_merged(
        self,
        config: RunConfig,
        generation: Readable,
        resources: ExitStack,
        *,
        into: MergeBase,
        progress: Callable[[], None],
    ) -> tuple[LanguageBase, CheckpointSource, MergedWeights]:
        """What `merge` would write, as a model without an adapter; the files of its base, and its weights."""
        plain, source = self._open_plain(resources)
        stored = StoredWeights(
            self.model.spec,
            generation,
            BufferPool(None),  # of one group: that of the run has the limit of the blocks
            config.dtype,
            progress=progress,
        )
        merged = self.merged(resources.enter_context(stored), source=source, plain=plain.model.skeleton, into=into)
        return plain, source, merged

    def _open_plain(self, resources: ExitStack) -> tuple[LanguageBase, CheckpointSource]:
        """The language model without the adapter, and its files."""
        model = find_blocks(self._plain(), name=self.model.spec.name, task=self.model.task)
        plain = LanguageBase(
            directory=self.directory,
            config=self.config,
            attention=self.attention,
            model=model,
            new_rows=self.new_rows,
            read_tokenizer=self.read_tokenizer,
        )
        source = CheckpointSource(self.directory, model.skeleton, model.spec, new_rows=self.new_rows)
        resources.enter_context(source)
        install_buffers(model.skeleton, source.read_buffers())
        return plain, source

    def load(self, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
        """See Base. As PEFT loads it onto what transformers loads."""
        loaded, quantised = super().load(self.directory, dtype), self._quantised
        quantisation = quantisation_of(self.directory) if quantised else None
        if self.new_rows is not None:
            self.new_rows.make_room(loaded)
            with ExitStack() as resources:
                source, grown = self._open_base(resources), self.new_rows.shapes_in_files(loaded)
                for name, each in loaded.named_parameters():
                    if name in grown:
                        each.data.view(-1).copy_(source.read(name, 0, each.numel()))
        if quantisation is not None:
            loaded.config.quantization_config = quantisation  # it says which layers are not quantised
        if self.form is not None:
            quantise_layers(loaded, self.form)
        quantise_stacks(loaded, {name: each.layout.form for name, each in quantised.items() if each.layout.num_stacked})
        pack_layers(loaded, {name: each.layout for name, each in quantised.items() if each.layout.form == "int4"})
        if quantisation is not None:
            with ExitStack() as resources:  # the codes of the files, which are not made of what they stand for
                source = self._open_base(resources)
                for name, layer in quantised_weights(loaded).items():
                    layer.data.copy_(source.read(name, 0, layer.data.numel()))
        return load_adapted(loaded, directory)

    def loaded_bytes(self, directory: Path) -> int:
        """See Base."""
        return super().loaded_bytes(directory) + super().loaded_bytes(self.directory)

    def _open_base(self, resources: ExitStack) -> WeightSource:
        """The base model's files. The skeleton gets the buffers."""
        plain, skeleton = self._plain(), self.model.skeleton
        spec = plain_spec(base_spec(self.model.spec), plain)
        source = CheckpointSource(self.directory, plain, spec, new_rows=self.new_rows)
        resources.enter_context(source)
        install_buffers(skeleton, source.read_buffers(), name_of=base_name)
        layers = self._quantised
        return QuantisingSource(source, layers, plain, stored=source.quantised) if layers else source

    @property
    def _quantised(self) -> dict[str, QuantisedWeight]:
        """By the names that the parameters have without an adapter."""
        return {base_name(name): each for name, each in quantised_weights(self.model.skeleton).items()}

    @property
    def _trained_rows(self) -> tuple[TrainedRows, ...]:
        return trained_rows(self.model.spec, self.settings.tokens)

    def _plain(self) -> PreTrainedModel:
        """A new skeleton without the adapter."""
        spec, task = self.model.spec, self.model.task
        return build_skeleton(self.config, dtype=spec.dtype, attn_implementation=self.attention, task=task)


def adapt(
    skeleton: PreTrainedModel, config: RunConfig, task: Task, directory: Path, *, tokens: tuple[int, ...]
) -> Callable[..., AdaptedBase]:
    """Put the config's adapter into the skeleton, which is quantised first if the config says so, or the files in
    `directory` are. `tokens`: new ones, whose rows are trained. Returns what makes the base of it. Raises BadInput."""
    settings, form = replace(adapter_of(config, task), tokens=tokens), quantised_form(config)
    if form is not None:
        quantise_layers(skeleton, form, with_experts=config.quantize_moe_experts)
    elif not settings.has_magnitudes:  # DoRA takes the numbers of a matrix
        has_files = has_weights(directory)
        layouts = packed_layouts(directory, DTYPES[config.dtype]) if has_files else None
        keep_layers_packed(skeleton, layouts, trained=settings.saved_modules)
    peft_config = inject(skeleton, settings)
    if not config.quantize_moe_experts:
        keep_experts_packed(skeleton)
    return partial(AdaptedBase, settings=settings, form=form, peft_config=peft_config)
