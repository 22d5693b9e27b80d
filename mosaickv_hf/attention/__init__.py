"""Attention on packed K and V: handles that models see, block selection, and the backends."""
