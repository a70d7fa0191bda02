"""A language model as a program: a decoder, an encoder that learns masked tokens, a classifier of rows, or an encoder
and a decoder.

Invariant: a micro-batch is made of tokens, and a step is counted in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ratel_cli.data.samples.comparison import Comparison
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.binding import PlacedParameter
from ratel_cli.model.cut.cut_model import CutModel, checked_sum
from ratel_cli.model.cut.embedding_noise import EmbeddingNoise
from ratel_cli.model.cut.layer_runner import TokenLoss, last_hidden_state, loss_sum
from ratel_cli.model.cut.preferences import PreferenceLoss
from ratel_cli.model.cut.row_lengths import row_multiple
from ratel_cli.model.cut.trials import Trial
from ratel_cli.model.cut.two_stacks import AnyRunner
from ratel_cli.model.values.carried import Embedded
from ratel_cli.model.values.finished import ComparedLoss
from ratel_cli.model.values.row_lookup import RowLookup
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.sizes import IGNORED_TARGET, Task

_TOKENS_OF_TRIAL = 4


@dataclass(frozen=True, slots=True)
class FinishedComparison:
    """Rows of one micro-batch that are compared, by the log-probabilities of their targets."""

    layer_runner: AnyRunner
    result: object
    """What the owner returned."""
    targets: torch.Tensor
    """`[rows, tokens]`."""
    comparison: Comparison
    loss: PreferenceLoss

    @property
    def num_compared(self) -> int:
        """Pairs or answers."""
        return self.comparison.num_compared

    def token_values(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The log-probabilities of the targets from `first` on, fp32 `[tokens]`; 0 where there is no target."""
        logits = self.layer_runner.logits(self.result, hidden)
        targets = self.targets.reshape(-1)[first : first + hidden.shape[1]]
        return -cross_entropy(logits[0].float(), targets, ignore_index=IGNORED_TARGET, reduction="none")

    def loss_of(self, values: torch.Tensor) -> ComparedLoss:
        """The loss of the micro-batch. `values`: of all tokens, row by row."""
        has_target = self.targets != IGNORED_TARGET
        return self.loss.of(values.view_as(self.targets), has_target, self.comparison)


