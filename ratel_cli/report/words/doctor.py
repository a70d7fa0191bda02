"""The table of `ratel doctor`: a verdict, what it is about and why, and below it what to do.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.checkup import Diagnosis
from ratel_cli.units import counted


def diagnosis_lines(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The lines of the table."""
    width = max((len(diagnosis.what) for diagnosis in diagnoses), default=0)
    lines = []
    for diagnosis in diagnoses:
        lines.append(f"{diagnosis.verdict:<6}  {diagnosis.what:<{width}}  {diagnosis.reason}")
        if diagnosis.remedy is not None:
            lines.append(f"{'':<6}  {'':<{width}}  > {diagnosis.remedy}")
    return lines


def diagnoses_to_json(diagnoses: Sequence[Diagnosis]) -> dict[str, object]:
    """The content that `ratel doctor --json` prints."""
    return {"broken": len(_broken(diagnoses)), "checks": [asdict(diagnosis) for diagnosis in diagnoses]}


def raise_if_broken(diagnoses: Sequence[Diagnosis]) -> None:
    """Raise EnvironmentFailure for the first thing that is broken, if there is one."""
    broken = _broken(diagnoses)
    if broken:
        others = f" ({counted(len(broken), 'thing')} in all, see above)" if len(broken) > 1 else ""
        raise EnvironmentFailure(f"{broken[0].what}: {broken[0].reason}{others}", broken[0].remedy)


def _broken(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    return [diagnosis for diagnosis in diagnoses if diagnosis.verdict == "broken"]
