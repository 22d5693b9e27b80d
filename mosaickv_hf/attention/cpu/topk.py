"""Top-k by radix selection, over int32 keys that sort as the scores do (`to_keys`)."""

from numba import njit

from .simd import at_least, load_i32, order, popcount, same_prefix, store_i32

# Bits of a digit, from the top.
_DIGITS = (11, 11, 10)
SCRATCH_BYTES = 4 << max(_DIGITS)


@njit
def to_keys(scores, count):
    """Turns `count` fp32 at an address into keys, in place, and fills the last eight of them up with the smallest."""
    for i in range(0, count, 8):
        order(scores + 4 * i)
    for i in range(count, (count + 7) >> 3 << 3):
        store_i32(scores + 4 * i, -(1 << 31))


@njit
def kth_largest(keys, count, k, scratch):
    """The k-th largest of `count` keys, and how many keys of that size are among the k largest; 1 <= k <= count."""
    left, prefix, rest = k, 0, 32
    for bits in _DIGITS:
        bins, above = 1 << bits, rest
        rest -= bits
        for i in range(bins):
            store_i32(scratch + 4 * i, 0)
        if above == 32:
            # The top digit is signed; shifted to start at zero.
            for i in range(count):
                at = scratch + 4 * ((load_i32(keys + 4 * i) >> rest) + (bins >> 1))
                store_i32(at, load_i32(at) + 1)
        else:
            for i in range(0, count, 8):
                same = same_prefix(keys + 4 * i, above, prefix)
                while same:
                    key = load_i32(keys + 4 * (i + popcount((same & -same) - 1)))
                    at = scratch + 4 * ((key >> rest) & (bins - 1))
                    store_i32(at, load_i32(at) + 1)
                    same &= same - 1
        digit = bins - 1
        while load_i32(scratch + 4 * digit) < left:
            left -= load_i32(scratch + 4 * digit)
            digit -= 1
        prefix = digit - (bins >> 1) if above == 32 else (prefix << bits) | digit
    return prefix, left


@njit
def take(keys, first, end, kth, ties, out):
    """Writes the places, from `first` on, of the keys in `first` to `end` that are larger than `kth`, and of the first
    `ties` equal to it, in order as int32.

    Returns:
        how many were written, and how many ties are left.
    """
    count = 0
    for start in range(first & ~7, end, 8):
        kept = at_least(keys + 4 * start, kth)
        if start < first:
            kept &= 255 << (first - start)
        if start + 8 > end:
            kept &= (1 << (end - start)) - 1
        if kept == 0:
            continue
        equal = same_prefix(keys + 4 * start, 0, kth) & kept
        while popcount(equal) > ties:
            # Drops the last of them.
            last = 128
            while equal & last == 0:
                last >>= 1
            equal ^= last
            kept ^= last
        ties -= popcount(equal)
        while kept:
            store_i32(out + 4 * count, start - first + popcount((kept & -kept) - 1))
            count += 1
            kept &= kept - 1
    return count, ties
