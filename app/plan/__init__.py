"""What a run will cost, before it starts: `draftmill plan`, and the check that it fits."""
