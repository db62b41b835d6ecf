"""How much of the allocated KV memory holds no token: `python -m chatd.bench waste`.

The recorded MT-bench conversations are held with the engine core, on a runner that computes nothing and a clock that
only the steps and pauses move. Sessions keep their blocks between turns, under their leases, until they are closed a
pause after the last turn. Allocated slots are those of all blocks that somebody holds, each counted once; empty ones
are those behind the last token of each session. Both are summed over time, from the first block of turn 1 on.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatd.bench.echo_runner import EchoRunner
from chatd.bench.lengths import LENGTHS, Lengths, Turn, load_lengths
from chatd.bench.record import write_json
from chatd.engine.core import EngineConfig, EngineCore
from chatd.engine.messages import Done, LeaseId, Release, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import SamplingParams
from chatd.kvcache.block_table import BlockTable
from chatd.kvcache.prefix_index import Namespace

GOAL = 0.04
_NAMESPACE = Namespace("bench", "fp16", "float16", 1, None, None)


@dataclass(slots=True)
class Slots:
    """Slot-seconds."""

    allocated: float = 0.0
    empty: float = 0.0

    @property
    def waste(self) -> float:
        """The share of the allocated ones that holds no token."""
        return self.empty / self.allocated


class Conversations:
    """Holds conversations with an engine core; time moves by steps, and jumps where nothing runs.

    Args:
        lengths: What is said in them.
        block_size: Tokens of a block.
        step_s: Seconds of a step.
        pause_s: Seconds between an answer and what the user says to it, in the mean.
        gap_s: Seconds between two conversations' beginnings, in the mean.
    """

    def __init__(self, lengths: Lengths, block_size: int, *, step_s: float, pause_s: float, gap_s: float) -> None:
        self._conversations = lengths.conversations
        self._block_size = block_size
        self._step_s = step_s
        self._pause_s = pause_s
        self._rng = random.Random(0)
        self._shared = [self._rng.getrandbits(30) for _ in range(lengths.num_shared)]
        longest = max(sum(turn.num_prompt + turn.num_output for turn in turns) for turns in lengths.conversations)
        config = EngineConfig(
            num_blocks=len(lengths.conversations) * (longest // block_size + 2),
            namespace=_NAMESPACE,
            max_model_len=longest + 1,
            block_size=block_size,
            max_num_seqs=len(lengths.conversations),
        )
        self._core = EngineCore(config, EchoRunner(), lambda: 0.0)
        # (when, conversation, turn); a turn after the last one closes the session.
        self._due: list[tuple[float, int, int]] = []
        start = 0.0
        for number in range(len(lengths.conversations)):
            self._due.append((start, number, 0))
            start += self._rng.expovariate(1 / gap_s)
        self.slots = Slots()
        self.in_first_turn = Slots()
        self.most_sessions = 0

    def run(self) -> None:
        """Hold all of them."""
        now = 0.0
        while self._due or self._core.has_work:
            while self._due and self._due[0][0] <= now:
                _, number, turn = heapq.heappop(self._due)
                self._begin(number, turn, now)
            if self._core.has_work:
                for message in self._core.step(now):
                    if isinstance(message, Done):
                        number, turn = divmod(message.request, 1000)
                        pause_s = self._rng.expovariate(1 / self._pause_s)
                        heapq.heappush(self._due, (now + self._step_s + pause_s, number, turn + 1))
                seconds = self._step_s
            else:
                seconds = self._due[0][0] - now if self._due else 0.0
            self._count(seconds)
            now += seconds

    def _begin(self, number: int, turn: int, now: float) -> None:
        turns = self._conversations[number]
        lease = self._core.leases.get(number)
        if turn == len(turns):
            self._core.handle(Release(LeaseId(number)), now)
            return
        held = 0 if lease is None else len(lease.token_ids)
        ids = self._shared[: turns[turn].num_prompt] if turn == 0 else []
        ids += [self._rng.getrandbits(30) for _ in range(turns[turn].num_prompt - len(ids))]
        params = SamplingParams(max_tokens=turns[turn].num_output, ignore_eos=True)
        request = RequestId(1000 * number + turn)
        self._core.handle(Submit(request, LeaseId(number), "bench", held, ids, params), now)

    def _count(self, seconds: float) -> None:
        """Count the slots as they are now for so long."""
        size = self._block_size
        leases = list(self._core.leases)
        empty = {lease.lease_id: _empty_slots(lease.table, size) for lease in leases}
        self.slots.allocated += seconds * size * self._core.pool.num_active
        self.slots.empty += seconds * sum(empty.values())
        for lease in leases:
            if len(lease.token_ids) <= self._first_turn_end(self._conversations[lease.lease_id]):
                self.in_first_turn.allocated += seconds * size * len(lease.table.block_ids)
                self.in_first_turn.empty += seconds * empty[lease.lease_id]
        self.most_sessions = max(self.most_sessions, len(leases))

    @staticmethod
    def _first_turn_end(turns: Sequence[Turn]) -> int:
        return turns[0].num_prompt + turns[0].num_output


def _empty_slots(table: BlockTable, block_size: int) -> int:
    return len(table.block_ids) * block_size - table.num_computed_tokens


def cut(lengths: Lengths, most: int) -> Lengths:
    """Return the same conversations with answers of at most so many tokens."""
    conversations = [
        [Turn(turn.num_prompt, min(turn.num_output, most)) for turn in turns] for turns in lengths.conversations
    ]
    return Lengths(conversations, lengths.num_shared)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Hold the conversations at each block size."""
    recorded = load_lengths(options.lengths)
    rows = []
    for lengths in (recorded, cut(recorded, options.cut)):
        mean_output = statistics.mean(turn.num_output for turns in lengths.conversations for turn in turns)
        for size in options.block_size:
            held = Conversations(lengths, size, step_s=options.step_s, pause_s=options.pause_s, gap_s=options.gap_s)
            held.run()
            rows.append(
                {
                    "block_size": size,
                    "mean_output": mean_output,
                    "waste": held.slots.waste,
                    "waste_first_turn": held.in_first_turn.waste,
                    "most_sessions": held.most_sessions,
                }
            )
    return {
        "goal": GOAL,
        "cut": options.cut,
        "conversations": len(recorded.conversations),
        "step_s": options.step_s,
        "pause_s": options.pause_s,
        "gap_s": options.gap_s,
        "blocks": rows,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench waste", description=__doc__)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="what `lengths` has recorded")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--cut", type=int, default=128, help="once more with answers of at most so many tokens")
    parser.add_argument("--step-s", type=float, default=0.04, help="seconds of a step")
    parser.add_argument("--pause-s", type=float, default=20.0, help="mean seconds before a user's next message")
    parser.add_argument("--gap-s", type=float, default=2.0, help="mean seconds between two conversations' beginnings")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    figures = measure(options)
    print(f"{'answers':>12}{'block size':>12}{'waste':>12}{'in turn 1':>12}   goal < {GOAL:.0%} at 16")
    for row in figures["blocks"]:
        shares = f"{row['waste']:>12.2%}{row['waste_first_turn']:>12.2%}"
        print(f"{row['mean_output']:>12.0f}{row['block_size']:>12}{shares}")
    write_json(options.json, "waste", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
