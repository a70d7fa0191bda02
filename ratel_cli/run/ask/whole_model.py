"""A model that computes as a whole, by its own forward, with the weights of one block in memory at a time.

`engine/steps/forward.py` takes many micro-batches through one block after another. Here the model's own code goes from
block to block, and each block is bound while its code runs. So whatever transformers builds on a forward pass works
unchanged, such as `generate` with its cache of keys and values.

Invariant: the operations are those of the model in memory, in the same order, on the same shapes. So the bits are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from transformers import PreTrainedModel

from ratel_cli.engine.reading.block_reader import BlockReader
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.layer_runner import LayerRunner
from ratel_cli.schedule.uses import forward_uses


@contextmanager
def computing_whole(
    model: DecoderModel, reader: BlockReader, *, after_pass: Callable[[], None] = lambda: None
) -> Iterator[PreTrainedModel]:
    """A context in which the skeleton computes as if all its weights were in memory, with dropout off.

    `after_pass` is called after each forward pass. What the reader raises ends the pass.
    """
    assert isinstance(model.layer_runner, LayerRunner)
    skeleton, blocks = model.skeleton, _OpenBlocks(model, reader, after_pass)
    was_training = skeleton.training
    with ExitStack() as context:
        context.callback(reader.end_pass)
        context.callback(skeleton.train, was_training)
        context.callback(blocks.close)
        context.callback(skeleton.register_forward_pre_hook(blocks.begin).remove)
        context.callback(skeleton.register_forward_hook(blocks.end).remove)
        context.enter_context(model.layer_runner.running_whole(blocks.layer))
        skeleton.eval()
        yield skeleton


class _OpenBlocks:
    """The blocks that are bound during a pass: the embedding, then each layer, then the head."""

    def __init__(self, model: DecoderModel, reader: BlockReader, after_pass: Callable[[], None]) -> None:
        self._model = model
        self._reader = reader
        self._after_pass = after_pass
        self._outside = ExitStack()
        """What is bound outside the layers."""

    def begin(self, _: nn.Module, _arguments: object) -> None:
        """Torch's hook before the model's forward."""
        self.close()
        self._reader.expect(forward_uses(self._model.spec.segments))
        self._outside.enter_context(self._reader.open(self._model.spec.embedding))

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """A context in which a layer runs."""
        self.close()
        spec = self._model.spec
        with self._reader.open(spec.layers[index]):
            yield
        if index == spec.num_layers - 1:
            self._outside.enter_context(self._reader.open(spec.head))

    def end(self, _: nn.Module, _arguments: object, _output: object) -> None:
        """Torch's hook after the model's forward."""
        self.close()
        self._after_pass()

    def close(self) -> None:
        """Release what is bound outside the layers. Idempotent."""
        self._outside.close()
