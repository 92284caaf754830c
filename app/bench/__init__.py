"""The bench: what serves the prompts, how it is measured and compared. `app/pipelines/bench.py` is the stage."""
