"""Random weights from the initialisers of the model's own code (`random_init: true`).

Memory is one module's parameters. Invariant: a parameter's bits depend only on the seed, the configuration and the
module's name, not on the order of reads or on how parameters are grouped into blocks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from ratel_cli.errors import BadInput, first_line
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.sizes import Task


class DrawnWeights(ABC):
    """Weights in fp32, drawn by initialisers, one module at a time."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """`model`: has the parameters' names and shapes."""
        self._model, self._seed = model, seed
        self._module_name: str | None = None
        self._parameters: dict[str, torch.Tensor] = {}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened parameter: shape `[stop - start]`, fp32.

        Raises BadInput if the model's code does not initialise the parameter.
        """
        module_name, _, attribute = name.rpartition(".")
        if module_name != self._module_name:
            # Drop the last module's weights before the next module's are made.
            self._module_name, self._parameters = None, {}
            self._parameters = self._initialise(module_name)
            self._module_name = module_name
        return self._parameters[attribute].reshape(-1)[start:stop]

    def _initialise(self, module_name: str) -> dict[str, torch.Tensor]:
        """Give one module real parameters, run the initialiser on them, and put the meta parameters back."""
        module = self._model.get_submodule(module_name)
        resting = dict(module._parameters)
        drawn: dict[str, torch.Tensor] = {}
        for attribute, parameter in resting.items():
            if parameter is not None:
                # NaN shows whether the initialiser leaves a parameter out.
                drawn[attribute] = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
                module._parameters[attribute] = nn.Parameter(drawn[attribute], requires_grad=False)
        seed = hashlib.sha256(f"{self._seed}:{module_name}".encode()).digest()[:8]
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(seed, "little") >> 1)
                self._run_initialisers(module_name)
        except Exception as error:
            raise BadInput(
                f"random_init: {type(self._model).__name__} cannot initialise {module_name}: {first_line(error)}",
                "check the values in the model's config.json, or start from a checkpoint: remove random_init",
            ) from error
        finally:
            module._parameters.update(resting)
        for attribute, values in drawn.items():
            if values.isnan().any():
                raise BadInput(
                    f"random_init: {type(self._model).__name__} does not initialise {module_name}.{attribute}",
                    "start from a checkpoint instead: remove random_init",
                )
        return drawn

    @abstractmethod
    def _run_initialisers(self, module_name: str) -> None:
        """Draw the parameters of one module, the only real ones."""


class SelfDrawn(DrawnWeights):
    """Weights drawn by PyTorch's initialiser of each module. The model's parameters may be bound or not."""

    def _run_initialisers(self, module_name: str) -> None:
        self._model.get_submodule(module_name).reset_parameters()  # type: ignore[operator]


class RandomSource(DrawnWeights):
    """Weights drawn by the initialiser of a model of transformers.

    It has a skeleton of its own, because the run's skeleton may already hold placeholders.
    """

    def __init__(self, skeleton: PreTrainedModel, seed: int, task: Task = "causal_lm") -> None:
        with torch.random.fork_rng(devices=[]):
            own = build_skeleton(skeleton.config, dtype="float32", attn_implementation="eager", task=task)
        super().__init__(own, seed)

    def _run_initialisers(self, module_name: str) -> None:
        """Initialise the module, then its ancestors, since some set weights of their children again.

        All other modules are on meta, where drawing takes no time and no numbers from the generator.
        """
        parts = module_name.split(".") if module_name else []
        path = [self._model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
        for depth in range(len(path) - 1, -1, -1):
            owner = next(module for module in reversed(path[: depth + 1]) if isinstance(module, PreTrainedModel))
            with initialization.guard_torch_init_functions():
                owner._init_weights(path[depth])
