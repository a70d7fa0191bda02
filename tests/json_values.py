"""Hypothesis strategies for what JSON and YAML can hold."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = st.text(max_size=8)


def json_values(
    keys: st.SearchStrategy[str] = TEXTS,
    *more: st.SearchStrategy[object],
    texts: st.SearchStrategy[str] = TEXTS,
    max_leaves: int = 12,
) -> st.SearchStrategy[object]:
    """Values that may be nested. `more`: further scalars."""
    scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, *more)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=max_leaves,
    )
