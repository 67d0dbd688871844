"""What a run tells: `timing` and `metrics` (numbers), `samples`, `progress` (the terminal), `report` (what came out)."""
