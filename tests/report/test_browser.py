"""The report in a real browser, without a network, at the width of a desktop and of a phone, light and dark.

The pictures stay in the temporary directory of a test that fails. `RATEL_KEEP_RECORDINGS` keeps all of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.recordings import keep
from tests.report.recorded import FACTS, steps
from tests.report.test_page import SECTIONS, made_run, page_of, report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
WIDTHS = {"desktop": 1280, "tablet": 800, "phone": 390}
HEIGHT = 4000
OPERATORS = (
    "self_attn.o_proj",
    "self_attn/aten._scaled_dot_product_flash_attention_for_cpu.default",
    "mlp.shared_expert_gate_up_projection/aten._to_copy.default",
)
"""Two of them are long."""
MEASURE = """<script>
var svgs=[].filter.call(document.querySelectorAll('svg'),function(svg){return svg.getBoundingClientRect().width>0});
var scales=svgs.map(function(svg){return svg.getBoundingClientRect().width/svg.viewBox.baseVal.width});
var out=[].filter.call(document.querySelectorAll('main *'),function(each){var box=each.getBoundingClientRect();
return box.width>0&&(box.right>innerWidth+1||box.left<-1)&&!each.closest('.scroll')});
var scrolled=[].filter.call(document.querySelectorAll('.scroll'),function(e){return e.scrollWidth>e.clientWidth+1});
var broken=[].concat.apply([],[].map.call(document.querySelectorAll('.operators th'),function(each){
return[].filter.call(each.childNodes,function(part){var range=document.createRange();range.selectNodeContents(part);
return range.getClientRects().length>1}).map(function(part){return part.textContent})}));
svgs[0].dispatchEvent(new PointerEvent('pointermove',{clientX:innerWidth/2,clientY:0}));
parent.postMessage(JSON.stringify({inner:innerWidth,wide:document.documentElement.scrollWidth,
out:out.map(function(each){return each.outerHTML.slice(0,80)}),
broken:broken,scrolled:scrolled.map(function(each){return each.scrollWidth+' of '+each.clientWidth}),charts:svgs.length,
least:Math.min.apply(null,scales),most:Math.max.apply(null,scales),
sections:[].map.call(document.querySelectorAll('section'),function(each){return each.id}),
crosses:document.querySelectorAll('.cross').length,readout:document.getElementById('readout').textContent}),'*');
</script>"""
FRAME = """<body style="margin:0"><iframe src="report.html" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>addEventListener('message',function(event){{document.body.setAttribute('data-found',event.data)}})</script>"""
"""A headless window is never narrower than 500 pixels, so the page is in a frame that has the width of the screen."""


@pytest.fixture(scope="module")
def browser() -> str:
    """The program of a browser."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is installed")
    return found


def run(browser: str, place: Path, *arguments: str) -> str:
    """Run the browser with a profile of its own. Returns what it printed."""
    command = [browser, *FLAGS, f"--user-data-dir={place / 'profile'}", *arguments, (place / "frame.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def first_pixel(picture: bytes) -> tuple[int, ...]:
    """The red, green and blue of a PNG's first pixel, which no filter changes."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    data, place = b"", 8
    while place < len(picture):
        length, kind = int.from_bytes(picture[place : place + 4]), picture[place + 4 : place + 8]
        data += picture[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += length + 12
    return tuple(zlib.decompress(data)[1:4])


@pytest.fixture
def place(tmp_path: Path, device: str) -> Path:
    """A directory with the report of a long run, in a frame of the device's width."""
    made = steps(600, eval_every=50)
    output = made_run(tmp_path, made, facts=replace(FACTS, num_steps=600), exported_step=600)
    content = json.loads((output / "run" / "plan.json").read_text())
    content["activations"]["swap_set"] = [
        {"operator": name, "blocks": 32, "bytes": 1 << 30, "flops": 1 << 40, "seconds": 0.4, "benefit": 1024.0}
        for name in OPERATORS
    ]
    (output / "run" / "plan.json").write_text(json.dumps(content))
    (tmp_path / "report.html").write_text(page_of(report(output)).replace("</body>", f"{MEASURE}</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width=WIDTHS[device], height=HEIGHT))
    return tmp_path


@pytest.mark.parametrize("device", WIDTHS)
def test_it_fits_the_screen(browser: str, place: Path, device: str) -> None:
    """Nothing is wider than the page; every chart has about its own size, so that its text is readable; values show."""
    document = run(browser, place, "--window-size=1280,900", "--virtual-time-budget=5000", "--dump-dom")
    match = re.search(r'data-found="([^"]*)"', document)
    assert match is not None, document[-2000:]
    found = json.loads(unescape(match[1]))
    assert (found["inner"], found["wide"]) == (WIDTHS[device], WIDTHS[device])
    assert (found["out"], found["scrolled"], found["broken"]) == ([], [], [])
    least = 0.6 if device == "tablet" else 0.9  # its wide charts have larger letters
    assert found["charts"] == 9 and least <= found["least"] and found["most"] <= 1.1
    assert found["sections"] == SECTIONS
    assert found["crosses"] >= 8 and found["readout"].startswith("step ")


@pytest.mark.parametrize(
    ("device", "theme"),
    [
        ("desktop", "light"),
        ("phone", "dark"),
        pytest.param("desktop", "dark", marks=pytest.mark.nightly),
        pytest.param("phone", "light", marks=pytest.mark.nightly),
    ],
)
def test_a_picture_of_it(browser: str, place: Path, device: str, theme: str) -> None:
    """The page has the reader's colours. Its picture is there to look at."""
    picture = place / f"{device}-{theme}.png"
    size = f"--window-size={max(500, WIDTHS[device])},{HEIGHT}"
    run(browser, place, size, f"--screenshot={picture}", *(DARK if theme == "dark" else ()))
    keep(f"report-{picture.name}", picture.read_bytes())
    assert picture.stat().st_size > 20_000
    assert (max(first_pixel(picture.read_bytes())) < 40) == (theme == "dark")
