"""The papers' cost model, and their rivals."""
