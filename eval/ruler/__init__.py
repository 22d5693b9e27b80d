"""RULER (arXiv 2404.06654): 13 synthetic long-context tasks, after the public definition in NVIDIA/RULER."""
