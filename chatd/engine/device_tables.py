"""The block tables of requests on the device: brought up to a plan's by what changed since the step before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chatd.engine.plan import BlockId, Chunk, RequestId


class _Row:
    """A request's place among the tables, and the ids that are there."""

    __slots__ = ("ids", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[BlockId] = []


class DeviceTables:
    """Knows what each row of the tables on the device holds once all that was planned has run.

    The plan is the truth: between steps blocks are appended, but preemption, a trim or an adopted block changes others
    too. So the ids are compared, and from the first one on that differs they are sent anew.

    Args:
        num_rows: Of the tables; at least the requests of one step. With more a request that was preempted finds its
            table again.
        max_blocks: Ids of a row.

    Attributes:
        host: `[num_rows, max_blocks]` int32, the same tables on the host.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.host: npt.NDArray[np.int32] = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._rows: OrderedDict[RequestId, _Row] = OrderedDict()

    def place(
        self, chunks: Sequence[Chunk]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Bring the host's tables up to the chunks'.

        Returns:
            The row of each chunk's request; and where the device's tables change, counted through all rows, and what
            goes there.
        """
        rows = np.empty(len(chunks), dtype=np.int64)
        changes: list[npt.NDArray[np.int64]] = []
        max_blocks = self.host.shape[1]
        # Those of this step are not to lose their places to each other.
        for chunk in chunks:
            if chunk.request_id in self._rows:
                self._rows.move_to_end(chunk.request_id)
        for place, chunk in enumerate(chunks):
            row = self._row(chunk.request_id)
            rows[place] = row.index
            first = row_change(row.ids, chunk.block_ids)
            end = len(chunk.block_ids)
            if first < end:
                self.host[row.index, first:end] = row.ids[first:]
                changes.append(np.arange(row.index * max_blocks + first, row.index * max_blocks + end))
        where = np.concatenate(changes) if changes else np.empty(0, dtype=np.int64)
        return rows, where, self.host.reshape(-1)[where]

    def forget(self) -> None:
        """Send every table anew: it is not known any more what the device has."""
        for row in self._rows.values():
            row.ids.clear()

    def _row(self, request_id: RequestId) -> _Row:
        row = self._rows.get(request_id)
        if row is None:
            if len(self._rows) < len(self.host):
                row = _Row(len(self._rows))
            else:
                _, row = self._rows.popitem(last=False)
                row.ids.clear()
            self._rows[request_id] = row
        return row


def row_change(ids: list[BlockId], wanted: Sequence[BlockId]) -> int:
    """Make `ids` what is wanted, and return the first index at which they differed."""
    if ids == wanted:
        return len(ids)
    num_known, num_wanted = len(ids), len(wanted)
    if num_known < num_wanted and ids == wanted[:num_known]:
        ids.extend(wanted[num_known:])
        return num_known
    first = next(
        (i for i, (known, new) in enumerate(zip(ids, wanted, strict=False)) if known != new),
        min(num_known, num_wanted),
    )
    ids[first:] = wanted[first:]
    return first
