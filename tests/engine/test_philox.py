import numpy as np
import pytest

from chatd.engine.philox import philox4x32, uniforms

# Random123's kat_vectors, philox4x32 10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_random123_known_answers_are_reproduced(counter, key, expected):
    out = philox4x32(np.array([counter], dtype=np.uint64), np.array([key], dtype=np.uint64))
    assert tuple(int(word) for word in out[0]) == expected


def test_a_draw_does_not_depend_on_the_draws_beside_it():
    seeds = [7, 2**63 - 1, 0, 7]
    positions = [0, 5, 2**33, 1]
    together = uniforms(seeds, positions)
    alone = [uniforms([seed], [position])[0] for seed, position in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_draws_are_uniform_over_positions_and_over_seeds():
    n = 20_000
    for numbers in (uniforms([11] * n, range(n)), uniforms(range(n), [3] * n)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.histogram(numbers, bins=50, range=(0.0, 1.0))[0]
        chi_square = float(((counts - n / 50) ** 2 / (n / 50)).sum())
        assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001
