"""Requests that are preempted on a running engine, by what `auto` takes and with one way forced."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, Literal

from chatd.bench.preemption_copies import token_bytes_of
from chatd.bench.real_engine import RealEngine
from chatd.engine.messages import WaitReason
from chatd.engine.request import Request

Mode = Literal["auto", "swap", "recompute"]
MODES: tuple[Mode, ...] = ("auto", "swap", "recompute")
_BLOCK = 16
_HOST_BYTES = 2**29


def force(engine: RealEngine, mode: Mode) -> None:
    """Have an engine preempt in one way from now on; one that serves does not change its ways."""
    object.__setattr__(engine.core.config, "preemption", mode)


class _Prompts:
    """Random prompts, no two alike."""

    def __init__(self, engine: RealEngine, seed: int) -> None:
        self._vocab_size = engine.ready.vocab_size
        self._rng = random.Random(seed)

    def __call__(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(10, self._vocab_size) for _ in range(num_tokens)]


def slot_episodes(model: str, quantization: str, victim_tokens: int, episodes: int) -> dict[str, Any]:
    """A caller takes the slot of a long request for a moment: seconds from its arrival to the victim's next token.

    The victim's blocks stay in the cache, so computing "again" is next to nothing, and that is what `auto` does.
    """
    engine = RealEngine(model, quantization, max_num_seqs=2, host_memory_bytes=_HOST_BYTES)
    prompt = _Prompts(engine, 2)
    engine.submit(0, prompt(_BLOCK), max_tokens=100_000, tenant="writers")
    engine.step()
    engine.submit(1, prompt(victim_tokens), max_tokens=100_000, tenant="writers")
    while 1 not in engine.outputs:
        engine.step()
    seconds: dict[Mode, list[float]] = {"auto": [], "swap": []}
    move_s: dict[Mode, list[float]] = {"auto": [], "swap": []}
    swapped: dict[Mode, int] = {"auto": 0, "swap": 0}
    scheduler = engine.core.scheduler
    for episode in range(2 * episodes):
        mode: Mode = "swap" if episode % 2 else "auto"
        for _ in range(4):
            engine.step()
        # Each time as the first time: what was saved once need not be copied again.
        engine.core.tiers.clear()
        force(engine, mode)
        preempted, swapped_before = scheduler.num_preemptions, scheduler.num_swapped
        caller, num_output, moved_before = 2 + episode, len(engine.outputs[1]), engine.runner.move_s
        started = time.perf_counter()
        engine.submit(caller, prompt(_BLOCK), max_tokens=1, tenant="callers")
        while caller not in engine.done or len(engine.outputs[1]) == num_output:
            engine.step()
        seconds[mode].append(time.perf_counter() - started)
        move_s[mode].append(engine.runner.move_s - moved_before)
        assert scheduler.num_preemptions == preempted + 1, "not one request was preempted"
        swapped[mode] += scheduler.num_swapped - swapped_before
    figures = {"victim_tokens": victim_tokens, "episodes": episodes, "auto_swapped": swapped["auto"], "forced": "swap"}
    return figures | _medians(seconds, move_s, "swap")


def block_episodes(model: str, quantization: str, num_blocks: int, episodes: int) -> dict[str, Any]:
    """A caller takes blocks of a long request: seconds of its copies, and from the caller's end to the victim's token.

    The victim holds most of the pool; the caller stays within its half, and needs more than what is left.
    """
    room = num_blocks * _BLOCK * token_bytes_of(model)
    engine = RealEngine(model, quantization, kv_memory_bytes=room, host_memory_bytes=_HOST_BYTES, max_model_len=4096)
    prompt, scheduler = _Prompts(engine, 3), engine.core.scheduler
    held, needed = int(0.8 * num_blocks) * _BLOCK, int(0.48 * num_blocks) * _BLOCK
    seconds: dict[Mode, list[float]] = {"auto": [], "recompute": []}
    move_s: dict[Mode, list[float]] = {"auto": [], "recompute": []}
    swapped: dict[Mode, int] = {"auto": 0, "recompute": 0}
    for episode in range(2 * episodes):
        mode: Mode = "recompute" if episode % 2 else "auto"
        force(engine, mode)
        victim, caller = 2 * episode, 2 * episode + 1
        engine.submit(victim, prompt(held - _BLOCK), max_tokens=64, tenant="writers")
        while len(engine.outputs.get(victim, ())) < 4:
            engine.step()
        preempted, swapped_before = scheduler.num_preemptions, scheduler.num_swapped
        moved_before, num_output = engine.runner.move_s, len(engine.outputs[victim])
        engine.submit(caller, prompt(needed - _BLOCK), max_tokens=2, tenant="callers")
        while caller not in engine.done:
            engine.step()
        stored_s = engine.runner.move_s - moved_before
        while len(engine.outputs[victim]) == num_output:
            engine.step()
        move_s[mode].append(engine.runner.move_s - moved_before)
        seconds[mode].append(stored_s + engine.last_token_s[victim] - engine.done_s[caller])
        assert scheduler.num_preemptions == preempted + 1, "not one request was preempted"
        swapped[mode] += scheduler.num_swapped - swapped_before
        engine.run()
    figures = {"victim_tokens": held, "episodes": episodes, "auto_swapped": swapped["auto"], "forced": "recompute"}
    return figures | _medians(seconds, move_s, "recompute")


def _medians(seconds: dict[Mode, list[float]], move_s: dict[Mode, list[float]], forced: Mode) -> dict[str, float]:
    return {
        "auto_s": statistics.median(seconds["auto"]),
        "auto_move_s": statistics.median(move_s["auto"]),
        "forced_s": statistics.median(seconds[forced]),
        "forced_move_s": statistics.median(move_s[forced]),
    }


def serve_load(model: str, quantization: str, *, num_writers: int, repeats: int) -> list[dict[str, Any]]:
    """Serve writers whose answers outgrow the pool, and callers that take slots, in each mode; medians of repeats."""
    prompt_tokens, output_tokens, num_seqs, every = 256, 224, 3, 40
    # Room for the prompts of all that run, and not for all of their answers.
    num_blocks = int(0.8 * num_seqs * (prompt_tokens + output_tokens) / _BLOCK)
    engine = RealEngine(
        model,
        quantization,
        kv_memory_bytes=num_blocks * _BLOCK * token_bytes_of(model),
        host_memory_bytes=_HOST_BYTES,
        max_num_seqs=num_seqs,
    )
    prompt = _Prompts(engine, 4)
    count = _SlotCount(engine)
    runs: dict[Mode, list[dict[str, float]]] = {mode: [] for mode in MODES}
    number = 0
    for repeat in range(repeats):
        for mode in MODES[repeat % 3 :] + MODES[: repeat % 3]:
            force(engine, mode)
            engine.core.tiers.clear()
            before = _state(engine, count)
            writers = range(number, number + num_writers)
            for writer in writers:
                engine.submit(writer, prompt(prompt_tokens), max_tokens=output_tokens, tenant="writers")
            number += num_writers
            started, steps, callers = time.perf_counter(), 0, 0
            while any(writer not in engine.done for writer in writers):
                if steps % every == every - 1:
                    engine.submit(number, prompt(24), max_tokens=4, tenant="callers")
                    number += 1
                    callers += 1
                engine.step()
                steps += 1
            wall_s = time.perf_counter() - started
            engine.run()
            after = _state(engine, count)
            done = num_writers * (prompt_tokens + output_tokens - 1) + callers * (24 + 4 - 1)
            run = {name: after[name] - before[name] for name in after}
            runs[mode].append({"wall_s": wall_s, "rows_again": run.pop("rows") - done, "callers": callers, **run})
    return [
        {"mode": mode, **{name: statistics.median(run[name] for run in same) for name in same[0]}}
        for mode, same in runs.items()
    ]


class _SlotCount:
    """Counts preemptions for a slot."""

    def __init__(self, engine: RealEngine) -> None:
        self.number = 0
        self._preempt = engine.core.scheduler.roster.preempt
        engine.core.scheduler.roster.preempt = self  # type: ignore[method-assign]

    def __call__(self, victim: Request, winner: Request, why: WaitReason = WaitReason.NO_BLOCKS) -> None:
        self.number += why is WaitReason.SLOTS
        self._preempt(victim, winner, why)


def _state(engine: RealEngine, count: _SlotCount) -> dict[str, float]:
    scheduler, runner = engine.core.scheduler, engine.runner
    return {
        "for_slots": count.number,
        "for_blocks": scheduler.num_preemptions - count.number,
        "swapped": scheduler.num_swapped,
        "blocks_out": runner.num_stored,
        "blocks_in": runner.num_loaded,
        "move_s": runner.move_s,
        "rows": runner.num_rows,
    }
