"""What `ratel verify` prints: a row for each thing, and an error for the first that is wrong."""

from __future__ import annotations

import pytest

from ratel_cli.errors import IntegrityFailure
from ratel_cli.report.words.verify import Check, check_lines, checks_to_json, raise_if_wrong

WHOLE = Check(what="step 4, current", num_bytes=3 << 20, checked="every chunk", verdict="whole")
FINITE = Check(what="a", num_bytes=12, checked="2 tensors", verdict="finite")
WRONG = Check(what="weights", num_bytes=0, checked="every bit", verdict="w differs", is_wrong=True)


def test_the_table() -> None:
    assert check_lines([WHOLE, FINITE, WRONG]) == [
        "what                bytes      checked  verdict",
        "step 4, current  3.00 MiB  every chunk  whole",
        "a                    12 B    2 tensors  finite",
        "weights               0 B    every bit  WRONG: w differs",
    ]


def test_json() -> None:
    assert checks_to_json([WHOLE])["whole"] is True
    found = checks_to_json([WHOLE, WRONG])
    assert found["whole"] is False
    assert found["checks"] == [
        {
            "what": check.what,
            "num_bytes": check.num_bytes,
            "checked": check.checked,
            "verdict": check.verdict,
            "is_wrong": wrong,
        }
        for check, wrong in ((WHOLE, False), (WRONG, True))
    ]


def test_the_first_wrong_thing_is_the_error() -> None:
    raise_if_wrong([WHOLE, FINITE])
    with pytest.raises(IntegrityFailure, match=r"^weights: w differs$"):
        raise_if_wrong([WHOLE, WRONG])
    with pytest.raises(IntegrityFailure, match=r"^weights: w differs \(and 2 more, see above\)$"):
        raise_if_wrong([WRONG, WHOLE, WRONG, WRONG])
