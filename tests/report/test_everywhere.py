"""A figure of a step is told in one place: a patch of one file, and the line that measures it, brings it everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ratel_cli import _native

PACKAGE = Path(__file__).parents[2] / "ratel_cli"
END_OF_FIELDS = "\n    def preference("
FIELD = '''    padding: float | None = None
    """The share of the computed tokens that are padding."""
'''
END_OF_ROWS = '''
)
"""What is shown of steps'''
ROW = """
    Figure(
        key="padding",
        value=lambda step: step.padding,
        words=lambda step: f"padding {step.padding:.2f}",
        column="padding",
        curve=Curve(name="Padding", unit="of the tokens", last=lambda share: f"{share:.4f} padded"),
        tracked_as="train/padding",
        in_status=True,
        status_words=lambda share: f"{share:.3f}",
    ),"""
MEASURED = "            tokens=tokens,\n"
PATCH = {
    "training/metrics.py": [(END_OF_FIELDS, FIELD + END_OF_FIELDS), (END_OF_ROWS, ROW + END_OF_ROWS)],
    "training/loop.py": [(MEASURED, f"{MEASURED}            padding=1 - tokens / num_computed_tokens,\n")],
}
"""By file: what stands there once, and what takes its place."""


def patched_package(parent: Path) -> None:
    """Make `parent`, with the tests, and the product as it is with the patch."""
    made = parent / "ratel_cli"
    (made / "training").mkdir(parents=True)
    for path in (*PACKAGE.iterdir(), *(PACKAGE / "training").iterdir()):
        if path.name != "training":
            (made / path.relative_to(PACKAGE)).symlink_to(path)
    (parent / "tests").symlink_to(PACKAGE.with_name("tests"))
    compiled = Path(_native.__file__)
    if not (made / compiled.name).exists():
        (made / compiled.name).symlink_to(compiled)
    for name, changes in PATCH.items():
        text = (PACKAGE / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (made / name).unlink()
        (made / name).write_text(text)


@pytest.mark.full
def test_a_new_figure_is_in_every_output(tmp_path: Path) -> None:
    patched_package(tmp_path / "patched")
    # Without `site` nothing leads to the package that is installed, as the finder of an editable install would.
    command = [sys.executable, "-S", "-B", "-m", "tests.report.everywhere", str(tmp_path)]
    found = os.pathsep.join(place for place in sys.path if place and Path(place) != PACKAGE.parent)
    variables = {**os.environ, "PYTHONPATH": found}
    ended = subprocess.run(command, cwd=tmp_path / "patched", env=variables, check=True, capture_output=True, text=True)
    found = json.loads(ended.stdout)
    assert [json.loads(line)["padding"] for line in found["lines of metrics"]] == [0.375] * 4
    assert len(found["read back"]) == 4 and all("padding=0.375" in each for each in found["read back"])
    assert "  padding 0.38  " in found["step line"]
    assert any(line.endswith("  padding 0.38") for line in found["panel"]), found["panel"]
    heading, row = (re.split(r"\s{2,}", line) for line in found["status"])
    assert row[heading.index("padding")] == "0.375"
    assert found["status JSON"]["runs"][0]["padding"] == 0.375
    assert '<b>Padding</b><span class="unit">of the tokens</span>' in found["page"]
    assert "0.3750 padded" in found["page"]
    readout = re.search(r'<script type="application/json" id="steps">(.*?)</script>', found["page"])
    assert readout is not None
    table = json.loads(readout[1])
    assert [values[table["names"].index("padding")] for values in table["rows"]] == ["0.375"] * 4
    assert "Padding, of the tokens, by step" in found["terminal"]
    assert "Padding, of the tokens" in found["picture"]
    assert found["tracker"]["train/padding"] == 0.375
