"""Which request has which slot of the device's sampling state, and what a step has to change there.

The device goes on by itself: a draw moves its slot's position on and counts the token. So a request that draws at each
step needs nothing from here. Where a request comes at another position than its slot is at (it was preempted, or a step
was discarded), or is new, its slot is written anew from its ids. Knows no device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chatd.engine.plan import RequestId, SampleSpec
from chatd.engine.sampling import SamplingParams
from chatd_kernels.sampling import state

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(slots=True)
class SlotChanges:
    """What a step writes before it draws.

    Attributes:
        row_slots: `[max_num_rows]` the slot of each row, -1 for rows that are not drawn; None where it is as before.
        slots: Whose fields change.
        fields: One `[NUM_FIELDS]` for each of them.
        words: (slot, `[vocab_size]`) of slots whose histories, biases or forbidden ids are written anew.
        biases: (slot, `[MAX_BIASES]`) of those that have some.
    """

    row_slots: Int32s | None = None
    slots: list[int] = field(default_factory=list)
    fields: list[Int32s] = field(default_factory=list)
    words: list[tuple[int, Int32s]] = field(default_factory=list)
    biases: list[tuple[int, Float32s]] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """What the device has of a request; a position of -1 is that of a slot never written."""

    index: int
    params: SamplingParams
    position: int = -1
    stop_token_ids: tuple[int, ...] = ()
    is_forbidding: bool = False


class SamplingSlots:
    """The slots.

    Args:
        num_slots: At least as many as there are rows.
        max_num_rows: Requests of a step.
        vocab_size: Ids are below this.
    """

    def __init__(self, num_slots: int, max_num_rows: int, vocab_size: int) -> None:
        assert num_slots >= max_num_rows, f"{num_slots} slots for {max_num_rows} rows"
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._row_slots: Int32s = np.full(max_num_rows, -1, dtype=np.int32)
        self._slots: OrderedDict[RequestId, _Slot] = OrderedDict()
        self._free: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Take nothing as known of the device: every request is written anew when it comes."""
        self._slots.clear()
        self._free = list(reversed(range(self._num_slots)))
        self._row_slots[:] = -2

    def place(self, specs: Sequence[tuple[RequestId, SampleSpec]]) -> SlotChanges:
        """Return what has to change for a step, and take it as done; its draws too."""
        changes = SlotChanges()
        slots = self._slots
        for request_id, _ in specs:
            if request_id in slots:
                slots.move_to_end(request_id)
        rows = np.full_like(self._row_slots, -1)
        for row, (request_id, spec) in enumerate(specs):
            slot = slots.get(request_id)
            if slot is None:
                slot = slots[request_id] = _Slot(self._claim(), spec.params)
            rows[row] = slot.index
            if (
                slot.position != spec.output_position
                or slot.is_forbidding != bool(spec.stop_token_ids)
                or slot.params is not spec.params
                or spec.num_candidates
            ):
                self._write(slot, spec, changes)
            if not spec.num_candidates:
                slot.position += 1
        if not np.array_equal(rows, self._row_slots):
            self._row_slots[:] = rows
            changes.row_slots = rows
        return changes

    def _claim(self) -> int:
        if self._free:
            return self._free.pop()
        # Whoever was drawn longest ago; not one of this step's.
        return self._slots.popitem(last=False)[1].index

    def _write(self, slot: _Slot, spec: SampleSpec, changes: SlotChanges) -> None:
        params = spec.params
        is_fresh = slot.position < 0 or slot.params is not params or bool(spec.num_candidates)
        has_moved = params.needs_history and slot.position != spec.output_position
        if is_fresh or has_moved or (spec.stop_token_ids and slot.stop_token_ids != spec.stop_token_ids):
            if params.needs_history or params.logit_bias or spec.stop_token_ids:
                words, biases = _contents(spec, self._vocab_size)
                changes.words.append((slot.index, words))
                if biases is not None:
                    changes.biases.append((slot.index, biases))
            slot.stop_token_ids = spec.stop_token_ids
        slot.params, slot.position, slot.is_forbidding = params, spec.output_position, bool(spec.stop_token_ids)
        changes.slots.append(slot.index)
        changes.fields.append(_fields(spec, self._vocab_size))


def _fields(spec: SampleSpec, vocab_size: int) -> Int32s:
    params = spec.params
    adjusts = bool(params.needs_history or params.logit_bias or spec.stop_token_ids)
    flags = (
        state.IS_GREEDY * params.is_greedy
        | state.ADJUSTS * adjusts
        | state.COUNTS * (params.needs_history and not spec.num_candidates)
        | state.FORBIDS * bool(spec.stop_token_ids)
        | state.HAS_LOGPROBS * (params.logprobs is not None)
        | state.IS_BEAM * bool(spec.num_candidates)
    )
    return state.pack_slot(
        flags=flags,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k < vocab_size else 0,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        position=spec.output_position,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        num_likeliest=min(spec.num_candidates or params.logprobs or 0, vocab_size),
    )


def _contents(spec: SampleSpec, vocab_size: int) -> tuple[Int32s, Float32s | None]:
    """Return the words of a slot, and its biases if there are some."""
    params = spec.params
    words = np.zeros(vocab_size, dtype=np.uint32)
    if params.needs_history:
        # A pending token would be known to the slot, which has drawn it: then nothing is written anew.
        assert len(spec.output_ids) >= spec.output_position, "the history of a request lacks a token"
        answer = np.asarray(spec.output_ids[: spec.output_position], dtype=np.int64)
        words += np.minimum(np.bincount(answer, minlength=vocab_size), state.STOP_BIT - 1).astype(np.uint32)
        words[np.asarray(spec.prompt_ids, dtype=np.int64)] |= np.uint32(state.PROMPT_BIT)
    if spec.stop_token_ids:
        words[list(spec.stop_token_ids)] |= np.uint32(state.STOP_BIT)
    biases = None
    if params.logit_bias:
        biases = np.zeros(state.MAX_BIASES, dtype=np.float32)
        places: dict[int, int] = {}
        for token_id, bias in params.logit_bias:
            biases[places.setdefault(token_id, len(places))] += np.float32(bias)
        ids = np.fromiter(places, dtype=np.int64, count=len(places))
        words[ids] |= np.arange(1, len(places) + 1, dtype=np.uint32) << np.uint32(state.BIAS_SHIFT)
    return words.view(np.int32), biases
