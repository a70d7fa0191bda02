"""Whatever a log holds when a run resumes: its complete lines up to the committed step stay, damaged ones, too."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.training.metrics_log import MetricsLog, line_of, step_in
from tests.tiers import examples
from tests.training.test_metrics import metrics

QUICK = examples(200)
STEPS = st.integers(-1, 6) | st.none() | st.floats() | st.text(max_size=2) | st.just(10**400)
LINES = (
    st.builds(lambda step: line_of(metrics(step)), st.integers(1, 6))
    | st.builds(lambda step: json.dumps({"step": step}).encode() + b"\n", STEPS)
    | st.binary(max_size=20)
    | st.sampled_from([b"\n", b"[" * 2_000 + b"\n", b'{"step": ' + b"1" * 4_400 + b"}\n", b'{"step": 1}'])
)


@QUICK
@given(lines=st.lists(LINES, max_size=6), committed_step=st.integers(0, 5))
def test_any_log(tmp_path: Path, lines: list[bytes], committed_step: int) -> None:
    path, warnings = tmp_path / "metrics.jsonl", list[str]()
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    MetricsLog(path, committed_step=committed_step, warn=warnings.append).close()
    after = path.read_bytes()
    assert before.startswith(after) and (after == b"" or after.endswith(b"\n"))
    found = [step_in(line) for line in after.splitlines(keepends=True)]
    assert all(step is None or step.step <= committed_step for step in found)
    assert len(warnings) == (None in found)
    MetricsLog(path, committed_step=committed_step, warn=warnings.append).close()
    assert path.read_bytes() == after, "once is enough"
