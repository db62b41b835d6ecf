"""Tables in Markdown, one for each benchmark's figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chat_table(figures: Figures) -> str:
    """Return the chat load's table: a row for each weight format and number of sessions, medians over repeats."""
    runs = figures["runs"]
    heads = ["weights", "sessions", "output tok/s", "TTFT, turn 1", "TTFT, later turns", "ITL p50", "history cached"]
    rows = []
    for quantization, sessions in dict.fromkeys((run["quantization"], run["sessions"]) for run in runs):
        same = [run for run in runs if (run["quantization"], run["sessions"]) == (quantization, sessions)]
        middle = {
            name: statistics.median(run[name] for run in same) for name, value in same[0].items() if _is_number(value)
        }
        rows.append(
            [
                quantization,
                str(sessions),
                f"{middle['output_tok_s']:.0f}",
                f"{middle['ttft_first_p50_s']:.2f} s",
                f"{middle['ttft_later_p50_s']:.2f} s",
                f"{middle['itl_p50_s'] * 1e3:.0f} ms",
                f"{min(run['history_cached'] for run in same):.1%}",
            ]
        )
    return f"{markdown_table(heads, rows)}\n\n{_start_line(runs)}"


def _start_line(runs: Sequence[Figures]) -> str:
    """Return a sentence with the cold start of each weight format."""
    starts = {run["quantization"]: run["start_to_token_s"] for run in runs}
    each = ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in starts.items())
    return f"From `chatd serve` to the first token of the first answer, model and kernels in the cache: {each}."


def memory_table(figures: Figures) -> str:
    """Return what each kind of memory manager's slots hold."""
    heads = ["memory", "holds a token", "reserved", "internal", "external", "sequences at once"]
    rows = [
        [
            row["server"],
            *(f"{row[kind]:.1%}" for kind in ("tokens", "reserved", "internal", "external")),
            f"{row['running']:.1f}",
        ]
        for row in figures["servers"]
    ]
    return (
        f"{figures['requests']:,} requests of {figures['mean_final']:.0f} tokens (mean) in {figures['slots']:,} slots, "
        f"sequences of at most {figures['max_len']:,} tokens.\n\n{markdown_table(heads, rows)}"
    )


def waste_table(figures: Figures) -> str:
    """Return the waste by block size."""
    heads = ["tokens of an answer, mean", "block size", "slots without a token", "in turn 1 alone"]
    rows = [
        [
            f"{row['mean_output']:.0f}",
            str(row["block_size"]),
            f"{row['waste']:.2%}",
            f"{row['waste_first_turn']:.2%}",
        ]
        for row in figures["blocks"]
    ]
    return markdown_table(heads, rows)


def trace_table(figures: Figures) -> str:
    """Return the hit rate by pool size."""
    heads = ["pool, million tokens", "hit rate", "of the ideal", "plain LRU", "evictions"]
    ideal = figures["ideal"]
    rows = [
        [
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['hit_rate']:.1%}",
            f"{row['hit_rate'] / ideal:.0%}",
            f"{row['plain_lru']:.1%}",
            f"{row['evictions']:,}",
        ]
        for row in figures["pools"]
    ]
    return (
        f"{figures['requests']:,} requests; a cache without end finds {ideal:.1%} of their prompt tokens.\n\n"
        f"{markdown_table(heads, rows)}"
    )


def fork_table(figures: Figures) -> str:
    """Return what forks cost and share."""
    heads = ["tokens", "fork, median", "p95", "copies at the first append", "blocks held", "without sharing"]
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['median_ms']:.3f} ms",
            f"{row['p95_ms']:.3f} ms",
            f"{row['copies_per_append']:.0f} block",
            f"{row['blocks_after_appends']:,}",
            f"{row['blocks_without_sharing']:,}",
        ]
        for row in figures["forks"]
    ]
    copy = figures["copy"]
    return (
        f"{markdown_table(heads, rows)}\n\nThe copy of one block of the small model's KV "
        f"({copy['block_bytes'] / 1024:.0f} KiB) takes {copy['copy_us']:.0f} µs. Blocks are those of the session and "
        f"its {figures['forks'][0]['forks']} forks, each gone on with by one token."
    )


def samples_table(figures: Figures) -> str:
    """Return what samples and beams of a prompt save by sharing its blocks, and the beams' own."""
    heads = [
        "of each prompt",
        "prompts",
        "tokens of a prompt",
        "tokens of an answer",
        "blocks without sharing",
        "saved",
    ]
    rows = [
        [
            f"{row['width']} {row['kind'] if row['width'] > 1 else row['kind'].removesuffix('s')}",
            str(row["prompts"]),
            f"{row['prompt_tokens'] / row['prompts']:.0f}",
            f"{row['output_tokens'] / row['prompts'] / (row['width'] if row['kind'] == 'samples' else 1):.0f}",
            f"{row['blocks_held'] / row['steps']:.0f}",
            f"{row['saved']:.1%}",
        ]
        for row in figures["settings"]
    ]
    return f"{markdown_table(heads, rows)}\n\nBlocks are means over the steps."


