"""The plan that a model in one's own loop follows, as text."""

from __future__ import annotations

from ratel_cli.errors import BadInput
from ratel_cli.library.hooking import Hooked
from ratel_cli.library.model import Model
from ratel_cli.report.words.plan import aligned, horizontal_rows, plan_rows, swap_lines


def explain(model: Model | Hooked) -> str:
    """The plan of an open model, or of what `hook` gave: memory, bytes on the drives, and of an open model time.

    Raises BadInput if an open model has no plan yet: its first batch decides that.
    """
    if isinstance(model, Hooked):
        return "\n".join(aligned(horizontal_rows(model.plan, model.spec)))
    if model.plan is None:
        raise BadInput(
            "the model has no plan yet", "its first batch decides it: call forward_backward or evaluate before"
        )
    lines = [*aligned(plan_rows(model.plan)), *swap_lines(model.plan)]
    return "\n".join(lines)
