"""The kernel that divides a step's attention into items of work.

token     a row of the batch; its query heads (of one KV head) are rows of a tile
segment   256 positions of a sequence, aligned from position 0: the unit of the softmax
task      one segment for a list of tokens
run       a range of a task's 16-position groups whose blocks are the same for a range of the task's tokens
item      what a thread takes: one task, or all the tasks of a tile of tokens in order (`fold`)
"""

from __future__ import annotations

from typing import Any

from chatd_kernels.jit import jit
from chatd_kernels.runtime import argument, kernel
from chatd_kernels.vector import array_i32, array_i64

TASK_FIELDS = 6  # segment, first token, end token (in the token list), first run, end run, first token of the tile
RUN_FIELDS = 5  # first group, end group, first token, end token (in the token list), sequence whose blocks it follows
ITEM_FIELDS = 3  # first task, end task, fold

# What the kernel counts, and leaves for its caller.
NUM_TASKS, NUM_RUNS, NUM_LISTED, NUM_ITEMS, NUM_PARTIAL, MOST_TOKENS = range(6)
NUM_COUNTS = 6

# The kernel's arguments, by their place in the frame.
_BOUNDS, _BEFORE, _NUM_BOUNDS, _BLOCK_SIZE, _TILE_TOKENS, _FOLD_BELOW, _ORDER, _NUM_NARROW, _NUM_WIDE = range(9)
_SHARED, _TASKS, _MAX_TASKS, _RUNS, _MAX_RUNS, _TOKENS, _MAX_LISTED, _ITEMS, _COSTS, _COUNTS, _SCRATCH = range(9, 20)


@jit
def _put_task(frame: int, segment: int, first: int, first_run: int, tile_first: int) -> None:
    """Add a task for the tokens from `first` and the runs from `first_run` on."""
    tasks, counts = array_i32(argument(frame, _TASKS), argument(frame, _MAX_TASKS) * 6), _counts(frame)
    at = counts[NUM_TASKS] * 6
    tasks[at], tasks[at + 1], tasks[at + 2] = segment, first, counts[NUM_LISTED]
    tasks[at + 3], tasks[at + 4], tasks[at + 5] = first_run, counts[NUM_RUNS], tile_first
    counts[NUM_TASKS] += 1


@jit
def _put_run(frame: int, low: int, high: int, first: int, end: int, sequence: int) -> None:
    """Add a run of groups low to high for the tokens first to end."""
    runs, counts = array_i32(argument(frame, _RUNS), argument(frame, _MAX_RUNS) * 5), _counts(frame)
    at = counts[NUM_RUNS] * 5
    runs[at], runs[at + 1], runs[at + 2], runs[at + 3], runs[at + 4] = low, high, first, end, sequence
    counts[NUM_RUNS] += 1


@jit
def _put_item(frame: int, first_task: int, end_task: int, fold: int, cost: int) -> None:
    """Add an item."""
    items, counts = array_i32(argument(frame, _ITEMS), argument(frame, _MAX_TASKS) * 3), _counts(frame)
    number = counts[NUM_ITEMS]
    items[number * 3], items[number * 3 + 1], items[number * 3 + 2] = first_task, end_task, fold
    array_i64(argument(frame, _COSTS), argument(frame, _MAX_TASKS))[number] = cost
    counts[NUM_ITEMS] += 1
    counts[NUM_PARTIAL] += 1 - fold


@jit
def _counts(frame: int) -> Any:
    return array_i64(argument(frame, _COUNTS), NUM_COUNTS)


@jit
def _list_token(frame: int, token: int) -> None:
    """Append to the token list."""
    counts = _counts(frame)
    array_i32(argument(frame, _TOKENS), argument(frame, _MAX_LISTED))[counts[NUM_LISTED]] = token
    counts[NUM_LISTED] += 1


