"""What is wrong with rows whatever the tokenizer is: for a run whose model or tokenizer cannot be used.

Invariant: a row that is rejected here is rejected by every tokenizer.
"""

from __future__ import annotations

from contextlib import closing, suppress
from functools import partial

from ratel_cli.data.files.lines import Reject, Row
from ratel_cli.data.sources.formats import RowFormat, decide_format
from ratel_cli.data.sources.ingest import MAX_SHOWN_REJECTS, reject_too_many
from ratel_cli.data.text.drafts import Unusable, unless_unusable
from ratel_cli.data.text.rows import DatasetSource, RowSource
from ratel_cli.errors import BadInput
from ratel_cli.progress import OpenBar, no_bar


def check_rows(source: RowSource, *, knows_type: bool, open_bar: OpenBar = no_bar) -> None:
    """Raise BadInput if too many rows of a local source are bad, EnvironmentFailure if it cannot be read.

    Without `knows_type` only rows are bad that are no rows at all. Rows of the hub are not looked at: they would have
    to be downloaded.
    """
    if not source.files:
        return
    formats: list[RowFormat] | None = None
    shown, num_rows, num_rejected = list[Reject](), 0, 0
    with open_bar("reading the data", source.num_bytes, items="rows") as advance, closing(source.read(advance)) as rows:
        for row in rows:
            advance(0, 1)
            reject = row if isinstance(row, Reject) else None
            if isinstance(row, Row) and knows_type:
                formats = formats or _formats(source.source, row)
                tried = [unless_unusable(partial(each.draft, row.record)) for each in formats]
                reasons = [str(each) for each in tried if isinstance(each, Unusable)]
                if len(reasons) == len(tried):  # it cannot be used in any of them
                    reject = Reject(file=row.file, line=row.line, reason=reasons[0])
            num_rows += 1
            if reject is not None:
                num_rejected += 1
                shown += [reject] if len(shown) < MAX_SHOWN_REJECTS else []
    reject_too_many(num_rejected, num_rows, shown, shown_by=None)


def _formats(source: DatasetSource, row: Row) -> list[RowFormat]:
    """The formats that the source may have, with a chat template and without one. Raises BadInput if it has none."""
    found = [decide_format(source, row.record, has_chat_template=True)]
    with suppress(BadInput):
        found.append(decide_format(source, row.record, has_chat_template=False))
    return found
