"""Evaluation of KV caches on RULER and LongBench; run from a checkout (`python -m eval.ruler --help`)."""
