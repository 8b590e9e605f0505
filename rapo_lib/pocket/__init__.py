"""The pocket world: a fictional world, its demonstrators, and the tiny models trained in it.

`python -m rapo_lib.pocket` rebuilds everything under data/pocket/ (see data/README.md).
"""
