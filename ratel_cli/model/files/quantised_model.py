"""A model whose linear layers are quantised, and where their bytes come from.

Which layers: those that transformers quantises with bitsandbytes, so all linear layers but the head, those with tied
weights, and those that the model keeps in fp32. GPT-2's layers, whose matrices are `[inputs, outputs]`, become linear
layers with the matrix transposed. Stacks of experts are no layers; they are quantised if that is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ratel_cli.errors import BadInput
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.in_place import FileRanges, located_in
from ratel_cli.model.files.quantised import QuantisedLayout, dequantised, quantise, quantise_from
from ratel_cli.model.files.quantised_formats import method_of
from ratel_cli.model.files.quantised_modules import Quantised, QuantisedLinear, quantise_experts
from ratel_cli.model.files.renaming import plan_renaming
from ratel_cli.model.values.finite import rounded
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import QuantisedForm, StoredForm

_STACK_DIMENSIONS = 3
_FORMS_OF_FILES: Mapping[StoredForm, str] = {"mxfp4": "MXFP4", "int4": "config.json says"}
"""Forms that only files have: nothing is quantised to them here."""
_SCALES: Mapping[StoredForm, torch.dtype] = {"int4": torch.float16}
"""The dtype of scales, and of their products with codes, where it is not the model's."""
_READ_ELEMENTS = 1 << 23
"""A matrix is read in parts of this many elements."""


def quantise_layers(model: PreTrainedModel, form: QuantisedForm, *, with_experts: bool = False) -> None:
    """Let quantised layers take the place of the model's linear layers, with their weights if these are not on the
    meta device. `with_experts`: its stacks of experts' matrices are quantised, too. Raises BadInput if it has none
    that can be quantised."""
    if with_experts:
        stacks = list(_stacks(model))
        if not stacks:
            name = type(model).__name__
            raise BadInput(f"{name} has no stacks of experts that could be quantised", "remove quantize_moe_experts")
        for module, names in stacks:
            quantise_experts(module, names, form)
    chosen = dict(_quantised_layers(model))
    if not chosen:
        raise BadInput(
            f"{type(model).__name__} has no linear layers that could be quantised",
            f"remove {'load_in_8bit' if form == 'int8' else 'load_in_4bit'}",
        )
    made = dict[nn.Module, QuantisedLinear]()
    for name, layer in chosen.items():
        if layer not in made:
            made[layer] = _quantised(layer, form)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made[layer])


def keep_experts_packed(model: PreTrainedModel) -> None:
    """Let stacks of experts that the files have in MXFP4 stay so, if they are not trained and no module of theirs has
    an adapter."""
    if method_of(_settings_of(model)) == "mxfp4":
        for module, names in list(_stacks(model)):
            frozen = [name for name in names if not module.get_parameter(name).requires_grad]
            if frozen:
                quantise_experts(module, frozen, "mxfp4")


def keep_layers_packed(
    model: PreTrainedModel, layouts: Mapping[str, QuantisedLayout] | None, *, trained: Sequence[str] = ()
) -> None:
    """Let linear layers stay as GPTQ and AWQ have them in the files, all but the head. `layouts`: of weights in the
    files, by their names there; None: the files are not here, and config.json says how they are. `trained`: ends of
    the names of modules that are trained whole, and so not packed."""
    if layouts is None:
        found = dict(_configured_layouts(model))
    else:
        targets = plan_renaming(model, layouts).direct
        found = {target: layouts[name] for target, name in targets.items() if target.endswith(".weight")}
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    whole = [each for name, each in modules.items() if name.endswith(tuple(trained))] if trained else []
    left_out = {inner for each in (head, *whole) if each is not None for inner in each.modules()}

    def is_chosen(target: str) -> bool:
        module = modules.get(target.removesuffix(".weight"))
        if type(module) is not nn.Linear or module in left_out:
            return False
        return module.weight.shape == found[target].shape  # else the files do not fit, which is said elsewhere

    pack_layers(model, {target: found[target] for target in found if is_chosen(target)})


