"""Runs the parts of an encoder-decoder one at a time: two stacks of layers, and what is between them.

The encoder and the decoder each have an owner with layers, so each has a `LayerRunner`. Between the last layer of the
one and the first of the other the encoder's own code ends: its final norm. That is a layer of its own here, the bridge:

    begin    the embeddings of both stacks; the decoder's first hidden states wait as an argument of the bridge
    bridge   from the encoder's last hidden states to the decoder's first; it returns the encoder's states besides,
             which the decoder's layers get as if a layer below had returned them (`model/values/carried.py`)
    finish   the decoder's final norm; `logits`: the model's own head

Invariant: what the decoder's layers get depends on the encoder in its states alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.layer_runner import Inputs, LayerRunner, last_hidden_state
from ratel_cli.model.values.carried import Embedded, LayerCall, LayerOutput

_STATES, _MASK = "encoder_hidden_states", "encoder_attention_mask"
"""Names of what every decoder with cross-attention takes."""


class Bridge(nn.Module):
    """Stands for what is between the stacks, where modules are named. It has no parameters: they are the encoder's."""


class TwoStackRunner:
    """Runs both stacks as one, whose layers are those of the encoder, the bridge, and those of the decoder."""

    takes_positions = False
    gives_logits = False

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: tuple[nn.Module, Sequence[nn.Module]],
        decoder: tuple[nn.Module, Sequence[nn.Module]],
    ) -> None:
        """`encoder` and `decoder`: the owner and the layers of each."""
        self.model = model
        self.encoder = LayerRunner(encoder[0], *encoder)
        self.decoder = LayerRunner(model, *decoder, filled=self._with_states, of_head=self._of_head)
        for runner in (self.encoder, self.decoder):
            runner.takes_positions = False
        self.bridge = len(self.encoder.layers)
        """The index of the bridge among the layers."""
        self.layers = (*self.encoder.layers, Bridge(), *self.decoder.layers)

    def embed(self, inputs: Inputs) -> Embedded:
        """The first hidden states and every layer's arguments. Raises BadInput.

        `input_ids`: `[batch, tokens]`, of the encoder; `attention_mask` of the same shape, and `decoder_input_ids`:
        without them there is no padding, and the decoder gets the encoder's tokens.
        """
        input_ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        below = self.encoder.embed(_of_encoder(input_ids, mask))
        states = torch.zeros_like(below.hidden)
        of_decoder = {"input_ids": _decoder_ids(inputs), _STATES: states}
        above = self.decoder.embed(of_decoder if mask is None else {**of_decoder, _MASK: mask})
        found = {id(each) for call in above.calls for each in call.tensors}
        if id(states) not in found:
            raise BadInput(
                f"{type(self.model).__name__}: its decoder's layers do not get the encoder's states as they are; such"
                " models cannot be streamed"
            )
        bridge = LayerCall(arguments=(above.hidden, input_ids, mask), keywords={})
        return replace(
            below,
            calls=(*below.calls, bridge, *above.calls),
            extras=(*below.extras, (states,), *above.extras),
            second=above.hidden,
        )

    def run_layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        """The output of a layer, or of the bridge, and what it returns besides for later layers."""
        if index < self.bridge:
            return self.encoder.run_layer(index, hidden, call)
        if index > self.bridge:
            return self.decoder.run_layer(index - self.bridge - 1, hidden, call)
        first, input_ids, mask = call.arguments
        assert isinstance(first, torch.Tensor)
        assert isinstance(input_ids, torch.Tensor)
        finished = self.encoder.finish(hidden, _of_encoder(input_ids, mask if isinstance(mask, torch.Tensor) else None))
        return first, (last_hidden_state(finished),)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> object:
        """The decoder's output object, after its final norm, for the output of its last layer. Inputs as in `embed`."""
        return self.decoder.finish(hidden, {"input_ids": _decoder_ids(inputs)})

    def logits(self, finished: object, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own head on a part of the decoder's hidden states `[rows, tokens, hidden_size]`."""
        return self.decoder.logits(finished, hidden)

    def run_model(self, inputs: Inputs, hidden: torch.Tensor) -> tuple[Embedded, Embedded, torch.Tensor]:
        """What the stacks begin with and their layers get if the whole model is called, and the logits that it makes of
        `hidden`, the output of the decoder's last layer. Inputs as in `embed`. Raises BadInput."""
        with self.encoder.collecting() as found:
            above, logits = self.decoder.run_model(inputs, hidden)
            return found(), above, logits

    def _with_states(self, inputs: Inputs) -> Inputs:
        """What the decoder's owner gets: where no states are given, zeros of as many tokens."""
        return inputs if _STATES in inputs else {**inputs, _STATES: self._no_states(inputs["input_ids"])}

    def _no_states(self, input_ids: torch.Tensor) -> torch.Tensor:
        shape = *input_ids.shape, self.model.config.hidden_size
        return torch.zeros(shape, dtype=self.model.dtype, device=input_ids.device)

    def _of_head(self, input_ids: torch.Tensor) -> dict[str, object]:
        """What the whole model gets where its decoder's output is known: nothing of the encoder is computed."""
        states = BaseModelOutput(last_hidden_state=self._no_states(input_ids))
        return {"encoder_outputs": states, "decoder_input_ids": input_ids}


def _of_encoder(input_ids: torch.Tensor, mask: torch.Tensor | None) -> Inputs:
    return {"input_ids": input_ids} if mask is None else {"input_ids": input_ids, "attention_mask": mask}


def _decoder_ids(inputs: Inputs) -> torch.Tensor:
    return inputs.get("decoder_input_ids", inputs["input_ids"])


AnyRunner: TypeAlias = LayerRunner | TwoStackRunner
