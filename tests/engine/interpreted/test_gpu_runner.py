"""One step after another on the GPU's path: padding, pending tokens, moves, formats, and steps that fail."""

import pytest
import torch

from chatd.engine.host_buffer import HostBuffer
from chatd.engine.plan import PENDING_TOKEN, BlockCopy, BlockMove, DeviceFault, Plan, StepTooLarge
from chatd_kernels.dispatch import use_backend

PROMPTS = {1: list(range(30, 50)), 2: [7, 8, 9], 3: list(range(100, 116)), 4: list(range(60, 70))}


@pytest.fixture(scope="module")
def answers(requests_on):
    """What follows each prompt, computed by kernels that are started one by one."""
    with use_backend("gpu"):
        requests = prefilled(requests_on(sizes=()), 1, 2, 3, 4)
        requests.decode(1, 2, 3, 4, num_tokens=4)
    return {request: ids[len(PROMPTS[request]) :] for request, ids in requests.ids.items()}


def prefilled(requests, *numbers):
    for request in numbers:
        requests.prefill(request, PROMPTS[request])
    return requests


def has_answered(requests, answers, **num_tokens):
    """Whether requests have the first tokens of their answers, so many of each."""
    found = {request: ids[len(PROMPTS[request]) :] for request, ids in requests.ids.items()}
    return found == {int(name[1:]): answers[int(name[1:])][:count] for name, count in num_tokens.items()}


def is_written(cache):
    """Which slots hold something, `[num_blocks, num_layers, 2, num_kv_heads, block_size]`."""
    layout = cache.layout
    tiles = cache.data.view(*cache.data.shape[:4], layout.block_size, layout.head_dim)
    return ~tiles.isnan().any(-1)