def prefix_table(figures: Figures) -> str:
    """Return the time to the first token by where the system prompt is."""
    ttft = figures["ttft"]
    names = {
        "uncached": "new",
        "cached": "used before by the same tenant",
        "public": "public, computed ahead, used by another tenant",
    }
    rows = [
        [
            names[name],
            f"{ttft['cached_tokens'][name]:,}",
            f"{seconds * 1e3:,.0f} ms",
            f"{ttft['lower'][name]:.1%} lower" if name in ttft["lower"] else "",
        ]
        for name, seconds in ttft["ttft_s"].items()
    ]
    heads = [f"system prompt of {ttft['system_tokens']:,} tokens", "cached tokens", "TTFT", ""]
    machinery, share = figures["machinery"], figures["share"]
    return (
        f"{markdown_table(heads, rows)}\n\nOf a block in microseconds: find {machinery['find_us']:.2f}, register "
        f"{machinery['register_us']:.2f}, adopt {machinery['adopt_us']:.2f}. All of it together takes "
        f"{share['of_prefill']:.3%} of the steps that compute a prompt and {share['of_decode']:.3%} of those that "
        f"decode {share['batch']} answers."
    )


def turn_table(figures: Figures) -> str:
    """Return the work of a turn, a column for each history."""
    turns = figures["turns"]
    heads = ["work of a turn", *(f"{turn['history']:,} tokens of history" for turn in turns)]
    names = [name for name in turns[0] if name != "history"]
    rows = [[name, *(f"{turn[name]:,}" for turn in turns)] for name in names]
    said = f"A message of {figures['prompt']} tokens and an answer of {figures['output']}:"
    return f"{said}\n\n{markdown_table(heads, rows)}"


def pool_table(figures: Figures) -> str:
    """Return microseconds of pool operations by the pool's size, and milliseconds of plan and commit."""
    pools, steps = figures["pool_us"], figures["plan_commit_ms"]
    names = list(dict.fromkeys(name for column in pools.values() for name in column))
    heads = ["µs a block", *(f"{int(size):,} blocks" for size in pools)]
    rows = [[name, *(f"{column[name]:.2f}" if name in column else "" for column in pools.values())] for name in names]
    step_heads = ["sequences × context", "plan and commit, median", "p90"]
    step_rows = [
        [name.replace("x", "×"), f"{row['median']:.2f} ms", f"{row['p90']:.2f} ms"] for name, row in steps.items()
    ]
    return f"{markdown_table(heads, rows)}\n\n{markdown_table(step_heads, step_rows)}"


def kernels_table(figures: Figures) -> str:
    """Return the kernels' figures, a table for each kind."""
    attention = figures["attention_gflops"]
    contexts = list(dict.fromkeys(name.split("x")[1] for name in attention))
    row_counts = list(dict.fromkeys(name.split("x")[0] for name in attention))
    attention_table = markdown_table(
        ["attention, GFLOP/s", *(f"{rows} row{'s'[: rows != '1']}" for rows in row_counts)],
        [
            [f"after {context} tokens", *(f"{attention[f'{rows}x{context}']:.0f}" for rows in row_counts)]
            for context in contexts
        ],
    )
    linears = figures["linears_ms"]
    batches = list(next(iter(linears.values())))
    linear_table = markdown_table(
        ["all linear layers, ms a step", *(f"batch {batch}" for batch in batches)],
        [[name, *(f"{row[batch]:.1f}" for batch in batches)] for name, row in linears.items()],
    )
    small = {rows: row for rows, row in figures["small_us"].items() if isinstance(row, dict)}
    small_table = markdown_table(
        ["small operations, µs a call", *(f"{rows} rows" for rows in small)],
        [[name, *(f"{row[name]:.1f}" for row in small.values())] for name in next(iter(small.values()))],
    )
    return f"{attention_table}\n\n{linear_table}\n\n{small_table}"


def front_table(figures: Figures) -> str:
    """Return what the front carries on one core."""
    heads = ["", "tokens/s", "decode", "sessions", "encode"]
    rows = [
        [
            row["name"],
            f"{row['tokens_per_s']:,.0f}",
            *(f"{row[f'{part}_us']:.2f} µs" for part in ("decode", "sessions", "encode")),
        ]
        for row in figures["results"]
    ]
    return f"{markdown_table(heads, rows)}\n\nGoal: {figures['goal_deltas_per_s']:,} deltas a second."


def crossing_block_size(sizes: Sequence[Figures], way: str) -> int | None:
    """Return the least block size from which on copying out and in beats recomputing; None where it never does."""
    out, back = ("disk_out_s", "disk_in_s") if way == "disk" else ("out_s", "in_s")
    wins = [row["block_size"] for row in sizes if row[out] + row[back] < row["recompute_s"]]
    return min(wins, default=None)


