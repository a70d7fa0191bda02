"""Where what the data becomes is recorded: in the run's own directory, or in a temporary one that can read the run's.

Invariant: what is new in a folder of the user's that the run has not claimed in the end is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.run.files.output import claim_output, is_claimed, may_claim_at_once
from ratel_cli.run.files.run_directory import TOKENS_NAME, run_directory


def temporary_records(config: RunConfig, resources: ExitStack) -> Path:
    """A directory for what the data becomes, which `resources` removes. It has the run's own tokens, to be read."""
    temporary = Path(resources.enter_context(TemporaryDirectory(prefix="ratel-data-")))
    (temporary / TOKENS_NAME).mkdir()
    for cache in (run_directory(config.output_dir) / TOKENS_NAME).glob("*"):
        if TokenCache.is_in(cache):  # else there may be files of the user's, and a new cache would go to them
            (temporary / TOKENS_NAME / cache.name).symlink_to(cache.resolve())
    return temporary


def records(config: RunConfig, resources: ExitStack, *, dry_run: bool) -> Path:
    """The directory for what the data becomes: the run's own; for a dry run a temporary one that can read the run's."""
    if dry_run:
        return temporary_records(config, resources)
    if may_claim_at_once(config):
        claim_output(config)
    else:
        resources.callback(_remove_unclaimed, config, frozenset(_caches(config)))
    return run_directory(config.output_dir)


def _caches(config: RunConfig) -> list[Path]:
    return list((run_directory(config.output_dir) / TOKENS_NAME).glob("*"))


def _remove_unclaimed(config: RunConfig, earlier: Collection[Path]) -> None:
    """Remove the tokens that are new in a folder of the user's, unless the run has claimed it."""
    if is_claimed(config):
        return
    for cache in _caches(config):
        if cache not in earlier:
            shutil.rmtree(cache, ignore_errors=True)
    run = run_directory(config.output_dir)
    for folder in (run / TOKENS_NAME, run):
        with suppress(OSError):
            folder.rmdir()
