"""What parallel samples and beams save by sharing their blocks: `python -m chatd.bench samples`.

On the small real model, each prompt is answered by several samples, or searched with several beams, all prompts side by
side. After every step the blocks of each prompt's requests are counted: once for each of their tables, and once for all
of them. What is saved is the part that is not there twice, summed over the steps. Blocks that different prompts share,
such as the template's own, are not counted as saved.

Source: figure 15 of the PagedAttention paper. There 2 to 6 samples save 6–10% and as many beams 38–55% (OPT-13B on
Alpaca); longer prompts save more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from chatd.bench.real_engine import RealEngine, run_in_engine_process
from chatd.bench.record import write_json
from chatd.bench.tables import samples_table
from chatd.engine.core import EngineCore
from chatd.engine.messages import Beams, Done, EngineMessage, LeaseId, Submit
from chatd.engine.plan import RequestId
from chatd.engine.sampling import BeamSearch, SamplingParams
from chatd.engine.sharing import sharing_of
from chatd.protocol import Message

PROMPTS = (
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
    "must-see attractions.",
    "Why do leaves change their color in autumn?",
    "I have 30 minutes to cook dinner for four people and only eggs, rice, tomatoes and an onion. Suggest a dish, list "
    "the steps in order, say how long each takes, and what could go wrong.",
    "Summarize the following in one sentence: The printing press made books cheap enough for ordinary people, so that "
    "within a few generations more people could read than ever before, and ideas moved faster than those who wished "
    "to stop them. It took longer for governments to learn how to use it than for their critics.",
)
_IDS_OF_A_PROMPT = 100


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench samples", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=Path, help="MT-bench's question.jsonl; without it, some built-in prompts")
    parser.add_argument("--first", type=int, default=16, help="of the questions, only so many")
    parser.add_argument("--samples", nargs="*", type=int, default=[1, 2, 4, 6, 8], help="samples of each prompt")
    parser.add_argument("--beams", nargs="*", type=int, default=[2, 4, 6, 8], help="beams of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_child:
        print(json.dumps({"settings": _measure(options), "max_tokens": options.max_tokens}))
        return 0
    figures = run_in_engine_process("samples", arguments)
    print(samples_table(figures))
    write_json(options.json, "samples", figures)
    return 0


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = _encode(options)
    engine = RealEngine(options.model, options.quantization, max_num_seqs=256)
    return [
        _run(engine.core, prompts, kind, width, options.max_tokens)
        for kind, widths in (("samples", options.samples), ("beams", options.beams))
        for width in widths
    ]


def _encode(options: argparse.Namespace) -> list[list[int]]:
    from chatd.config import Settings
    from chatd.models.registry import resolve
    from chatd.server.backend import load_encoder

    texts: Sequence[str] = PROMPTS
    if options.questions is not None:
        lines = options.questions.read_text().splitlines()[: options.first]
        texts = [json.loads(line)["turns"][0] for line in lines]
    _, encoder = load_encoder(resolve(options.model).path, Settings())
    return [encoder.begin(None, [Message(role="user", content=text)], date=date(2024, 1, 1)) for text in texts]


def _run(core: EngineCore, prompts: Sequence[Sequence[int]], kind: str, width: int, max_tokens: int) -> dict[str, Any]:
    """Answer all prompts and return what their requests shared, summed over the steps."""
    for place, ids in enumerate(prompts):
        first = RequestId(place * _IDS_OF_A_PROMPT)
        is_search = kind == "beams"
        search = BeamSearch(width=width) if is_search else None
        for number in range(1 if is_search else width):
            request = RequestId(first + number)
            submit = Submit(
                request,
                LeaseId(request),
                "bench",
                0,
                list(ids),
                SamplingParams(
                    max_tokens=max_tokens, temperature=0.0 if is_search else 0.8, seed=place * width + number
                ),
                keep_lease=False,
                sample_of=first if number else None,
                beam=search,
            )
            core.handle(submit, 0.0)
    held = distinct = num_steps = num_output = 0
    while core.has_work:
        num_output += _count_output(core.step(float(num_steps)))
        num_steps += 1
        for tables in _tables(core).values():
            shared = sharing_of(tables)
            held += shared.num_held
            distinct += shared.num_distinct
    return {
        "kind": kind,
        "width": width,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": num_output,
        "steps": num_steps,
        "blocks_held": held,
        "blocks_distinct": distinct,
        "saved": 1 - distinct / held if held else 0.0,
    }


def _tables(core: EngineCore) -> dict[int, list[Any]]:
    """Return the tables of the requests in flight, by their prompt."""
    tables: dict[int, list[Any]] = {}
    for request in core.scheduler.requests.values():
        head = request if request.group is None else request.group.head
        tables.setdefault(head.request_id // _IDS_OF_A_PROMPT, []).append(request.lease.table)
    return tables


def _count_output(said: Iterable[EngineMessage]) -> int:
    count = 0
    for message in said:
        if isinstance(message, Done):
            assert not message.error_code, f"request {message.request} failed: {message.error_message}"
            count += message.num_output_tokens
        elif isinstance(message, Beams):
            assert message.sequences, "a search found nothing"
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