@dataclass(frozen=True, slots=True)
class FinishedTokens:
    """Hidden states of one micro-batch behind the final norm, for the head and the loss."""

    layer_runner: AnyRunner
    result: object
    """What the owner returned."""
    targets: torch.Tensor
    """`[batch, tokens]`."""
    loss: TokenLoss
    compared: FinishedComparison | None = None
    """How rows are compared; None: they are not."""

    @property
    def hidden(self) -> torch.Tensor:
        """`[batch, tokens, hidden_size]`."""
        return last_hidden_state(self.result)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, tokens, vocabulary]` of a part of `hidden`, `[rows, tokens, hidden_size]`."""
        return self.layer_runner.logits(self.result, hidden)

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the losses of the tokens from `first` on, counted row by row, whose hidden states are
        `[1, tokens, hidden_size]`; an fp32 scalar."""
        return self.loss(self.outputs(hidden), self.targets.reshape(-1)[first : first + hidden.shape[1]])

    def num_right(self, hidden: torch.Tensor, first: int) -> None:  # noqa: ARG002
        """Not counted."""
        return


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Logits of one micro-batch's rows, for the loss."""

    hidden: torch.Tensor
    """`[1, batch, classes]`."""
    targets: torch.Tensor
    """The class of each row, `[batch]`."""
    loss: TokenLoss
    compared: None = None

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of some rows, `[rows, classes]`."""
        return hidden[0]

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the losses of the rows from `first` on, whose logits are `[1, rows, classes]`; an fp32 scalar."""
        return self.loss(hidden, self.targets[first : first + hidden.shape[1]])

    def num_right(self, hidden: torch.Tensor, first: int) -> int:
        """Rows from `first` on whose class has the largest logit."""
        return int((hidden[0].argmax(dim=-1) == self.targets[first : first + hidden.shape[1]]).sum())


class DecoderModel(CutModel[MicroBatch]):
    """A skeleton whose blocks are known. Bind those of one segment at a time."""

    def __init__(
        self,
        *,
        skeleton: PreTrainedModel,
        layer_runner: AnyRunner,
        spec: ModelSpec,
        traits: LayerTraits,
        task: Task,
        masks_separate: bool,
        parameters: Sequence[tuple[PlacedParameter, ...]],
        has_other_parts: bool,
        lookup: RowLookup,
    ) -> None:
        super().__init__(skeleton, layer_runner, spec, traits, parameters, lookup)
        self.skeleton = skeleton
        self.has_other_parts = has_other_parts
        """Whether the skeleton has parameters that text does not use, such as a vision tower's. They are not trained,
        and no block has them."""
        self.task = task
        self.loss: TokenLoss = loss_sum
        """Loss of tokens that are finished: their cross-entropy, unless a loop of the caller's own has another one."""
        self.preference: PreferenceLoss | None = None
        """The loss of micro-batches whose rows are compared, if the model is to learn from such."""
        self._noise: EmbeddingNoise | None = None
        self._masks_separate = masks_separate

    @property
    def num_outputs(self) -> int:
        """Classes of a classifier, tokens of other models."""
        return len(self.skeleton.config.id2label or ()) if self.task == "classification" else self.spec.vocab_size

    def decoder_ids(self, labels: torch.Tensor) -> torch.Tensor:
        """What the decoder of an encoder-decoder gets where it has to predict `labels`, both `[batch, target tokens]`:
        the same, moved on by one, by the model's own code. Without such code the token comes first that the model's
        config names, and padding takes the place of -100."""
        make = getattr(self.skeleton, "prepare_decoder_input_ids_from_labels", None)
        if make is not None:
            made: torch.Tensor = make(labels=labels)
            return made
        config = self.skeleton.config
        moved = labels.roll(1, dims=1)
        moved[:, 0] = config.decoder_start_token_id
        return moved.masked_fill(moved == IGNORED_TARGET, config.pad_token_id)

    @cached_property
    def packs(self) -> bool:
        """Whether samples that are packed into one sequence stay apart. Found by numbers when it is first asked, which
        takes seconds for a large model; then the model must be on the CPU, with no block bound."""
        if not self._masks_separate:
            return False
        return self._trial.samples_stay_apart()

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether a token's result depends on tokens behind it. As `packs`, found when asked."""
        return self._trial.looks_ahead()

    @cached_property
    def row_multiple(self) -> int:
        """The number that must divide the tokens of a row; 1 for nearly all models. As `packs`, found when asked."""
        trial = self._trial
        return row_multiple(trial.layer_runner, trial.outside, trial.layers, num_positions=trial.num_positions)

    @property
    def _trial(self) -> Trial:
        assert self._device.type == "cpu"
        before, *layers, after = (
            [each for block in segment.bound for each in self._parameters[block.index]]
            for segment in self.spec.segments
        )
        number = getattr(self.skeleton.config.get_text_config(), "max_position_embeddings", None)
        return Trial(
            layer_runner=self.layer_runner,
            outside=tuple({each.name: each for each in (*before, *after)}.values()),
            layers=layers,
            vocab_size=self.spec.vocab_size,
            num_positions=number if isinstance(number, int) else None,
        )

    def sample(self, num_tokens: int) -> MicroBatch:
        """A micro-batch of one row, all of token 0, every one of them a target: of two samples where rows may have
        several, else with a padded token, without which there would be no masks."""
        first = num_tokens // 2 if self.task == "causal_lm" else num_tokens
        positions = torch.cat([torch.arange(first), torch.arange(num_tokens - first)]).unsqueeze(0)
        tokens = torch.zeros_like(positions)
        batch = replace(MicroBatch.of_tokens(tokens, positions), targets=tokens, num_targets=num_tokens)
        if self.task == "causal_lm":
            return batch
        mask = torch.ones_like(tokens)
        mask[:, max(1, num_tokens - 1) :] = 0
        return replace(batch, mask=mask, decoder_ids=tokens if self.task == "seq2seq" else None)

    def any_batch(self, size: int, num_tokens: int, *, num_samples: int = 1) -> MicroBatch:
        """A micro-batch `[size, num_tokens]` of random tokens; every position has a target, which every head knows. For
        two stacks, these are the tokens of both."""
        shape, is_pair = (size, num_tokens), self.task == "seq2seq"
        tokens = torch.randint(0, self.spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        comparison = None
        if self.preference is not None and size % 2 == 0:
            comparison = Comparison(
                is_answer=torch.ones(shape, dtype=torch.bool),
                reference=torch.zeros(size),
                is_good=torch.ones(size // 2, dtype=torch.bool),
                num_good=size // 2,
            )
        parts = torch.arange(num_tokens).tensor_split(num_samples)
        positions = torch.cat([torch.arange(len(part)) for part in parts]).expand(shape).contiguous()
        return replace(
            MicroBatch.of_tokens(tokens, positions),
            targets=torch.zeros_like(tokens),
            is_pair=is_pair,
            decoder_ids=tokens if is_pair else None,
            num_targets=tokens.numel() if comparison is None else 1,
            comparison=comparison,
        )

    @contextmanager
    def losing(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
        """A context in which this is the loss of some tokens, from logits `[tokens, vocabulary]` and targets
        `[tokens]`. Raises BadInput there if it is no sum."""
        if loss is None:
            yield
            return

        def of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return checked_sum(loss(logits[0], targets), "tokens that it is given")

        before, self.loss = self.loss, of_tokens
        try:
            yield
        finally:
            self.loss = before

    def looked_up(self, batch: MicroBatch) -> torch.Tensor:
        """The tokens `[batch, tokens]` that the embedding looks up."""
        return self._filled(batch).looked_up

    def add_noise(self, alpha: float) -> None:
        """From now on, train with noise on the embedding. No block may be bound. Raises BadInput if the model's code
        does not take the embedding of tokens from its one embedding."""
        noise, was_training = EmbeddingNoise(self.skeleton, alpha), self.train(True)
        self._noise = noise
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                self.begin(self.sample(_TOKENS_OF_TRIAL))
        finally:
            self.train(was_training)
        if noise.num_added != 1:
            raise BadInput(
                f"neftune_noise_alpha: {self.spec.architecture} does not look its tokens up once, in one embedding, "
                "so there is no place for the noise",
                "remove it",
            )

    def begin(self, batch: MicroBatch) -> Embedded:
        """The first hidden states and every layer's arguments. Raises BadInput."""
        with nullcontext() if self._noise is None else self._noise.on():
            return self.layer_runner.embed(self._filled(batch).inputs)

    def finish(self, hidden: torch.Tensor, batch: MicroBatch) -> FinishedTokens | FinishedRows:
        """The last layer's output `[batch, tokens, hidden_size]` behind the final norm, or the logits of rows. Raises
        BadInput."""
        finished = self.layer_runner.finish(hidden, self._filled(batch).inputs)
        if self.layer_runner.gives_logits:
            return FinishedRows(last_hidden_state(finished).unsqueeze(0), batch.targets[:, 0], self.loss)
        compared = None
        if batch.comparison is not None:
            assert self.preference is not None
            compared = FinishedComparison(self.layer_runner, finished, batch.targets, batch.comparison, self.preference)
        return FinishedTokens(self.layer_runner, finished, batch.targets, self.loss, compared)

    def _filled(self, batch: MicroBatch) -> MicroBatch:
        """The batch with what a decoder gets beside an encoder, if it does not say that itself."""
        if self.task != "seq2seq" or batch.decoder_ids is not None:
            return batch
        return replace(batch, decoder_ids=self.decoder_ids(batch.targets))