def pack_layers(model: nn.Module, layouts: Mapping[str, QuantisedLayout]) -> None:
    """Let these linear layers, by the names of their weights, be quantised so. The weights are zeros, if they are not
    on the meta device."""
    for name, layout in layouts.items():
        path = name.removesuffix(".weight")
        plain = model.get_submodule(path)
        assert isinstance(plain, nn.Linear) and plain.weight.shape == layout.shape, name
        made = QuantisedLinear(layout, plain.bias, plain.weight.dtype)
        if not plain.weight.is_meta:
            made.weight = nn.Parameter(torch.zeros(layout.num_bytes, dtype=torch.uint8), requires_grad=False)
        owner, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, made.train(plain.training))


def _configured_layouts(model: PreTrainedModel) -> Iterator[tuple[str, QuantisedLayout]]:
    """What config.json says of the weights of linear layers."""
    settings = _settings_of(model)
    method, bits, size = method_of(settings), settings.get("bits", 4), settings.get("group_size", -1)
    if method not in ("gptq", "awq") or bits != 4 or not isinstance(size, int):
        return
    left_out = settings.get("modules_to_not_convert")
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, left_out if isinstance(left_out, list) else None):
            rows, columns = module.weight.shape
            group = size if size > 0 else columns
            if columns % group == 0:
                number = columns // group
                layout = QuantisedLayout("int4", rows, columns, num_groups=number, has_order=method == "gptq")
                yield f"{name}.weight", layout


def packed_names(model: nn.Module) -> list[str]:
    """The names of weights that are as the files have them: stacks of experts in MXFP4, layers of GPTQ and AWQ."""
    return [name for name, each in quantised_weights(model).items() if each.layout.form in _FORMS_OF_FILES]


def quantise_stacks(model: nn.Module, forms: Mapping[str, StoredForm]) -> None:
    """Quantise these stacks of a model, each in its form, by the names of their parameters. In MXFP4 they are zeros at
    first."""
    by_module = defaultdict[tuple[str, StoredForm], list[str]](list)
    for name, form in forms.items():
        path, _, attribute = name.rpartition(".")
        by_module[path, form].append(attribute)
    for (path, form), attributes in by_module.items():
        quantise_experts(model.get_submodule(path), attributes, form)


def plain_spec(spec: ModelSpec, plain: nn.Module) -> ModelSpec:
    """The model with the parameters that it has when nothing is quantised: `plain`, without weights."""
    blocks = []
    for block in spec.blocks:
        parameters = tuple(
            each
            if each.quantised_shape is None
            else replace(each, shape=tuple(plain.get_parameter(each.name).shape), quantised_shape=None)
            for each in block.parameters
        )
        dtype = spec.dtype if block.dtype == "uint8" else block.dtype
        blocks.append(replace(block, parameters=parameters, dtype=dtype))
    return replace(spec, blocks=tuple(blocks))


