"""State of pipelines: saving where an iteration is, and going on from there."""
