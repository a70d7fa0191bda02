"""What a step holds and moves: rows of the ledger (schedule/ledger.py), a duty in each file."""
