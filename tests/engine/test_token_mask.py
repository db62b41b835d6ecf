"""No token id is in a masked record, and equal ids are equal numbers."""

from dataclasses import fields

import msgspec

from chatd.engine.messages import (
    Beams,
    BeamSequence,
    Cancel,
    EngineMessage,
    Erase,
    EraseTenant,
    FinishReason,
    FrontMessage,
    LeaseId,
    Pong,
    Submit,
    TokenDelta,
    Tokens,
)
from chatd.engine.plan import RequestId, StepOutput, TokenLogprobs
from chatd.engine.sampling import SamplingParams
from chatd.engine.token_mask import TokenMask
from chatd.testing.engine import engine_config

ONE = RequestId(1)


def submit(ids: list[int], **params: object) -> Submit:
    return Submit(ONE, LeaseId(1), "acme", 0, ids, SamplingParams(max_tokens=4, **params))  # type: ignore[arg-type]


def test_ids_are_numbered_in_the_order_of_their_first_appearance() -> None:
    mask = TokenMask(1000)
    config = mask.config(engine_config(eos_token_ids=frozenset({900, 800})))
    assert config.eos_token_ids == {0, 1}
    asked = mask.front(submit([500, 600, 500, 800], stop_token_ids=(900, 700), logit_bias=((600, 2.0),)))
    assert isinstance(asked, Submit)
    assert asked.new_ids == [2, 3, 2, 0]
    assert asked.params.stop_token_ids == (1, 4)
    assert asked.params.logit_bias == ((3, 2.0),)
    erased = mask.front(Erase(LeaseId(1), "acme", [600, 500, -1, 1000]))
    assert erased == Erase(LeaseId(1), "acme", [*mask.ids([600, 500]), -1, 1000])
    # The names of blocks are made with a secret, and only their number is looked at.
    left = mask.front(EraseTenant(LeaseId(1), "acme", [b"s" * 32, b"t" * 32]))
    assert left == EraseTenant(LeaseId(1), "acme", [bytes(32), bytes(31) + b"\1"])
    output = mask.output(StepOutput({ONE: 500}, {ONE: TokenLogprobs(-1.0, ((500, -1.0), (999, -2.0)))}, {}, 1.0))
    assert output == StepOutput({ONE: 2}, {ONE: TokenLogprobs(-1.0, ((2, -1.0), (5, -2.0)))}, {}, 1.0)
    output = mask.output(StepOutput({}, candidates={ONE: [(800, -1.0), (998, -2.0)]}))
    assert output == StepOutput({}, candidates={ONE: [(0, -1.0), (6, -2.0)]})
    said = mask.engine(Tokens(3, [TokenDelta(ONE, [500], [(-1.0, [(999, -2.0)])]), TokenDelta(ONE, [999])]))
    assert said == Tokens(3, [TokenDelta(ONE, [2], [(-1.0, [(5, -2.0)])]), TokenDelta(ONE, [5])])
    beams = mask.engine(Beams(ONE, [BeamSequence([600, 1], -1.0, FinishReason.STOP)]))
    assert beams == Beams(ONE, [BeamSequence([3, 7], -1.0, FinishReason.STOP)])


def test_ids_out_of_range_are_told_as_far_as_their_refusal_names_them() -> None:
    mask = TokenMask(1000)
    asked = mask.front(submit([500, -3, 1000, 600], stop_token_ids=(1000,)))
    assert isinstance(asked, Submit)
    assert asked.new_ids == [-3, 1000]
    assert asked.params.stop_token_ids == (1000,)


def test_what_has_no_tokens_stays() -> None:
    mask = TokenMask(1000)
    assert mask.front(Cancel(ONE)) == Cancel(ONE)
    assert mask.engine(Pong(1)) == Pong(1)


def test_every_place_where_a_token_can_stand_is_known() -> None:
    """A new field with token ids must be masked; one without is added here."""
    with_ids = {"new_ids", "token_ids", "digests", "params", "deltas", "sequences"}
    quiet = {
        *("request", "lease", "new_lease", "tenant", "base_len", "request_class", "keep_lease", "compute_only"),
        *("sample_of", "beam", "at", "length", "attached", "interval_s", "with_map", "with_leases", "weight", "floor"),
        *("nonce", "phase", "progress", "num_blocks", "block_size", "max_model_len", "vocab_size", "kv_bytes"),
        *("quantization", "notes", "num_prompt_tokens", "num_cached_tokens", "queue_s", "done", "total", "resumed"),
        *("step", "reason", "num_output_tokens", "timings", "error_code", "error_message", "num_shared", "tier", "why"),
        *("num_tokens_kept", "position", "num_free", "num_cached", "num_active", "num_evictions"),
        *("output_tokens_per_s", "num_running", "num_waiting", "tenants", "leases", "states", "owners", "tiers"),
        *("steps", "step_s", "model_s", "num_preemptions", "num_failed_steps", "integrity_errors", "num_swapped"),
        *("forget", "num_host_blocks", "num_disk_blocks"),
        *("num_joins", "num_held", "num_tokens", "move_s", "num_oversized_steps", "code", "message", "exit_code"),
        *("num_answered", "is_suspect"),
        *("question", "first", "blocks", "num_public", "num_wanted_again"),
    }
    messages = (*FrontMessage.__args__, *EngineMessage.__args__)
    found = {field.name for message in messages for field in msgspec.structs.fields(message)}
    assert found - quiet == with_ids
    assert {field.name for field in fields(StepOutput)} == {
        "sampled",
        "logprobs",
        "failed",
        "model_s",
        "move_s",
        "candidates",
    }