def preemption_table(figures: Figures) -> str:
    """Return the crossing, the episodes of both kinds, and the load in each mode."""
    crossing = figures["crossing"]
    copies = ("out_s", "in_s", "disk_out_s", "disk_in_s")
    crossing_rows = [
        [
            str(row["block_size"]),
            *(f"{row[name] * 1e3:.1f}" for name in copies),
            f"{row['recompute_s'] * 1e3:,.0f}",
        ]
        for row in crossing["sizes"]
    ]
    heads = ["block size", "to the host", "from the host", "to files", "from files", "computed again"]
    crossing_table = markdown_table([f"{heads[0]}, ms for {crossing['tokens']:,} tokens", *heads[1:]], crossing_rows)
    episodes = [
        [
            f"{kind}, {row['victim_tokens']:,} tokens",
            "swaps" if row["auto_swapped"] else "recomputes",
            *(f"{row[name] * 1e3:,.1f} ms" for name in ("auto_s", "auto_move_s")),
            row["forced"],
            *(f"{row[name] * 1e3:,.1f} ms" for name in ("forced_s", "forced_move_s")),
        ]
        for kind, row in figures["episodes"].items()
    ]
    episode_table = markdown_table(
        ["a victim", "`auto`", "takes", "of it copies", "forced", "takes", "of it copies"], episodes
    )
    load = [
        [
            row["mode"],
            f"{row['wall_s']:.1f} s",
            f"{row['for_slots']:.0f} + {row['for_blocks']:.0f}",
            f"{row['swapped']:.0f}",
            f"{row['blocks_out']:.0f} / {row['blocks_in']:.0f}",
            f"{row['rows_again']:,.0f}",
        ]
        for row in figures["load"]
    ]
    load_table = markdown_table(
        [
            "the load, with preemption",
            "all done after",
            "preempted for slots + blocks",
            "swapped",
            "blocks out / in",
            "rows computed again",
        ],
        load,
    )
    at_16 = next(row for row in crossing["sizes"] if row["block_size"] == 16)
    as_rows = crossing["tokens"] * (at_16["out_s"] + at_16["in_s"]) / at_16["recompute_s"] / (crossing["tokens"] / 16)
    crossing_line = (
        f"A block of 16 copied out and in takes as long as computing {as_rows:.2f} tokens: where a victim has lost "
        "more than that, copies cost less. "
        + " ".join(
            f"Copies to {place} cost less from blocks of {least} on."
            for place, way in (("the host", "host"), ("files and back", "disk"))
            if (least := crossing_block_size(crossing["sizes"], way)) is not None
        )
    )
    return f"{crossing_table}\n\n{crossing_line}\n\n{episode_table}\n\n{load_table}"


def tiers_table(figures: Figures) -> str:
    """Return what the next turn of a session takes, by where its KV is."""
    heads = [
        f"{figures['history']:,} tokens, the next turn has {figures['message']}",
        "first token, p50",
        "rows computed",
    ]
    rows = [
        [tier, f"{figures[tier]['ttft_s'] * 1e3:,.0f} ms", f"{figures[tier]['rows']:,.0f}"]
        for tier in ("device", "host", "disk", "tokens")
    ]
    return markdown_table(heads, rows)


def join_table(figures: Figures) -> str:
    """Return what equal prompts at once take, beside different ones."""
    heads = [
        f"{figures['equal']['requests']} prompts of {figures['prompt']:,} + {figures['tail']} tokens at once",
        "rows computed",
        "joined",
        "first token, p50",
        "all first tokens after",
    ]
    rows = [
        [
            name,
            f"{row['rows']:,}",
            f"{row['joins']}",
            f"{row['first_token_p50_s']:.1f} s",
            f"{row['all_first_tokens_s']:.1f} s",
        ]
        for name, row in (("the first part equal", figures["equal"]), ("all different", figures["different"]))
    ]
    return markdown_table(heads, rows)


def neighbor_table(figures: Figures) -> str:
    """Return a quiet tenant's time to the first token, alone and beside a flood."""
    heads = ["the quiet tenant", "TTFT, p50", "p95", "steps to the first token, p50", "most"]
    rows = [
        [
            name,
            f"{row['ttft_p50_s'] * 1e3:,.0f} ms",
            f"{row['ttft_p95_s'] * 1e3:,.0f} ms",
            f"{row['steps_p50']:.0f}",
            f"{row['steps_max']}",
        ]
        for name, row in (("alone", figures["alone"]), ("beside the flood", figures["flooded"]))
    ]
    return markdown_table(heads, rows)


def probe_table(figures: Figures) -> str:
    """Return what a prober's times to the first token tell of what another one has computed."""
    heads = ["who probes", "probes", "TTFT p50, computed by the other", "TTFT p50, by nobody", "tokens found", "AUC"]
    rows = [
        [
            who,
            f"{row['probes']} + {row['probes']}",
            f"{row['ttft_cached_p50_s'] * 1e3:.1f} ms",
            f"{row['ttft_uncached_p50_s'] * 1e3:.1f} ms",
            f"{row['cached_tokens']:,}",
            f"**{row['auc']:.3f}** ± {2 * row['spread']:.3f}",
        ]
        for who, row in (("another tenant", figures["foreign"]), ("the same tenant", figures["same"]))
    ]
    return markdown_table(heads, rows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
