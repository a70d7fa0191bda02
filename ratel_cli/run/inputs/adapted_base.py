"""A language model that is frozen, with an adapter that is trained: what differs from a language model alone.

`model/adapters.py` imports PEFT, and this file does, and so only where a config asks for an adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from transformers import PreTrainedModel

from ratel_cli.config.schema import RunConfig
from ratel_cli.errors import BadInput
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.adapter_settings import AdapterSettings, base_name
from ratel_cli.model.adapters import (
    AdaptedSource,
    adapted_matrices,
    adapter_config_text,
    adapter_layout,
    base_spec,
    drawn_adapter,
    inject,
    is_of_adapter,
    load_adapted,
    magnitudes_of,
    merged_spec,
    read_adapter,
)
from ratel_cli.model.card import Card
from ratel_cli.model.checkpoint import CheckpointSource, install_buffers
from ratel_cli.model.directory import ADAPTER_WEIGHTS_NAME, has_weights
from ratel_cli.model.export_layout import ExportLayout
from ratel_cli.model.import_weights import WeightSource
from ratel_cli.model.merged_weights import MergedWeights
from ratel_cli.model.quantised import QUANTISED_FORMS, dequantised
from ratel_cli.model.quantised_files import packed_layouts, quantisation_of
from ratel_cli.model.quantised_model import (
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
from ratel_cli.model.sidecars import AdapterSidecars, BaseSidecars
from ratel_cli.model.skeleton import DTYPES, build_skeleton
from ratel_cli.model.stored_weights import StoredWeights
from ratel_cli.run.files.run_directory import as_recorded_by_run
from ratel_cli.run.inputs.base import Weights
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.settings import adapter_of, quantised_form
from ratel_cli.sizes import QuantisedForm, Task
from ratel_cli.store.joined import Readable

if TYPE_CHECKING:
    from peft import LoraConfig


_IS_DEQUANTISED: Final = (
    "the adapter is added to what the quantised base stands for, which the run computes with; --base original adds it"
    " to the model from before quantisation"
)


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
        found = next(filter(is_of_adapter, outside), None)
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
        source = AdaptedSource(self._open_base(resources), drawn, magnitudes_of(adapted))
        return source, self.layout(config)

    def layout(self, config: RunConfig) -> ExportLayout:
        """See Base. The adapter alone."""
        return adapter_layout(self.model.spec, config.dtype)

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
        dequantises: bool = True,
    ) -> list[str]:
        """Write the base with the adapter added to it, as PEFT merges it, into the directory that `-o` has named. A
        base that the run quantises is what its codes stand for or, unless `dequantises`, the model from before. Returns
        notices. Raises as `export`."""
        spec = self.model.spec
        stored_names = {base_name(each.name): each.name for each in spec.parameters if not is_of_adapter(each.name)}
        adapted, plain = adapted_matrices(self.model.skeleton, spec), self._plain()
        quantised = {base_name(name): each for name, each in quantised_weights(self.model.skeleton).items()}
        of_run = {name for name, each in quantised.items() if each.layout.form in QUANTISED_FORMS and dequantises}
        for name in adapted.keys() & quantised.keys():
            adapted[name] = replace(adapted[name], is_inputs_first=is_inputs_first(plain, name))
        changed = plain_spec(merged_spec(spec, adapted.keys() | of_run), plain)
        with CheckpointSource(self.directory, plain, changed) as source:

            def base_matrix(name: str, weights: StoredWeights) -> torch.Tensor:
                if name in of_run:
                    layer = quantised[name]
                    matrix = dequantised(weights.whole(stored_names[name]), layer.layout, layer.dtype)
                    return matrix.T.contiguous() if is_inputs_first(plain, name) else matrix
                shape = plain.get_parameter(name).shape
                return source.read(name, 0, shape.numel()).to(DTYPES[config.dtype]).reshape(shape)

            notices = self.export(
                config,
                generation,
                pool,
                output_dir,
                layout=source.layout(config.dtype),
                card=card,
                overwrite=overwrite,
                option="-o",
                sidecars=super().sidecars(config),
                merged=partial(
                    MergedWeights,
                    stored_names=stored_names,
                    adapted=adapted,
                    base_matrices={
                        name: partial(base_matrix, name) for name in of_run | (adapted.keys() & quantised.keys())
                    },
                ),
                progress=progress,
            )
        return [*notices, _IS_DEQUANTISED] if of_run else notices

    def load(self, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
        """See Base. As PEFT loads it onto what transformers loads."""
        loaded, quantisation = super().load(self.directory, dtype), quantisation_of(self.directory)
        quantised = quantised_weights(self.model.skeleton)
        if not quantised:
            return load_adapted(loaded, directory)
        if quantisation is not None:
            loaded.config.quantization_config = quantisation  # it says which layers are not quantised
        if self.form is not None:
            quantise_layers(loaded, self.form)
        stacks = {base_name(name): each.layout.form for name, each in quantised.items() if each.layout.num_stacked}
        quantise_stacks(loaded, stacks)
        packed = {name: each.layout for name, each in quantised.items() if each.layout.form == "int4"}
        pack_layers(loaded, {base_name(name): layout for name, layout in packed.items()})
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
        source = CheckpointSource(self.directory, plain, plain_spec(base_spec(self.model.spec), plain))
        resources.enter_context(source)
        install_buffers(skeleton, source.read_buffers(), name_of=base_name)
        layers = {base_name(name): layer for name, layer in quantised_weights(skeleton).items()}
        if not layers:
            return source
        return QuantisingSource(source, layers, plain, stored=source.quantised)

    def _plain(self) -> PreTrainedModel:
        """A new skeleton without the adapter."""
        spec, task = self.model.spec, self.model.task
        return build_skeleton(self.config, dtype=spec.dtype, attn_implementation=self.attention, task=task)


def adapt(skeleton: PreTrainedModel, config: RunConfig, task: Task, directory: Path) -> Callable[..., AdaptedBase]:
    """Put the config's adapter into the skeleton, which is quantised first if the config says so, or the files in
    `directory` are. Returns what makes the base of it. Raises BadInput."""
    settings, form = adapter_of(config, task), quantised_form(config)
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
