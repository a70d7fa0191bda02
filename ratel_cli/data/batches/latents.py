"""Latents with classes as the micro-batches of any step, with the noise that a denoiser learns to see.

The latents of a step are read when it comes: no more of them are in memory.

Invariant: a step's samples, noise and timesteps are a pure function of the files, the settings and the step's number,
however the step is split into micro-batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from ratel_cli.data.batches.dataset import TrainingData, split_samples
from ratel_cli.data.batches.latent_files import LatentFiles
from ratel_cli.data.samples.packing import Integers, random_order
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput, excerpt, first_line
from ratel_cli.json_fields import hash_of

_ORDER_OF_EPOCHS = 2
"""The second part of each random order's key, as in `data/batches/dataset.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSettings:
    """What decides, together with the files, what each step gets."""

    micro_batch_size: int
    """Samples of a micro-batch."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""
    shuffle: bool
    """Each epoch has its own random order."""
    seed: int
    val_set_size: float
    """Samples held out for evaluation: a share of them if it is below 1, else their number."""
    sample_tokens: int
    """Tokens of one latent in the model."""
    dtype: torch.dtype
    """Dtype of the noisy latents that the model gets."""


class NoisyLatents:
    """All latents of a run, split, with noise by the step. `open_latents` opens their files."""

    rejected = 0
    is_packed = False
    loss_share = None
    """Every sample has loss."""
    filling = None
    """There is no padding."""

    def __init__(
        self,
        files: LatentFiles,
        settings: LatentSettings,
        scheduler: Any,  # noqa: ANN401 (diffusers has no types)
        *,
        eval_files: LatentFiles | None = None,
    ) -> None:
        """`scheduler`: of diffusers, adds noise. `eval_files`: for evaluation; None: held-out samples.

        Raises BadInput if `val_set_size` leaves nothing to train on.
        """
        self._files, self._settings, self._scheduler = files, settings, scheduler
        train_ids, eval_ids = split_samples(len(files), settings.val_set_size, settings.seed)
        self._eval_files = files if eval_files is None else eval_files
        self._train_ids = train_ids
        self._eval_ids = eval_ids if eval_files is None else np.arange(len(eval_files))
        self.num_samples = len(train_ids)
        """Samples of one epoch."""
        self.num_eval_samples = len(self._eval_ids)
        self.num_tokens = len(train_ids) * settings.sample_tokens
        """Tokens of one epoch."""
        self._samples_per_step = settings.micro_batch_size * settings.gradient_accumulation_steps
        self.steps_per_epoch = -(-len(train_ids) // self._samples_per_step)

    @property
    def fingerprint(self) -> str:
        """A hash of all latents and labels, and of every setting that decides their order and their noise."""
        settings = {**asdict(self._settings), "dtype": str(self._settings.dtype)}
        settings["samples"] = settings.pop("micro_batch_size") * settings.pop("gradient_accumulation_steps")
        scheduler = {name: value for name, value in self._scheduler.config.items() if not name.startswith("_")}
        return hash_of([self._files.fingerprint, settings, repr(sorted(scheduler.items()))])

    def split_by(self, micro_batch_size: int) -> NoisyLatents:
        """Return the data with each step in micro-batches of this many samples, which must divide the samples of a
        step."""
        number, rest = divmod(self._samples_per_step, micro_batch_size)
        assert not rest
        split = copy(self)
        split._settings = replace(self._settings, micro_batch_size=micro_batch_size, gradient_accumulation_steps=number)
        return split

    def step(self, step_index: int) -> list[SampleBatch]:
        """The micro-batches of one step, counted from 0 through all epochs. Raises EnvironmentFailure."""
        epoch, within = divmod(step_index, self.steps_per_epoch)
        order = np.arange(self.num_samples)
        if self._settings.shuffle:
            order = random_order(self.num_samples, self._settings.seed, _ORDER_OF_EPOCHS + epoch)
        first = within * self._samples_per_step
        chosen = self._train_ids[order[first : first + self._samples_per_step]]
        return list(self._noisy(self._files, chosen, f"step {step_index}"))

    def eval_batches(self) -> Iterator[SampleBatch]:
        """The samples for evaluation, with the same noise every time. Raises EnvironmentFailure."""
        size = self._samples_per_step
        for first in range(0, len(self._eval_ids), size):
            yield from self._noisy(self._eval_files, self._eval_ids[first : first + size], f"evaluation {first}")

    def _noisy(self, files: LatentFiles, numbers: Integers, draws: str) -> Iterator[SampleBatch]:
        """Samples with noise that `draws` names, in micro-batches."""
        latents, settings = files.read(numbers), self._settings
        digest = hashlib.blake2b(f"{settings.seed}/{draws}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        most = self._scheduler.config.num_train_timesteps
        timesteps = torch.randint(0, most, (len(numbers),), generator=generator)
        noise = torch.randn(latents.shape, generator=generator)
        learned = self._scheduler.config.prediction_type
        target = {"epsilon": noise, "sample": latents}.get(learned)
        if target is None:  # "v_prediction": see `scheduler_of`
            target = self._scheduler.get_velocity(latents, noise, timesteps)
        inputs = {
            "hidden_states": self._scheduler.add_noise(latents, noise, timesteps).to(settings.dtype),
            "timestep": timesteps,
            "class_labels": files.labels[torch.from_numpy(np.asarray(numbers))],
        }
        size = settings.micro_batch_size
        whole = SampleBatch(
            inputs=inputs,
            targets={"target": target},
            sample_ids=tuple(map(int, numbers)),
            sample_tokens=settings.sample_tokens,
        )
        for first in range(0, len(numbers), size):
            yield whole.part(first, min(first + size, len(numbers)))


SCHEDULER_NAME = "scheduler_config.json"
_LEARNED = ("epsilon", "v_prediction", "sample")
"""What a model may learn to predict: the noise, a velocity, the latent without noise."""


def scheduler_file(directory: Path) -> Path | None:
    """The scheduler's file beside a model, or in the pipeline that it belongs to; None if there is none."""
    places = (directory / SCHEDULER_NAME, directory.parent / "scheduler" / SCHEDULER_NAME)
    return next((each for each in places if each.is_file()), None)


def scheduler_of(directory: Path) -> Any:  # noqa: ANN401 (diffusers has no types)
    """The scheduler that adds noise: that of the model in a directory, or DDPM's default. Raises BadInput if its file
    cannot be used."""
    from diffusers import DDPMScheduler

    made: Any = DDPMScheduler
    file = scheduler_file(directory)
    if file is None:
        return made()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        scheduler = made.from_config(values)
    except Exception as error:
        raise BadInput(f"{file}: not a scheduler's configuration: {first_line(error)}") from error
    name, learned = values.get("_class_name", made.__name__), scheduler.config.prediction_type
    if name not in (made.__name__, *made._compatibles) or learned not in _LEARNED:
        raise BadInput(
            f"{file}: {excerpt(str(name))} that learns {excerpt(str(learned))}; noise is added as DDPM does",
            f"prediction_type: {', '.join(_LEARNED)}",
        )
    return scheduler


AnyData: TypeAlias = TrainingData | NoisyLatents
"""What a run trains on."""
