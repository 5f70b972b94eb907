"""``python -m ourddp bench``: times collectives and training steps, this backend against the others that are there."""
