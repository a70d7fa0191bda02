"""How full the steps of a config's data are, as the last command found that read it: `ratel plan` reads none.

It is in the user's cache, in a file named by what decides it.

Invariant: what is not known, or was found with other data or other settings, is None.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.json_fields import read_file_as
from ratel_cli.run.files.user_cache import user_cache_file, write_user_cache
from ratel_cli.run.inputs.length import DECIDES_THE_COUNT
from ratel_cli.run.inputs.settings import DECIDES_THE_LENGTH
from ratel_cli.sizes import Filling


def note_filling(config: RunConfig, filling: Filling | None) -> None:
    """Keep how full the steps of the config's data are; nothing where samples are packed."""
    if filling is not None:
        with suppress(OSError, ValueError):
            write_user_cache(_file(config), json.dumps(asdict(filling)) + "\n")


def known_filling(config: RunConfig) -> Filling | None:
    """How full the steps of the config's data are; None if that is not known."""
    return read_file_as(Filling, _file(config))


def expected_filling(lengths: Sequence[int], *, micro_batch_size: int, sequence_len: int) -> Filling:
    """How full steps are on average whose rows have one sample each, with lengths like these, of which some are there.
    The last step of an epoch is not counted."""
    ascending = sorted(min(each, sequence_len) for each in lengths)
    draws = len(ascending) ** micro_batch_size
    # The i-th length is the longest of a micro-batch in so many draws of its samples.
    widest = sum(
        each * (number**micro_batch_size - (number - 1) ** micro_batch_size) for number, each in enumerate(ascending, 1)
    )
    mean = sum(ascending) / len(ascending)
    return Filling(micro_batches=1.0, computed=widest / draws / sequence_len, tokens=mean / sequence_len)


def assumes_full_rows(config: RunConfig) -> bool:
    """Whether rows have one sample each by the config, and nothing is known of their lengths."""
    is_packed = config.sample_packing and config.rl is None and config.task in ("causal_lm", "masked_lm")
    return bool(config.datasets) and config.task != "denoising" and not is_packed and known_filling(config) is None


def _file(config: RunConfig) -> Path:
    keys = {*DECIDES_THE_COUNT, "rl", "test_datasets"}.difference(DECIDES_THE_LENGTH)
    settings = config.model_dump(mode="json", include=keys)
    files = [_state(Path(each.path).expanduser()) for each in config.datasets]
    return user_cache_file("filling", [settings, config.known_split, os.getcwd(), files])


def _state(path: Path) -> list[tuple[str, int, int]]:
    """The name, the size and the time of change of the path and of each entry in it; empty if there is none."""
    found = []
    for each in [path, *sorted(path.glob("*"))]:
        with suppress(OSError):
            status = each.stat()
            found.append((each.name, status.st_size, status.st_mtime_ns))
    return found
