"""Reproducible values by name: the same stream as model/base/seeded.hpp, so that weights need not be stored."""
import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MASK = (1 << 64) - 1


def key(seed: int, name: str) -> int:
    value = 0xCBF29CE484222325  # FNV-1a, 64 bits
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value ^ ((seed * int(GOLDEN)) & MASK)


def uniform(seed: int, name: str, count: int) -> np.ndarray:
    """Float64 array of `count` values in [-1, 1), each a multiple of 2^-23."""
    with np.errstate(over="ignore"):
        z = np.uint64(key(seed, name)) + np.arange(count, dtype=np.uint64) * GOLDEN + GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
