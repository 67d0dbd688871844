"""Faults of weight updates, for tests: what `session.run_scenarios` and `deadly.run_deadly` check of the whole path (docs/faults.md)."""
