"""Random numbers that are a function of (seed, number of the draw): Philox4x32-10, in numpy.

Knows no state and no global generator, so that a sampled answer is reproduced from its seed alone, whatever was
computed beside it, before it or again.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PHILOX_ROUNDS = 10

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_UNIT = 2.0**-53


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the four output words of Philox4x32-10 for each counter and key.

    Args:
        counters: 32-bit words `[n, 4]`, least significant first.
        keys: 32-bit words `[n, 2]`, least significant first.

    Returns:
        32-bit words `[n, 4]`.
    """
    word_0, word_1, word_2, word_3 = (counters[:, i].copy() for i in range(4))
    key_0, key_1 = keys[:, 0].copy(), keys[:, 1].copy()
    for _ in range(PHILOX_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0, word_1, word_2, word_3 = (
            (product_1 >> _WORD_BITS) ^ word_1 ^ key_0,
            product_1 & _LOW_WORD,
            (product_0 >> _WORD_BITS) ^ word_3 ^ key_1,
            product_0 & _LOW_WORD,
        )
        key_0 = (key_0 + np.uint64(_WEYL_0)) & _LOW_WORD
        key_1 = (key_1 + np.uint64(_WEYL_1)) & _LOW_WORD
    return np.stack((word_0, word_1, word_2, word_3), axis=1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), with 53 random bits.

    Args:
        seeds: 64-bit keys, `[n]`.
        positions: The number of each draw, `[n]`.
    """
    seed_words = np.asarray(seeds, dtype=np.uint64)
    position_words = np.asarray(positions, dtype=np.uint64)
    counters = np.zeros((len(seed_words), 4), dtype=np.uint64)
    counters[:, 0] = position_words & _LOW_WORD
    counters[:, 1] = position_words >> _WORD_BITS
    keys = np.stack((seed_words & _LOW_WORD, seed_words >> _WORD_BITS), axis=1)
    words = philox4x32(counters, keys)
    bits = ((words[:, 0] << _WORD_BITS) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * _UNIT
