"""How long work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from chatd_kernels.stream import Stream

NUM_IN_RUN = 4


def seconds_of(
    work: Callable[[], object], stream: Stream, *, budget_s: float = 0.2, num_in_run: int | None = None
) -> float:
    """Median seconds of the device's part of some work, run again and again for about so long.

    Runs are replayed from a graph, several in one, so that what the host does for a launch takes no part in it.

    Args:
        work: Puts kernels into the stream, the same ones every time.
        stream: Where it runs.
        budget_s: For all runs that count.
        num_in_run: Times of the work in one graph.
    """
    count = NUM_IN_RUN if num_in_run is None else num_in_run

    def several() -> None:
        for _ in range(count):
            work()

    stream.run(several).wait()
    replay = stream.capture(several)
    stream.run(replay).wait()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while not times or time.perf_counter() < end:
        ended = stream.run(replay)
        ended.wait()
        times.append(ended.seconds)
    return statistics.median(times) / count
