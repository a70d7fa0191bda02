"""The rows that embedding and head of a run have beyond those of the base model's files, for tokens that it adds.

Invariant: they have the bits that `resize_token_embeddings` of transformers gives them in fp32 after
`torch.manual_seed(seed)`: its own code draws them, from the rows of the files.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ratel_cli.errors import BadInput, first_line
from ratel_cli.model.files.kind import text_config
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.sizes import NewTokensInit, Task


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """What a vocabulary has beyond the base model's. Without slots, since it remembers the shapes in the files."""

    base_config: PretrainedConfig
    """The configuration of the base model."""
    num_rows: int
    """Rows of the embedding, with the new ones."""
    init: NewTokensInit
    seed: int
    task: Task

    @property
    def config(self) -> PretrainedConfig:
        """The configuration of the model with the new rows."""
        config = copy.deepcopy(self.base_config)
        text_config(config).vocab_size = self.num_rows
        return config

    def shapes_in_files(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """The shapes that the files have of the parameters with new rows, by all their names in `model`, which has
        these rows. Raises BadInput if something else depends on the number of tokens, or nothing does, or if the
        model's code cannot make them."""
        before = self._shapes_of_base
        changed = {name: each.shape for name, each in model.state_dict().items() if each.shape != before.get(name)}
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, shape in changed.items():
            if name not in parameters or shape[0] != self.num_rows or shape[1:] != before[name][1:]:
                raise self._cannot_grow(model, f"{name} has another form with more tokens")
        if not changed:
            raise self._cannot_grow(model, "its embedding does not follow vocab_size of config.json")
        return {name: before[name] for name in changed}

    @cached_property
    def _shapes_of_base(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors of the base model, which can have the new rows. Raises BadInput."""
        base = self._base_model()
        before = {name: tuple(each.shape) for name, each in base.state_dict().items()}
        with torch.random.fork_rng(devices=[]):
            self.make_room(base)
        return before

    def draw(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The new rows in fp32, by all names of the parameters. `read`: gives a whole parameter of the files, flat.

        Memory is that of the matrices, and of what transformers computes from them. Raises BadInput if it cannot.
        """
        model = self._base_model()
        ends = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
        found = {each for module in ends for each in module.parameters(recurse=False)}
        made = dict[nn.Parameter, nn.Parameter]()  # one that is tied stays one
        for path, module in model.named_modules():
            for key, each in module.named_parameters(recurse=False):
                if each in found:
                    if each not in made:
                        values = read(f"{path}.{key}").float().reshape(each.shape)
                        made[each] = nn.Parameter(values, requires_grad=False)
                    module._parameters[key] = made[each]
        first = next(each.shape[0] for each in made if each.ndim > 1)  # rows
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.make_room(model, as_mean=self.init == "mean")
            state = {name: each for name, each in model.state_dict().items() if not each.is_meta}
            drawn = {name: each[first:].clone() for name, each in state.items() if each.shape[:1] == (self.num_rows,)}
            if self.init == "noisy_mean":
                self._add_noise(drawn, state)
        return drawn

    def make_room(self, model: PreTrainedModel, *, as_mean: bool = False) -> None:
        """Give a model of transformers the new rows, with any values; `as_mean`: those that `mean` has from here on.

        Raises BadInput if it cannot have them.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.resize_token_embeddings(self.num_rows, mean_resizing=as_mean)
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise self._cannot_grow(model, first_line(error)) from error

    def _add_noise(self, drawn: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Replace the new rows of each matrix by the mean of its old ones and noise, the same for all its names."""
        made = dict[int, torch.Tensor]()
        for name, rows in drawn.items():
            whole = state[name]
            if whole.ndim == 2 and whole.data_ptr() not in made:
                mean = whole[: len(whole) - len(rows)].mean(dim=0, keepdim=True)
                made[whole.data_ptr()] = mean + torch.empty_like(rows).normal_(0, 1 / math.sqrt(rows.shape[1]))
            drawn[name] = made.get(whole.data_ptr(), rows)

    def _base_model(self) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            return build_skeleton(self.base_config, dtype="float32", attn_implementation="eager", task=self.task)

    def _cannot_grow(self, model: PreTrainedModel, why: str) -> BadInput:
        return BadInput(
            f"{type(model).__name__} cannot have more tokens: {why}",
            "name tokens that the tokenizer has, and no pad_vocab_to_multiple_of; or add them to the model beforehand",
        )
