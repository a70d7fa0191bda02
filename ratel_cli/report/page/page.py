"""The report as one HTML page that needs nothing else: no network, no other file, no script to be readable.

Invariants: the page loads nothing (its own policy forbids it); every text that comes from a file is escaped; each
section is there, or says why it is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite

from ratel_cli.report.page.page_curves import loss_figure, plan_figure, resource_figure, step_figures
from ratel_cli.report.page.page_style import SCRIPT, STYLE
from ratel_cli.report.page.page_tables import (
    facts_list,
    machine_facts,
    memory_table,
    plan_facts,
    predicted_table,
    swap_table,
    wear_facts,
)
from ratel_cli.report.page.run_report import RunReport, key_figures, state_notes, state_words
from ratel_cli.training.metrics import STEP_FIGURES, Figure, StepMetrics
from ratel_cli.units import format_number

GENERATOR = "Ratel"
"""What the page says it was made by. A file that says so may be replaced by another report."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MOST_ROWS = 1500
"""Most rows of the table that the script reads values from. The last step's may come on top."""


def page_of(report: RunReport) -> str:
    """The page, as HTML."""
    made = report.made.isoformat(sep=" ", timespec="seconds")
    parts = [
        "<!doctype html>\n",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta name="generator" content="{GENERATOR}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{escape(report.name)} - Ratel</title><style>{STYLE}</style></head><body><main>",
        *_head(report),
        *_sections(report),
        f"<footer>Made by Ratel {escape(report.version)} on {made} from the files in run/.</footer>",
        "</main>",
    ]
    if report.steps:
        parts += ['<div id="readout"></div>', _table_of_steps(report.steps), f"<script>{SCRIPT}</script>"]
    return "".join((*parts, "</body></html>\n"))


def _head(report: RunReport) -> Iterator[str]:
    yield f"<header><h1>{escape(report.name)}</h1><p>{escape(str(report.status.output_dir))}</p>"
    yield f'<p class="state">{escape(state_words(report))}</p></header>'
    notes = state_notes(report)
    if notes:
        yield f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>'
    figures = "".join(
        f"<div><dt>{escape(each.name)}</dt><dd>{escape(each.value)}<small>{escape(each.context)}</small></dd></div>"
        for each in key_figures(report)
    )
    if figures:
        yield f'<dl class="figures">{figures}</dl>'


def _sections(report: RunReport) -> Iterator[str]:
    plan, has_steps = report.plan, bool(report.steps)
    no_steps, no_plan = "No step is recorded yet.", "There is no plan: run/plan.json is missing or cannot be read."
    yield _section(
        "curves",
        "Training",
        loss_figure(report) + f'<div class="grid-of">{"".join(step_figures(report))}</div>' if has_steps else "",
        no_steps,
    )
    yield _section("resources", "What a step is busy with", resource_figure(report) if has_steps else "", no_steps)
    predicted = predicted_table(report)
    yield _section("predicted", "Predicted and measured", predicted, no_plan if plan is None else no_steps)
    planned = "" if plan is None else f"{plan_figure(plan)}{facts_list(plan_facts(plan))}{swap_table(plan)}"
    yield _section("plan", "The plan", planned, no_plan)
    yield _section("memory", "Memory", memory_table(report), no_plan)
    yield _section("wear", "Wear", facts_list(wear_facts(report)), "Neither steps nor a plan are known.")
    yield _section(
        "machine", "Machine and software", facts_list(machine_facts(report)), "run/hardware.json cannot be read."
    )
    yield _section("config", "Config", _config(report), "run/config.yaml cannot be read.")


def _section(name: str, title: str, content: str, otherwise: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content or f"<p>{escape(otherwise)}</p>"}</section>'


def _config(report: RunReport) -> str:
    changed = f"<pre>{escape(report.changed_keys)}</pre>"
    whole = f"<details><summary>every key, with its value</summary><pre>{escape(report.config_text)}</pre></details>"
    return f"{changed}{whole}" if report.config_text else ""


def _table_of_steps(steps: Sequence[StepMetrics]) -> str:
    """What the script reads: one row for a step, of long runs of every n-th step and the last."""
    every = max(1, -(-len(steps) // _MOST_ROWS))
    chosen = [*steps[::every], *([steps[-1]] if (len(steps) - 1) % every else [])]
    # Columns of evaluations are the last, and only there if one was finite.
    known = [each for each in STEP_FIGURES if each.column]
    evaluated = [each for each in known if each.is_of_evaluations and any(_cell(each, step) for step in steps)]
    columns = [*(each for each in known if not each.is_of_evaluations), *evaluated]
    rows = [[step.step, *(_cell(each, step) for each in columns)] for step in chosen]
    content = json.dumps({"names": ["step", *(each.column for each in columns)], "rows": rows}, allow_nan=False)
    # `<` cannot end the element early: it is written as JSON's escape.
    escaped = content.replace("<", "\\u003c")
    return f'<script type="application/json" id="steps">{escaped}</script>'


def _cell(figure: Figure, step: StepMetrics) -> str | None:
    value = figure.value(step)
    return None if value is None or not isfinite(value) else format_number(value)
