"""A row's attention is the same to the last bit, whatever it is computed with."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from chatd_kernels import runtime
from chatd_kernels.paged_attention import build_metadata
from chatd_kernels.testing import Paged, make_paged


def rows_alone(paged: Paged, window: int | None = None) -> list[torch.Tensor]:
    """Every position of every conversation in a step of its own."""
    return [
        torch.cat([paged.attend([(which, position, position + 1)], window=window) for position in range(c.length)])
        for which, c in enumerate(paged.conversations)
    ]


@pytest.mark.parametrize(
    ("seed", "num_q_heads", "num_kv_heads", "dtype", "window"),
    [
        (1, 9, 3, torch.float16, None),
        (2, 9, 3, torch.float32, None),
        (3, 4, 4, torch.float16, None),
        (4, 8, 2, torch.float16, 70),
        (5, 5, 1, torch.float32, 300),
    ],
)
def test_bits_do_not_depend_on_batch_chunks_order_or_sharing(
    threads: int, seed: int, num_q_heads: int, num_kv_heads: int, dtype: torch.dtype, window: int
) -> None:
    paged = make_paged(
        [530, 300, 310, 40, 300, 1],
        shared={1: (0, 272), 2: (0, 272), 3: (0, 32), 4: (2, 288)},
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        dtype=dtype,
        seed=seed,
    )
    alone = rows_alone(paged, window)
    chooser = random.Random(seed)
    for _ in range(40):
        chunks = []
        for which in chooser.sample(range(6), chooser.randint(1, 6)):
            length = paged.conversations[which].length
            size = min(length, chooser.choice([1, 1, 1, 2, 3, 7, 60, 300, 530]))
            first = chooser.randint(0, length - size)
            chunks.append((which, first, first + size))
        out = paged.attend(chunks, window=window)
        expected = torch.cat([alone[which][first:end] for which, first, end in chunks])
        assert torch.equal(out, expected), chunks


def test_private_copies_of_shared_blocks_give_the_same_bits() -> None:
    paged = make_paged([300] * 6, shared=dict.fromkeys(range(1, 6), (0, 272)))
    chunks = [(which, 299, 300) for which in range(6)]
    shared = paged.attend(chunks)
    private = make_paged([300] * 6, seed=9)
    private.conversations = [
        type(c)(p.blocks, c.keys, c.values, c.queries)
        for c, p in zip(paged.conversations, private.conversations, strict=True)
    ]
    for c in private.conversations:
        for position in range(300):
            slot = c.blocks[position // 16] * 16 + position % 16
            private.cache.write_slot(slot, 1, c.keys[position], c.values[position])
    assert torch.equal(private.attend(chunks), shared)


def test_the_block_size_changes_no_bit() -> None:
    results = [make_paged([530, 19], block_size=size).attend([(0, 480, 530), (1, 18, 19)]) for size in (16, 32, 128)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_many_random_prefix_trees_are_scheduled_whole() -> None:
    """Each (token, position) is covered exactly once, by a run whose block is the token's own."""
    from chatd_kernels.kv_cache import KVCacheLayout
    from chatd_kernels.paged_attention.work_list import ITEM_FIELDS, RUN_FIELDS, TASK_FIELDS

    before = runtime.num_threads()
    chooser = random.Random(7)
    for block_size in (16, 64, 256):
        layout = KVCacheLayout(1, 1, block_size, 16, torch.float16)
        for _ in range(60):
            tables: list[list[int]] = []
            lengths, sizes = [], []
            fresh = iter(range(10_000))
            for _ in range(chooser.randint(1, 20)):
                length = chooser.choice([1, 5, block_size, chooser.randint(1, 900)])
                count = -(-length // block_size)
                base = chooser.choice(tables)[: chooser.randint(0, count)] if tables and chooser.random() < 0.8 else []
                tables.append(base + [next(fresh) for _ in range(count - len(base))])
                lengths.append(length)
                sizes.append(min(length, chooser.choice([1, 1, 1, 4, 30])))
            metadata = build_metadata(
                np.cumsum([0, *sizes]),
                [length - size for length, size in zip(lengths, sizes, strict=True)],
                tables,
                layout=layout,
                num_q_heads=2,
            )
            seen: dict[tuple[int, int], int] = {}
            items = metadata.buffers["items"].reshape(-1, ITEM_FIELDS)[: metadata.num_items]
            tasks = metadata.buffers["tasks"].reshape(-1, TASK_FIELDS)
            runs = metadata.buffers["runs"].reshape(-1, RUN_FIELDS)
            listed = metadata.buffers["tokens"]
            for first_task, end_task, _ in items:
                for segment, _, _, first_run, end_run, _ in tasks[first_task:end_task]:
                    for low, high, first, end, follows in runs[first_run:end_run]:
                        for token in listed[first:end].tolist():
                            own = tables[metadata.sequence_of[token]]
                            limit = int(metadata.lengths[token])
                            for position in range(segment * 256 + low * 16, min(segment * 256 + high * 16, limit), 16):
                                assert tables[follows][position // block_size] == own[position // block_size]
                                key = (token, position)
                                seen[key] = seen.get(key, 0) + 1
            expected = {(t, p) for t, length in enumerate(metadata.lengths) for p in range(0, int(length), 16)}
            assert seen == dict.fromkeys(expected, 1)
    assert runtime.num_threads() == before
