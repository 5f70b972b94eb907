"""A first training for those who have installed the package: ``python -m ourddp.example > train.py`` writes it."""
