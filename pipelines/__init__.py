"""Pipelines to run: `python -m pipelines.run`."""