@jit
def _wide_sequence(frame: int, first_token: int, count: int, before: int, sequence: int) -> None:
    """Even tiles of a sequence's tokens, each over all of its segments."""
    counts, tile_tokens = _counts(frame), argument(frame, _TILE_TOKENS)
    num_tiles = (count + tile_tokens - 1) // tile_tokens
    for tile in range(num_tiles):
        first, end = count * tile // num_tiles, count * (tile + 1) // num_tiles
        start, first_task = counts[NUM_LISTED], counts[NUM_TASKS]
        cost = 0
        for index in range(first, end):
            _list_token(frame, first_token + index)
            cost += before + index + 1
        counts[MOST_TOKENS] = max(counts[MOST_TOKENS], end - first)
        length = before + end
        for segment in range((length + 255) // 256):
            # Tokens that see position 256 * segment: those at or after it.
            seen_from = start + max(0, segment * 256 - before - first)
            seen = min(256, length - segment * 256)
            _put_run(frame, 0, (seen + 15) // 16, seen_from, counts[NUM_LISTED], sequence)
            _put_task(frame, segment, seen_from, counts[NUM_RUNS] - 1, start)
        end_task = counts[NUM_TASKS]
        if end_task - first_task == 1 or cost <= argument(frame, _FOLD_BELOW):
            _put_item(frame, first_task, end_task, 1, cost)
        else:
            for task in range(first_task, end_task):
                _put_item(frame, task, task + 1, 0, (end - first) * 256)


@jit
def _narrow_group(
    frame: int, segment: int, group: int, end: int, members: Any, common: Any, lengths: Any, offsets: Any
) -> None:
    """The task of listed neighbors that share a segment's first block; its runs split where their blocks do."""
    counts, block_size = _counts(frame), argument(frame, _BLOCK_SIZE)
    runs = array_i32(argument(frame, _RUNS), argument(frame, _MAX_RUNS) * 5)
    groups_per_block = block_size // 16
    first_column, first_run = segment * (256 // block_size), counts[NUM_RUNS]
    cost = 0
    for column in range(first_column, first_column + 256 // block_size):
        low = group
        while low < end:
            if lengths[low] <= column * block_size:
                low += 1
                continue
            high = low + 1
            while high < end and common[high] > column:
                high += 1
            high_group = (column - first_column + 1) * groups_per_block
            # The same sequences as in the block before: their run goes on.
            run = counts[NUM_RUNS] - 1
            while run >= first_run and (runs[run * 5 + 2] != offsets[low] or runs[run * 5 + 3] != offsets[high]):
                run -= 1
            if run >= first_run:
                runs[run * 5 + 1] = high_group
            else:
                _put_run(frame, high_group - groups_per_block, high_group, offsets[low], offsets[high], members[low])
            cost += block_size * (offsets[high] - offsets[low] + 2)
            low = high
    _put_task(frame, segment, offsets[group], first_run, offsets[group])
    _put_item(frame, counts[NUM_TASKS] - 1, counts[NUM_TASKS], 0, cost)


@jit
def _narrow_segment(frame: int, segment: int, num_members: int, members: Any, common: Any, lengths: Any) -> None:
    """Cut the sequences that reach a segment into groups that share its first block, no more than a tile holds."""
    counts, first_column = _counts(frame), segment * (256 // argument(frame, _BLOCK_SIZE))
    bounds = array_i64(argument(frame, _BOUNDS), argument(frame, _NUM_BOUNDS))
    offsets = array_i64(argument(frame, _SCRATCH) + 3 * argument(frame, _NUM_NARROW) * 8, num_members + 1)
    group = 0
    while group < num_members:
        start = counts[NUM_LISTED]
        end = group
        while end < num_members:
            sequence = members[end]
            end_token = bounds[sequence + 1]
            # Tokens that see position 256 * segment.
            size = min(end_token - bounds[sequence], lengths[end] - segment * 256)
            if end > group and (
                common[end] <= first_column or counts[NUM_LISTED] - start + size > argument(frame, _TILE_TOKENS)
            ):
                break
            offsets[end] = counts[NUM_LISTED]
            for token in range(end_token - size, end_token):
                _list_token(frame, token)
            end += 1
        offsets[end] = counts[NUM_LISTED]
        counts[MOST_TOKENS] = max(counts[MOST_TOKENS], counts[NUM_LISTED] - start)
        _narrow_group(frame, segment, group, end, members, common, lengths, offsets)
        group = end


@jit
def _sort_items(frame: int) -> None:
    """Expensive items first, so that the threads end together. Shell sort: short, in place, good for thousands."""
    num_items = _counts(frame)[NUM_ITEMS]
    items = array_i32(argument(frame, _ITEMS), argument(frame, _MAX_TASKS) * 3)
    costs = array_i64(argument(frame, _COSTS), argument(frame, _MAX_TASKS))
    gap = 1
    while gap < num_items:
        gap = gap * 3 + 1
    while gap > 0:
        for index in range(gap, num_items):
            cost, first, end, fold = costs[index], items[index * 3], items[index * 3 + 1], items[index * 3 + 2]
            place = index
            while place >= gap and costs[place - gap] < cost:
                costs[place] = costs[place - gap]
                for field in range(3):
                    items[place * 3 + field] = items[(place - gap) * 3 + field]
                place -= gap
            costs[place] = cost
            items[place * 3], items[place * 3 + 1], items[place * 3 + 2] = first, end, fold
        gap //= 3


@kernel
def build_work_list(frame: int) -> None:
    """Fill tasks, runs, tokens, items and counts. Runs on the calling thread.

    `order` holds the narrow sequences, those that share blocks side by side, then the wide ones; `shared` says how many
    blocks a narrow one shares with the one before.
    """
    bounds = array_i64(argument(frame, _BOUNDS), argument(frame, _NUM_BOUNDS))
    before = array_i64(argument(frame, _BEFORE), argument(frame, _NUM_BOUNDS) - 1)
    num_narrow, num_wide = argument(frame, _NUM_NARROW), argument(frame, _NUM_WIDE)
    order = array_i64(argument(frame, _ORDER), num_narrow + num_wide)
    shared = array_i64(argument(frame, _SHARED), num_narrow)
    for sequence in order[num_narrow:]:
        count = bounds[sequence + 1] - bounds[sequence]
        _wide_sequence(frame, bounds[sequence], count, before[sequence], sequence)

    scratch = argument(frame, _SCRATCH)
    members, common = array_i64(scratch, num_narrow), array_i64(scratch + num_narrow * 8, num_narrow)
    lengths = array_i64(scratch + num_narrow * 16, num_narrow)
    longest = 0
    for sequence in order[:num_narrow]:
        longest = max(longest, before[sequence] + bounds[sequence + 1] - bounds[sequence])
    for segment in range((longest + 255) // 256):
        num_members = 0
        least = 0
        for index in range(num_narrow):
            sequence = order[index]
            length = before[sequence] + bounds[sequence + 1] - bounds[sequence]
            # What two members share, they share with every sequence between them.
            least = min(least, shared[index])
            if length > segment * 256:
                members[num_members], common[num_members], lengths[num_members] = sequence, least, length
                num_members += 1
                least = 1 << 40
        _narrow_segment(frame, segment, num_members, members, common, lengths)
    _sort_items(frame)
