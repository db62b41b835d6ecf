"""Registers and shared memory of the GPU's kernels: `python -m chatd.bench resources --json PATH`.

Compiles what a GPU may be asked to start for the models of `chatd_kernels.ahead_of_time`; needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from chatd.bench.record import write_json
from chatd.config import cache_dir
from chatd_kernels.ahead_of_time import ARCHITECTURES, SHAPES, choices

KV_DTYPES = {"16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def main(arguments: Sequence[str]) -> int:
    """Print a line for each kernel, and return 1 if one of them spills registers or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m chatd.bench resources", description=__doc__.splitlines()[0])
    parser.add_argument("--kv", choices=list(KV_DTYPES), default="16", help="how K and V are stored")
    parser.add_argument("--deterministic", action="store_true", help="the kernels of the deterministic mode")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    rows = []
    for shape in SHAPES:
        for architecture in ARCHITECTURES:
            for choice in choices(
                shape, torch.bfloat16, KV_DTYPES[options.kv], architecture, is_deterministic=options.deterministic
            ):
                found = choice.resources(cache_dir() / "kernels" / "gpu")
                fits = found.spilled_bytes == 0 and found.shared_bytes <= architecture.shared_bytes
                print(
                    f"{shape.name:13} sm_{architecture.capability} {choice.label:50} {found.registers:3} registers "
                    f"{found.shared_bytes:6} B shared {found.spilled_bytes:4} B spilled{'' if fits else '  !'}",
                    flush=True,
                )
                rows.append(
                    {
                        "model": shape.name,
                        "sm": architecture.capability,
                        "kernel": choice.label,
                        "fits": fits,
                        **asdict(found),
                    }
                )
    write_json(options.json, "resources", {"kv": options.kv, "is_deterministic": options.deterministic, "rows": rows})
    return 0 if all(row["fits"] for row in rows) else 1