class QuantisedWeight(NamedTuple):
    """A quantised parameter in its module."""

    module: Quantised
    attribute: str

    @property
    def layout(self) -> QuantisedLayout:
        """Where its parts lie."""
        return self.module.layouts[self.attribute]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the module computes in."""
        return self.module.dtype

    @property
    def data(self) -> torch.Tensor:
        """Its bytes."""
        return self.module.get_parameter(self.attribute)


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """The quantised parameters of a model, by name."""
    return {
        f"{name}.{attribute}": QuantisedWeight(each, attribute)
        for name, each in model.named_modules()
        if isinstance(each, Quantised)
        for attribute in each.layouts
    }


def is_inputs_first(plain: nn.Module, name: str) -> bool:
    """Whether the matrix of this name is `[inputs, outputs]` when it is not quantised."""
    return isinstance(plain.get_submodule(name.rpartition(".")[0]), Conv1D)


class QuantisingSource:
    """The weights of a model whose matrices are quantised, from those of the model before.

    Files that have the same codes already are taken as they are. Memory is the bytes of one matrix, which are kept for
    the last one, and the values of one that is transposed, or where something of it is float16, of one of a stack.
    """

    def __init__(
        self,
        base: WeightSource,
        layers: Mapping[str, QuantisedWeight],
        plain: nn.Module,
        *,
        stored: Callable[[str, QuantisedLayout], torch.Tensor | None] = lambda *_: None,
    ) -> None:
        """`layers`: by the names of their weights in `plain`, which has the shapes of `base`. `stored`: the bytes of a
        matrix that the files have in a layout already."""
        self._base, self._layers, self._plain, self._stored = base, layers, plain, stored
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource. Of a quantised parameter, its bytes."""
        if name not in self._layers:
            return self._base.read(name, start, stop)
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._quantised(name)
        return self._last[1][start:stop].float()

    def located(self, name: str) -> FileRanges | None:
        """See LocatedSource."""
        return None if name in self._layers else located_in(self._base, name)

    def _quantised(self, name: str) -> torch.Tensor:
        """The bytes. Raises BadInput if a number that they stand for, or are made of, is not finite."""
        layer, data = self._layers[name], self._bytes(name)
        if torch.float16 in (layer.dtype, _SCALES.get(layer.layout.form)):
            for part, layout in layer.layout.matrices(data):
                rounded(name, dequantised(part, layout, layer.dtype), layer.dtype)
        return data

    def _bytes(self, name: str) -> torch.Tensor:
        layer, shape = self._layers[name], self._plain.get_parameter(name).shape
        is_transposed = is_inputs_first(self._plain, name)
        if not is_transposed:
            stored = self._stored(name, layer.layout)
            if stored is not None:
                return stored
            if layer.layout.form in _FORMS_OF_FILES:
                form = _FORMS_OF_FILES[layer.layout.form]
                raise BadInput(f"{name} is not quantised in the files as {form}", "use the model before quantisation")
            return quantise_from(partial(self._read_finite, name), layer.layout)
        matrix = torch.empty(shape, dtype=layer.dtype)
        flat = matrix.view(-1)
        for start in range(0, len(flat), _READ_ELEMENTS):
            stop = min(start + _READ_ELEMENTS, len(flat))
            flat[start:stop] = self._read_finite(name, start, stop)
        transposed = matrix.T.reshape(-1)
        return quantise_from(lambda start, stop: transposed[start:stop], layer.layout)

    def _read_finite(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements of a matrix in the dtype that it is quantised from."""
        layer, values = self._layers[name], self._base.read(name, start, stop)
        if layer.layout.form == "int8":
            rounded(name, values, torch.float16, hint="use load_in_4bit: load_in_8bit takes matrices in float16")
        return rounded(name, values, layer.dtype)


def _settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """What config.json says of files that are quantised."""
    settings = getattr(model.config, "quantization_config", None) or {}
    return settings if isinstance(settings, dict) else cast(dict[str, Any], settings.to_dict())


def _stacks(model: PreTrainedModel) -> Iterator[tuple[nn.Module, list[str]]]:
    """The modules with stacks of experts that have no adapter, and the names of the stacks. Such a module, or its
    class, is called after experts."""
    for path, module in model.named_modules():
        names = [name for name, each in module.named_parameters(recurse=False) if each.ndim == _STACK_DIMENSIONS]
        is_of_experts = "expert" in path.lower() or "expert" in type(module).__name__.lower()
        if names and is_of_experts and "base_layer" not in path:
            yield module, names


def _quantised_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear | Conv1D]]:
    """The layers to quantise, by all their names."""
    named = _settings_of(model).get("llm_int8_skip_modules")  # of files that are quantised already
    left_out = [*(get_keys_to_not_convert(model) if named is None else named), *(model._keep_in_fp32_modules or ())]
    for name, module in model.named_modules(remove_duplicate=False):
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if is_linear and should_convert_module(name, left_out):
            yield name, module


def _quantised(layer: nn.Linear | Conv1D, form: QuantisedForm) -> QuantisedLinear:
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    made = QuantisedLinear(QuantisedLayout.of(form, weight.shape), layer.bias, weight.dtype)
    if not weight.is_meta:
        made.weight = nn.Parameter(quantise(weight.detach().contiguous(), form), requires_grad=False)
    return made.train(layer.training)
