"""One layer of a model on the device that computes, run in each way in which Ratel runs it.

    forward     the layer's own code, which saves activations; backward follows it
    watched     a forward that repeats a recorded one and saves nothing
    replayed    the forward that backward runs again, which saves what it needs; backward follows it

Weights and hidden states are random. The whole model has this one layer and few words, so that nothing else takes
memory. Invariant: calls are those of the engine, with the arguments that the model's own code gives the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ratel_cli.engine.replay.repeating import Repeater, Template, template_of
from ratel_cli.engine.replay.tape import Recorder, Replayer, Tape
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapters import inject
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.model.values.carried import LayerCall
from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import Workload
from scripts.bench.ceilings import bound
from scripts.bench.contestants import config_of, position_ids

_NUM_WORDS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """A layer and what it computes on."""

    shape: str
    rows: int
    row_tokens: int
    samples: int = 1
    """Samples in each row."""
    lora: int = 0
    """The rank of an adapter on all of its linear layers, which is trained instead of them."""

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def __str__(self) -> str:
        packed = f", {self.samples} samples a row" if self.samples > 1 else ""
        adapted = f", LoRA {self.lora}" if self.lora else ""
        return f"{self.shape} {self.rows}x{self.row_tokens}{packed}{adapted}"


class OneLayer:
    """A layer with its inputs, on a device."""

    def __init__(
        self,
        case: LayerCase,
        model: DecoderModel,
        hidden: torch.Tensor,
        call: LayerCall,
        parameters: tuple[torch.Tensor, ...],
        traits: LayerTraits,
    ) -> None:
        self.case, self.model = case, model
        self.traits = traits
        """What a plan takes the layer's activations for."""
        self.hidden, self.call = hidden, call
        self._parameters = parameters
        self._inputs = (hidden, *(each for each in parameters if each.requires_grad))
        self._gradient = torch.ones_like(hidden)
        self._template: Template | None = None
        self._is_recorded_anew = False
        """Whether it may decide by values, as attention without its own kernel does: each unit is recorded then."""
        self._compute: Callable[[], object] = lambda: model.layer_runner.run_layer(0, hidden, call)

    @property
    def flops(self) -> int:
        """Of a forward, as a plan counts them."""
        workload = Workload(micro_batch_size=self.case.rows, num_micro_batches=1, sequence_len=self.case.row_tokens)
        profile = analytic_profile(self.model.spec, workload, traits=self.traits)
        return profile.profiles[profile.layers[0]].flops_forward

    def compiled(self, backend: str) -> Callable[[], torch.Tensor]:
        """The layer's own forward, compiled."""
        layer = self.model.layer_runner.layers[0]
        own = type(layer).forward

        def forward(hidden: torch.Tensor) -> object:
            return own(layer, hidden, *self.call.arguments, **self.call.keywords)

        compiled = torch.compile(forward, backend=backend, dynamic=False)
        return lambda: _first(compiled(self.hidden))

    def forward(self) -> torch.Tensor:
        """The output, with its graph."""
        return _first(self._compute())

    def backward(self, output: torch.Tensor) -> None:
        """The gradients of weights and input."""
        with torch.autograd.set_multithreading_enabled(False):  # as the engine does
            torch.autograd.grad(output, self._inputs, self._gradient)

    def step(self) -> None:
        """Forward and backward, with all activations saved."""
        self.backward(self.forward())

    def watched(self) -> Tape:
        """A forward that saves nothing; its tape."""
        if self._template is None and not self._is_recorded_anew:
            recorder = Recorder(self._parameters)
            with recorder.recording():
                self._compute()
            tape = recorder.finish()[0]
            self._template = template_of(recorder, tape)
            self._is_recorded_anew = self._template is None
            return tape
        watcher: Recorder | Repeater
        watcher = Recorder(self._parameters) if self._template is None else Repeater(self._template)
        with watcher.recording():
            self._compute()
        return watcher.finish()[0]

    def replayed(self, tape: Tape) -> torch.Tensor:
        """The output of the forward that the tape has noted, with its graph."""
        with Replayer(tape) as replayer:
            output = self.forward()
        replayer.check_complete()
        return output

    def recomputed_step(self) -> None:
        """A watched forward; then it is replayed, and backward follows."""
        self.backward(self.replayed(self.watched()))


def _first(output: object) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(first, torch.Tensor)
    return first


@contextmanager
def one_layer(
    case: LayerCase,
    device: torch.device,
    *,
    change: Callable[[DecoderModel], object] = lambda model: None,
) -> Iterator[OneLayer]:
    """A layer of random weights. `change`: is called with the model before anything is computed on the device."""
    config = config_of(case.shape, row_tokens=case.row_tokens, layers=1, words=_NUM_WORDS)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation="sdpa")
    if case.lora:
        inject(skeleton, AdapterSettings(rank=case.lora, alpha=2 * case.lora))
    model = find_blocks(skeleton, name="layer")
    traits = measured_traits(model)
    model.move_to(device)
    change(model)
    ids = torch.randint(_NUM_WORDS, (case.rows, case.row_tokens), device=device)
    positions = position_ids(case.rows, case.row_tokens, case.samples).to(device)
    with torch.no_grad(), bound(model, 0, device):
        embedded = model.layer_runner.embed({"input_ids": ids, "position_ids": positions})
    hidden = embedded.hidden.detach().requires_grad_()
    with bound(model, 1, device) as parameters:
        yield OneLayer(case, model, hidden, embedded.calls[0], parameters, traits)
