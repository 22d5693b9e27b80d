"""Sizing a prompt: the most of something that still fits."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], lowest: int, guess: int) -> int | None:
    """The largest n >= lowest for which `fits(n)` holds, which must hold up to some n only; None if for none.

    Args:
        guess: where to begin to look.
    """
    if not fits(lowest):
        return None
    low, high = lowest, max(guess, lowest + 1)
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
