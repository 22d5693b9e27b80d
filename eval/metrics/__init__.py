"""Metrics as modules for `evaluate`: `evaluate.load("eval/metrics/ruler.py", "all")` works without a network."""
