"""One step after another on the GPU's path: padding, pending tokens, moves, formats, and steps that fail."""

import pytest
import torch

from chatd.engine.host_buffer import HostBuffer
from chatd.engine.plan import PENDING_TOKEN, BlockCopy, BlockMove, Plan
from chatd_kernels.dispatch import use_backend

PROMPTS = {1: list(range(30, 50)), 2: [7, 8, 9], 3: list(range(100, 116))}


def prefilled(requests, rows=16):
    for request, ids in PROMPTS.items():
        requests.prefill(request, ids, rows)
    return requests


def is_written(cache):
    """Which slots hold something, `[num_blocks, num_layers, 2, num_kv_heads, block_size]`."""
    layout = cache.layout
    tiles = cache.data.view(*cache.data.shape[:4], layout.block_size, layout.head_dim)
    return ~tiles.isnan().any(-1)


def test_a_padded_graph_writes_the_slots_of_its_requests_and_no_other(requests_on):
    requests = prefilled(requests_on())
    requests.decode(1, 2, 3, num_tokens=2)
    written = is_written(requests.cache)
    expected = torch.zeros_like(written)
    for request, table in requests.tables.items():
        for position in range(len(requests.ids[request]) - 1):
            expected[table[position // 16], ..., position % 16] = True
    assert torch.equal(written, expected)


def test_graphs_of_every_size_draw_what_single_kernels_do(requests_on):
    found = []
    for sizes in ((), (1, 2, 4)):
        requests = prefilled(requests_on(sizes=sizes))
        for batch in ((1, 2, 3), (3, 1), (2,), (3, 2, 1)):
            requests.decode(*batch)
        found.append(requests.ids)
    assert found[0] == found[1]


def test_a_pending_token_is_what_the_step_before_draws(requests_on):
    expected = prefilled(requests_on())
    expected.decode(1, 2, 3)
    expected.decode(3, 1)
    expected.prefill(4, range(60, 70))
    expected.decode(1, 3)

    ahead = prefilled(requests_on())
    plans = [
        ahead.plan(*(ahead.chunk(request, len(ahead.ids[request])) for request in (1, 2, 3))),
        ahead.plan(*(ahead.chunk(request, len(ahead.ids[request]) + 1, [PENDING_TOKEN]) for request in (3, 1))),
    ]
    ahead.ids[4] = list(range(60, 70))
    plans.append(
        ahead.plan(
            ahead.chunk(4, 10),
            *(ahead.chunk(request, len(ahead.ids[request]) + 2, [PENDING_TOKEN]) for request in (1, 3)),
        )
    )
    first, second = (ahead.runner.launch(plan) for plan in plans[:2])
    ahead.keep(first.result())
    third = ahead.runner.launch(plans[2])
    ahead.keep(second.result())
    ahead.keep(third.result())
    assert ahead.ids == expected.ids


def test_blocks_are_stored_before_they_are_copied_over_and_loaded_before_they_are_read(requests_on):
    expected = prefilled(requests_on())
    expected.decode(1, num_tokens=2)

    buffers = []

    def host(layout):
        buffers.append(HostBuffer(4, layout))
        return buffers[0]

    requests = prefilled(requests_on(host=host))
    first, second = requests.tables[1]
    requests.runner.execute(Plan(0, (), (), 16, [BlockMove(first, 2), BlockMove(second, 0)]))
    stored, held = buffers[0].slots[[2, 0]], requests.cache.data[[first, second]]
    assert torch.equal(stored.view(torch.int32), held.view(torch.int32))
    requests.cache.data[[first, second]] = float("nan")
    # The blocks are moved elsewhere, and from there the partial one to its new place.
    full, between, partial = (requests.free_block() for _ in range(3))
    requests.tables[1] = [full, partial]
    requests.runner.execute(Plan(0, (), (), 16, loads=[BlockMove(full, 2), BlockMove(between, 0)]))
    chunk = requests.chunk(1, len(requests.ids[1]))
    requests.keep(requests.runner.execute(Plan(0, (chunk,), [BlockCopy(between, partial)], 16)))
    requests.decode(1)
    assert requests.ids == expected.ids


@pytest.fixture(scope="module")
def exact(requests_on):
    """A prompt and its answer in 32 bits."""
    with use_backend("gpu"):
        requests = requests_on(has_logprobs=True, sizes=())
        requests.prefill(1, PROMPTS[1])
        requests.decode(1, num_tokens=2)
    return requests


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "weights", "tolerance"),
    [
        ("bfloat16", "bfloat16", "bf16", 0.25),
        ("float16", "int8", "fp16", 0.2),
        ("bfloat16", "float8_e4m3fn", "int8", 0.5),
    ],
)
def test_other_formats_are_close_to_32_bits(requests_on, exact, dtype, kv_dtype, weights, tolerance):
    requests = requests_on(dtype, kv_dtype, weights, has_logprobs=True, sizes=())
    requests.prefill(1, PROMPTS[1])
    # The tokens of the exact answer are fed, so that one near tie does not part the two.
    for token in exact.ids[1][len(PROMPTS[1]) : -1]:
        requests.ids[1][-1] = token
        requests.decode(1)
    assert requests.logprobs[1] == pytest.approx(exact.logprobs[1], abs=tolerance)


def test_a_deterministic_answer_does_not_depend_on_what_is_beside_it_or_how_its_prompt_is_cut(requests_on):
    alone = requests_on("float16", weights="fp16", is_deterministic=True, has_logprobs=True, sizes=(1, 4))
    alone.prefill(1, PROMPTS[1])
    alone.decode(1, num_tokens=3)
    assert len(alone.logprobs[1]) == 4
    crowded = requests_on("float16", weights="fp16", is_deterministic=True, has_logprobs=True, sizes=(1, 4))
    crowded.prefill(2, PROMPTS[2])
    crowded.prefill(1, PROMPTS[1], rows=7)
    crowded.decode(2, 1)
    crowded.ids[3] = PROMPTS[3]
    crowded.step(crowded.chunk(2, len(crowded.ids[2])), crowded.chunk(3, 16), crowded.chunk(1, len(crowded.ids[1])))
    crowded.decode(3, 1, 2)
    assert (crowded.ids[1], crowded.logprobs[1]) == (alone.ids[1], alone.logprobs[1])


def test_after_a_step_that_failed_tables_are_sent_anew(requests_on, monkeypatch):
    expected = prefilled(requests_on())
    expected.decode(1, 2, num_tokens=2)
    requests = prefilled(requests_on())
    requests.decode(1, 2)
    plan = requests.plan(*(requests.chunk(request, len(requests.ids[request])) for request in (2, 1)))
    with monkeypatch.context() as patched:
        patched.setattr(requests.runner._sampler, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requests.runner.execute(plan)
    requests.keep(requests.runner.execute(plan))
    assert requests.ids == expected.ids
