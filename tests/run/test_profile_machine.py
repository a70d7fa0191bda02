"""What is said when others computed while this machine was measured."""

from __future__ import annotations

from io import StringIO

import pytest

from ratel_cli.console import RunLog
from ratel_cli.hardware.load import LoadMeter, OtherLoad
from ratel_cli.run.train.profile_machine import report_other_load


@pytest.mark.parametrize("load", [OtherLoad(cores=1.2, num_cores=2), None])
def test_a_machine_that_is_busy_is_a_notice(load: OtherLoad | None) -> None:
    class Meter(LoadMeter):
        def other_load(self) -> OtherLoad | None:
            return load

    out = StringIO()
    report_other_load(Meter(), RunLog(out))
    words = "note: other processes use 1.2 of 2 cores, so measured speeds are too low and predicted times are rough\n"
    assert out.getvalue() == (words if load is not None else "")
