"""Runs steps of the model on a GPU, up to two in flight: one is computed while the next one is made ready.

```
launch(plan): host     tables, positions, slots, tiles and parameters go into pinned memory
              stream   moves and copies of blocks → inputs to the device → forward → tokens drawn → tokens to the host
result():     host     waits for the step's end, and reads its tokens
```
All that a step does on the device is in one stream. So a token that the step before draws is on the device when this
step gathers it, and no memory that a step reads is written before that step has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from chatd.engine.decode_graphs import DecodeGraphs
from chatd.engine.device_sampler import DeviceSampler, SampledInFlight
from chatd.engine.device_tables import DeviceTables
from chatd.engine.host_buffer import HostBuffer
from chatd.engine.plan import (
    PENDING_TOKEN,
    BlockMove,
    Chunk,
    DeviceFault,
    Plan,
    RequestId,
    StepInFlight,
    StepOutput,
    StepTooLarge,
)
from chatd.engine.sampler import Sampled
from chatd.engine.staged_arrays import Stage, StagedArrays
from chatd.models.attention import ForwardInput
from chatd.models.decoder import Decoder
from chatd_kernels.copy_blocks import copy_blocks
from chatd_kernels.gpu_device import OutOfDeviceMemory
from chatd_kernels.paged_attention.gpu_persistent import PersistentAttention, decode_tiles
from chatd_kernels.paged_attention.gpu_schedule import GpuAttentionMetadata
from chatd_kernels.stream import Ended, Stream, Work
from chatd_kernels.swap_blocks import load_blocks, store_blocks

Int64Array = npt.NDArray[np.int64]
HostArrays = Mapping[str, npt.NDArray[np.integer]]
DeviceArrays = Mapping[str, torch.Tensor]

_TABLES_PER_SEQUENCE = 2
"""Tables on the device for each request of the largest step: one that was preempted may find its table again."""


class GpuRunner:
    """Executes and launches plans on a decoder whose KV cache is bound. Reads nothing but the plan.

    Args:
        decoder: The model, with room for the logits of `max_num_seqs` rows.
        stream: Of the device.
        max_num_seqs: Most requests of a step.
        is_deterministic: Whether a request's tokens may depend on itself alone.
        host: Where stores go and loads come from; None for plans without either.
    """

    def __init__(
        self,
        decoder: Decoder,
        stream: Stream,
        *,
        max_num_seqs: int,
        is_deterministic: bool = False,
        host: HostBuffer | None = None,
    ) -> None:
        layout = decoder.kv_cache.layout
        self._decoder = decoder
        self._stream = stream
        self._host = host
        self._layout = layout
        self._attention = PersistentAttention(
            layout,
            decoder.config.num_heads,
            stream.device,
            num_tables=_TABLES_PER_SEQUENCE * max_num_seqs,
            max_num_seqs=max_num_seqs,
            max_model_len=decoder.max_model_len,
            is_deterministic=is_deterministic,
        )
        self._tables = DeviceTables(*self._attention.tables.shape)
        # Steps of decodes alone have small arrays of their own, which the graphs read.
        num_rows = decoder.max_num_batched_tokens
        self._decodes = StagedArrays(stream, _shapes(max_num_seqs, max_num_seqs, 0))
        self._chunks = StagedArrays(
            stream, _shapes(num_rows, max_num_seqs, self._attention.most_prefill_tiles(num_rows))
        )
        self._every_row = torch.arange(max_num_seqs, device=stream.device)
        self._drawn = torch.zeros(max_num_seqs, dtype=torch.int64, device=stream.device)
        self._places: dict[RequestId, int] = {}
        self._graphs = DecodeGraphs(stream, ())
        self._logits: dict[int, torch.Tensor] = {}
        self._sampler = DeviceSampler(decoder.config.vocab_size, max_num_seqs, stream)

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return self._graphs.num_captured

    def capture(self, sizes: Sequence[int], report: Callable[[float], None]) -> None:
        """Capture the forward of decode steps; the KV cache that is bound now stays from here on.

        Args:
            sizes: Of batches, ascending.
            report: Told of the progress, 0 to 1.
        """
        graphs = DecodeGraphs(self._stream, sizes)
        stage = self._decodes.claim()
        _pad(stage.arrays, 0, sizes[-1])
        stage.ended = self._stream.run(stage.send)
        graphs.capture(self._graph_work, report)
        self._graphs = graphs

    def execute(self, plan: Plan) -> StepOutput:
        """Run one step; see `ModelRunner.execute`."""
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> StepInFlight:
        """Start a step behind the one in flight; what goes wrong is told by its result."""
        step = _Step(self)
        try:
            if (moves := self._moves(plan)) is not None:
                step.moved = self._stream.run(moves)
            if plan.chunks:
                self._compute(plan, step)
        except Exception as error:
            step.error = error
            # What a step behind this one would wait for is never drawn.
            self._places = {}
        return step

    def fault(self, error: Exception) -> Exception:
        """Take note of a step that failed, and return what its result raises."""
        # What of it has run is not known: nor what tables and sampling state hold, nor which tokens were drawn.
        self._tables.forget()
        self._sampler.forget()
        self._places = {}
        try:
            self._stream.synchronize()
            if isinstance(error, OutOfDeviceMemory):
                # What the allocator keeps in pieces is whole again for the next try.
                self._stream.memory()
                return StepTooLarge(f"{self._stream.name} has no room for a step")
        except Exception as lost:
            return DeviceFault(f"{self._stream.name} does not answer any more: {lost}")
        return error

    def _moves(self, plan: Plan) -> Work | None:
        """Return the work of a plan's moves and copies of blocks."""
        stores, loads = _pairs(plan.stores), _pairs(plan.loads)
        copies = [(copy.source, copy.target) for copy in plan.copies]
        if not (stores or loads or copies):
            return None
        assert self._host is not None or not (stores or loads), "a plan moves blocks, and the host has no buffer"

        def work() -> None:
            cache = self._decoder.kv_cache
            if self._host is not None and stores:
                store_blocks(cache, self._host.slots, stores, waits=False)
            if copies:
                copy_blocks(cache, copies)
            if self._host is not None and loads:
                load_blocks(cache, self._host.slots, loads)

        return work

    def _compute(self, plan: Plan, step: _Step) -> None:
        """Put a plan's forward and its draws into the stream."""
        chunks = plan.chunks
        assert plan.block_size == self._layout.block_size, f"a plan of {plan.block_size}-token blocks"
        lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), dtype=np.int64, count=len(chunks))
        starts = np.fromiter((chunk.start for chunk in chunks), dtype=np.int64, count=len(chunks))
        tables, where, ids = self._tables.place(chunks)
        specs = [(chunk.request_id, chunk.sample) for chunk in chunks if chunk.sample is not None]
        if lengths.max() == 1 and len(specs) == len(chunks):
            stage, forward = self._stage_decodes(chunks, starts, tables)
        else:
            stage, forward = self._stage_chunks(chunks, lengths, starts, tables)
        changes = (self._stream.upload(where), self._stream.upload(ids)) if len(where) else None

        def work() -> None:
            stage.send()
            if changes is not None:
                self._attention.tables.view(-1).index_copy_(0, *changes)
            logits = forward()
            if specs:
                step.sampled = sampled = self._sampler.sample(logits[: len(specs)], specs)
                self._drawn[: len(specs)].copy_(sampled.tokens)

        stage.ended = step.computed = self._stream.run(work)
        self._places = {request_id: place for place, (request_id, _) in enumerate(specs)}

    def _stage_decodes(
        self, chunks: Sequence[Chunk], starts: Int64Array, tables: Int64Array
    ) -> tuple[Stage, Callable[[], torch.Tensor]]:
        """Fill in a step of one row for each request, and return what computes its logits."""
        num_rows = len(chunks)
        size = self._graphs.bucket(num_rows)
        stage = self._decodes.claim()
        arrays = stage.arrays
        arrays["tokens"][:num_rows] = [chunk.token_ids[0] for chunk in chunks]
        self._find_pending(chunks, range(num_rows), arrays)
        arrays["positions"][:num_rows] = starts
        arrays["slots"][:num_rows] = self._slots(tables, starts)
        arrays["decode_tiles"][:num_rows] = decode_tiles(tables, starts)
        if size is None:
            return stage, partial(self._forward_decodes, num_rows, self._attention.decode_splits(num_rows))
        _pad(arrays, num_rows, size)
        return stage, partial(self._replay, size)

    def _stage_chunks(
        self, chunks: Sequence[Chunk], lengths: Int64Array, starts: Int64Array, tables: Int64Array
    ) -> tuple[Stage, Callable[[], torch.Tensor]]:
        """Fill in a step of any chunks, and return what computes its logits."""
        bounds = np.zeros(len(chunks) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        tiles, batch = self._attention.cut(bounds, starts, tables)
        num_rows, num_decodes, num_prefills = batch.num_tokens, len(tiles.decode), len(tiles.prefill)
        stage = self._chunks.claim()
        arrays = stage.arrays
        tokens, rows = arrays["tokens"], bounds.tolist()
        for chunk, row, end in zip(chunks, rows[:-1], rows[1:], strict=True):
            tokens[row:end] = chunk.token_ids
        self._find_pending(chunks, rows[:-1], arrays)
        positions = batch.lengths - 1
        arrays["positions"][:num_rows] = positions
        arrays["slots"][:num_rows] = self._slots(tables[batch.sequence_of], positions)
        arrays["decode_tiles"][:num_decodes] = tiles.decode
        arrays["prefill_tiles"][:num_prefills] = tiles.prefill
        drawing = [end - 1 for chunk, end in zip(chunks, rows[1:], strict=True) if chunk.sample is not None]
        arrays["logits_rows"][: len(drawing)] = drawing

        def forward() -> torch.Tensor:
            here = self._chunks.device
            metadata = self._attention.metadata(
                num_rows,
                here["decode_tiles"][:num_decodes],
                tiles.decode_splits,
                here["prefill_tiles"][:num_prefills],
                tiles.prefill_splits,
            )
            return self._forward(here, num_rows, here["logits_rows"][: len(drawing)], metadata)

        return stage, forward

    def _find_pending(self, chunks: Sequence[Chunk], rows: Sequence[int], arrays: HostArrays) -> None:
        """Say of each row which token drawn by the step before is its own, if that is not known yet."""
        tokens, sources = arrays["tokens"], arrays["sources"]
        sources.fill(-1)
        for chunk, row in zip(chunks, rows, strict=True):
            if tokens[row] == PENDING_TOKEN:
                sources[row] = self._places[chunk.request_id]

    def _slots(self, tables: Int64Array, positions: Int64Array) -> Int64Array:
        """Return where the K and V of each row go, by the row of its table and its position."""
        size = self._layout.block_size
        blocks = self._tables.host[tables, positions // size].astype(np.int64)
        slots: Int64Array = blocks * size + positions % size
        return slots

    def _forward(
        self, here: DeviceArrays, num_rows: int, logits_rows: torch.Tensor, metadata: GpuAttentionMetadata
    ) -> torch.Tensor:
        """Compute logits from arrays on the device; a part of a step's work."""
        sources = here["sources"][:num_rows]
        token_ids = torch.where(sources < 0, here["tokens"][:num_rows], self._drawn[sources.clamp(min=0)])
        return self._decoder.forward(
            ForwardInput(token_ids, here["positions"][:num_rows], here["slots"][:num_rows], metadata, logits_rows)
        )

    def _forward_decodes(self, num_rows: int, num_splits: int) -> torch.Tensor:
        """Compute the logits of one row for each request; a part of a step's work."""
        here = self._decodes.device
        metadata = self._attention.metadata(
            num_rows, here["decode_tiles"][:num_rows], num_splits, here["prefill_tiles"][:0], 1
        )
        return self._forward(here, num_rows, self._every_row[:num_rows], metadata)

    def _graph_work(self, size: int) -> Work:
        """Return the forward of so many decodes, which leaves its logits where replays find them."""
        num_splits = self._attention.decode_splits(size)

        def work() -> None:
            self._logits[size] = self._forward_decodes(size, num_splits)

        return work

    def _replay(self, size: int) -> torch.Tensor:
        self._graphs.replay(size)
        return self._logits[size]


class _Step:
    """A step in the stream; see `StepInFlight`.

    Attributes:
        moved: The end of its moves, where it has any.
        computed: The end of what it computes, likewise.
        sampled: What it draws, likewise.
        error: What went wrong when it was put in.
    """

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self.moved: Ended | None = None
        self.computed: Ended | None = None
        self.sampled: SampledInFlight | None = None
        self.error: Exception | None = None

    def result(self) -> StepOutput:
        """Wait for the end of the step.

        Raises:
            StepTooLarge: The device had no room for it.
            DeviceFault: The device answers no more.
            Exception: What else went wrong.
        """
        try:
            if self.error is not None:
                raise self.error
            for ended in (self.moved, self.computed):
                if ended is not None:
                    ended.wait()
            sampled = Sampled() if self.sampled is None else self.sampled.result()
        except Exception as error:
            raise self._runner.fault(error) from error
        return StepOutput(
            sampled.tokens,
            sampled.logprobs,
            sampled.failed,
            model_s=0.0 if self.computed is None else self.computed.seconds,
            move_s=0.0 if self.moved is None else self.moved.seconds,
            candidates=sampled.candidates,
        )


def _shapes(num_rows: int, num_seqs: int, num_prefill_tiles: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the arrays of a step: tokens (or the places where the step before draws them), positions, slots, tiles."""
    return {
        "tokens": ((num_rows,), torch.int64),
        "sources": ((num_rows,), torch.int64),
        "positions": ((num_rows,), torch.int64),
        "slots": ((num_rows,), torch.int64),
        "logits_rows": ((num_seqs,), torch.int64),
        "decode_tiles": ((num_seqs, 4), torch.int32),
        "prefill_tiles": ((num_prefill_tiles, 4), torch.int32),
    }


def _pad(arrays: HostArrays, num_rows: int, size: int) -> None:
    """Fill a step of decodes up with rows that own no slot and see nothing."""
    for name, value in (("tokens", 0), ("sources", -1), ("positions", 0), ("slots", -1), ("decode_tiles", 0)):
        arrays[name][num_rows:size] = value


def _pairs(moves: Sequence[BlockMove]) -> list[tuple[int, int]]:
    return [(move.block_id, move.slot) for move in moves]
