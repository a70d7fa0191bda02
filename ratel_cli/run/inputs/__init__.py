"""Everything that a run reads before it writes, checked."""