def test_a_padded_graph_writes_the_slots_of_its_requests_and_no_other(requests_on):
    requests = prefilled(requests_on(), 1, 2, 3)
    requests.decode(1, 2, 3)
    written = is_written(requests.cache)
    expected = torch.zeros_like(written)
    for request, table in requests.tables.items():
        for position in range(len(requests.ids[request]) - 1):
            expected[table[position // 16], ..., position % 16] = True
    assert torch.equal(written, expected)


def test_graphs_of_every_size_draw_what_single_kernels_do(requests_on, answers):
    requests = prefilled(requests_on(), 1, 2, 3)
    for batch in ((1, 2, 3), (3, 1), (2,), (3, 2, 1)):
        requests.decode(*batch)
    assert has_answered(requests, answers, r1=4, r2=4, r3=4)


def test_a_pending_token_is_what_the_step_before_draws(requests_on, answers):
    requests = prefilled(requests_on(), 1, 2, 3)

    def decode(ahead, *numbers):
        pending = [PENDING_TOKEN] if ahead else None
        return [requests.chunk(number, len(requests.ids[number]) + ahead, pending) for number in numbers]

    first = requests.runner.launch(requests.plan(*decode(0, 1, 2, 3)))
    second = requests.runner.launch(requests.plan(*decode(1, 3, 1)))
    requests.keep(first.result())
    requests.ids[4] = list(PROMPTS[4])
    # Beside a prompt, which no graph takes.
    third = requests.runner.launch(requests.plan(requests.chunk(4, 10), *decode(1, 1, 3)))
    requests.keep(second.result())
    requests.keep(third.result())
    assert has_answered(requests, answers, r1=4, r2=2, r3=4, r4=1)


def test_blocks_are_stored_before_they_are_copied_over_and_loaded_before_they_are_read(requests_on, answers):
    buffers = []

    def host(layout):
        buffers.append(HostBuffer(4, layout))
        return buffers[0]

    requests = prefilled(requests_on(host=host, sizes=()), 1)
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
    # What the copy overwrites is stored by the same plan.
    requests.cache.data[partial] = 7.0
    stores = [BlockMove(partial, 3)]
    requests.keep(requests.runner.execute(Plan(0, (chunk,), [BlockCopy(between, partial)], 16, stores)))
    assert torch.equal(buffers[0].slots[3], torch.full_like(buffers[0].slots[3], 7.0))
    requests.decode(1)
    assert has_answered(requests, answers, r1=3)


@pytest.fixture(scope="module")
def exact(requests_on):
    """A prompt and its answer in 32 bits."""
    with use_backend("gpu"):
        requests = requests_on(has_logprobs=True, sizes=())
        requests.prefill(1, PROMPTS[1])
        requests.decode(1, num_tokens=2)
    return requests


# At most twice what the formats' rounding makes of it; without what attention adds the first number is 0.5 off.
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "weights", "tolerance"),
    [
        ("bfloat16", "bfloat16", "bf16", 0.12),
        ("float16", "int8", "fp16", 0.16),
        ("bfloat16", "float8_e4m3fn", "int8", 0.3),
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
    # In 32 bits, where torch's own products show in the last bits how many rows there are; 16 bits are too short.
    formats = {"is_deterministic": True, "has_logprobs": True}
    alone = requests_on(**formats, sizes=(1,))
    alone.prefill(1, PROMPTS[1])
    alone.decode(1, num_tokens=2)
    crowded = requests_on(**formats, sizes=(4,))
    crowded.prefill(2, PROMPTS[2])
    crowded.prefill(1, PROMPTS[1], rows=11)
    crowded.decode(2, 1)
    crowded.ids[3] = PROMPTS[3]
    crowded.step(crowded.chunk(2, len(crowded.ids[2])), crowded.chunk(3, 16), crowded.chunk(1, len(crowded.ids[1])))
    assert len(alone.logprobs[1]) == 3
    assert (crowded.ids[1], crowded.logprobs[1]) == (alone.ids[1], alone.logprobs[1])


def test_after_a_step_that_failed_tables_are_sent_anew(requests_on, answers, monkeypatch):
    requests = prefilled(requests_on(sizes=()), 1, 2)
    plan = requests.plan(*(requests.chunk(request, len(requests.ids[request])) for request in (2, 1)))
    with monkeypatch.context() as patched:
        patched.setattr(requests.runner._sampler, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requests.runner.execute(plan)
    requests.runner._attention.tables.fill_(23)
    requests.keep(requests.runner.execute(plan))
    assert has_answered(requests, answers, r1=2, r2=2)


@pytest.mark.parametrize(
    ("error", "is_lost", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False, StepTooLarge),
        (torch.OutOfMemoryError("CUDA out of memory"), True, DeviceFault),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, DeviceFault),
        (ValueError("a mistake of the host's"), False, ValueError),
    ],
)
def test_an_error_is_told_by_what_can_be_done_about_it(requests_on, monkeypatch, error, is_lost, raised):
    requests = requests_on(sizes=())
    requests.ids[1] = PROMPTS[2]

    def fail(*_):
        raise error

    def synchronize():
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(requests.runner._decoder, "forward", fail)
    monkeypatch.setattr(requests.runner._stream, "synchronize", synchronize)
    with pytest.raises(raised):
        requests.step(requests.chunk(1, 3))


def test_a_step_behind_one_that_failed_fails_as_well(requests_on, answers, monkeypatch):
    requests = prefilled(requests_on(sizes=()), 1)
    plans = [
        requests.plan(requests.chunk(1, len(requests.ids[1]))),
        requests.plan(requests.chunk(1, len(requests.ids[1]) + 1, [PENDING_TOKEN])),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(requests.runner._stream, "run", lambda _work: 1 / 0)
        first = requests.runner.launch(plans[0])
    second = requests.runner.launch(plans[1])
    with pytest.raises(ZeroDivisionError):
        first.result()
    # Its token was never drawn, and no other is taken in its place.
    with pytest.raises(KeyError):
        second.result()
    requests.keep(requests.runner.execute(plans[0]))
    assert has_answered(requests, answers, r1=2)
