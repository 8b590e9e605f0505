"""rapo_lib: the thin library behind the RAPO notebooks (arXiv 2603.03078)."""

__version__ = "0.1.0"
