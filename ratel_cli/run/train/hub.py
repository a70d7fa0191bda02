"""Uploads a run's export to the Hugging Face hub, if the config names a repository.

huggingface_hub finds the user's login by itself. Invariants: only the files that the export's marker lists are
uploaded; a failure changes nothing about the run, and the message has the command that uploads by hand.
"""

from __future__ import annotations

import glob
import shlex
from typing import Protocol

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import first_line
from ratel_cli.model.files.marker import read_marker


class Hub(Protocol):
    """What is used of huggingface_hub's HfApi."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> object:
        """Make the repository. The result has its whole id as `repo_id`."""

    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str], commit_message: str
    ) -> object:
        """Upload the files of a directory that match."""


def upload_export(config: RunConfig, log: RunLog, hub: Hub | None = None) -> None:
    """Upload the export in `output_dir` to `hub_model_id`. A failure is a warning."""
    directory, repository = config.output_dir, config.hub_model_id
    marker = read_marker(directory)
    assert repository is not None
    if marker is None or marker.step is None:
        return
    log.say(f"uploading the model to {repository} ...")
    try:
        hub = hub or _hub(shows_progress=log.is_terminal)
        made = hub.create_repo(repository, private=config.hub_private_repo, exist_ok=True)
        repository = str(getattr(made, "repo_id", repository))
        hub.upload_folder(
            repo_id=repository,
            folder_path=str(directory),
            allow_patterns=[glob.escape(file.name) for file in marker.files],
            commit_message=f"Upload the model of step {marker.step}",
        )
    except Exception as error:  # noqa: BLE001 - network, login, hub: whatever it is, the run is complete
        by_hand = shlex.join(
            ["hf", "upload", repository, str(directory), ".", "--exclude=run/*", "--exclude=ratel.files"]
        )
        reason = first_line(error).rstrip(".")
        log.warn(f"the model was not uploaded to {repository}: {reason}; it is complete in {directory}")
        log.say(f"to upload it by hand: hf auth login && {by_hand}")
        return
    log.say(f"uploaded the model to https://huggingface.co/{repository}")


def _hub(*, shows_progress: bool) -> Hub:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not shows_progress:
        disable_progress_bars()
    return HfApi(library_name="ratel")
