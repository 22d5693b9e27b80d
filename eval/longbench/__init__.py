"""LongBench (arXiv 2308.14508): its 16 English tasks, two of them code."""
