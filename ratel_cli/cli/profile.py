"""`ratel profile [CONFIG]`: measures what this machine can do, with the code that training uses.

The profile goes to stdout, everything else to stderr.

Invariants: nothing heavy is imported before arguments and config are known to be right, nor if the profile is cached; a
file that exists is not replaced unless the user insists.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.cli.arguments import check_directories, check_option
from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.report.words.profile import hardware_rows, model_rows, operator_lines
from ratel_cli.run.ask.plan_inputs import with_planned_chunk, with_planned_split
from ratel_cli.run.files.hardware_file import to_text
from ratel_cli.run.files.new_file import check_new, write_new
from ratel_cli.run.files.profile_cache import ProfileTarget, machine_profile, profile_target
from ratel_cli.run.files.run_directory import read_config
from ratel_cli.run.inputs.settings import as_recorded


def run(
    config_path: Path | None,
    storage: Sequence[Path],
    output: Path | None,
    *,
    as_json: bool,
    refresh: bool,
    overwrite: bool,
) -> None:
    """Print the machine's profile, and write it to `output` if that is given. Raises RatelError."""
    check_option("--overwrite", overwrite, only_with="-o FILE", is_met=output is not None)
    log = RunLog()
    check_directories("--storage", storage)
    config = None if config_path is None else read_config(config_path, log)
    if config is None:  # the defaults, in `storage` or here
        target = ProfileTarget(paths=tuple(storage) or (Path.cwd(),), dtype="bfloat16", device="auto", engine="auto")
    else:
        target = profile_target(config, storage)
    if output is not None:
        check_new(output, overwrite=overwrite)

    def measure(target: ProfileTarget) -> HardwareProfile:
        from ratel_cli.run.train.profile_machine import measure_machine

        return measure_machine(target, log)

    named = (
        *([] if config_path is None else [config_path]),
        *(word for path in storage for word in ("--storage", path)),
    )
    again = command("profile", *named, "--refresh")
    profile = machine_profile(target, measure, log, refresh=refresh, refreshed_by=again)
    if as_json:
        sys.stdout.write(to_text(profile))
    else:
        RunLog(sys.stdout).facts(hardware_rows(profile, dtype=target.dtype))
    if output is not None:
        write_new(output, to_text(profile), overwrite=overwrite)
        log.say(f"wrote {output}")
    if config is not None and config.base_model is not None:
        _profile_model(config, profile, log, refresh=refresh, quiet=as_json)


def _profile_model(config: RunConfig, hardware: HardwareProfile, log: RunLog, *, refresh: bool, quiet: bool) -> None:
    """Measure and print what the config's model costs here. `ratel plan` and `ratel finetune` use the same figures."""
    from ratel_cli.run.ask.profile_model import record_model

    config = with_planned_split(as_recorded(config), hardware, name="", log=log)
    config = with_planned_chunk(config, hardware, name="", log=log)
    costs = record_model(config, hardware, log, refresh=refresh)
    if quiet:
        return
    table = RunLog(sys.stdout)
    table.facts(model_rows(costs.profile, available_bytes=costs.activation_available_bytes))
    for line in operator_lines(costs.profile):
        table.say(line)
