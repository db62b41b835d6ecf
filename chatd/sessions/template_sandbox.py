"""Renders a model's chat template in a process of its own, with bounded time, memory and output.

A chat template is code that came with a model. jinja2's sandbox keeps it from Python's internals but not from looping
for ever or building a string of a terabyte, so it runs in a short-lived process with limits that the kernel holds.
That process gets an empty environment and reads nothing but its standard input.

Semantics are those of transformers' `apply_chat_template`: an immutable sandbox with `trim_blocks`, `lstrip_blocks`,
loop controls, the `generation` tag, `tojson` without HTML escapes, and `raise_exception`. `strftime_now` does not read
the clock: it writes `DATE_START number DATE_END`, the number of its format, which the caller replaces; or, where the
caller names a date, that date.

This file is both ends: `render_all` is called by the daemon; run as a program it is the child. It imports nothing of
chatd but the errors, and those only on the daemon's side.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

DATE_START, DATE_END = "\ue010", "\ue011"

MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_RENDERED_CHARS = 8 * 1024 * 1024  # all cases together
WALL_SECONDS = 20
CPU_SECONDS = 5
MEMORY_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation to render.

    Args:
        messages: Each with `role` and `content`, and whatever else the template may read.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """What came of a case: a text, or why there is none.

    Args:
        error: The template's own words where it refuses this conversation.
        formats: The date formats that the numbers in the text stand for.
    """

    text: str | None
    error: str | None = None
    formats: Sequence[str] = ()


class TemplateRefused(Exception):
    """A template that does not compile, reaches for what it must not, or exceeds its limits."""


def render_all(
    template: str,
    variables: Mapping[str, Any],
    cases: Sequence[Case],
    *,
    date: str | None = None,
    wall_seconds: float = WALL_SECONDS,
) -> list[Rendered]:
    """Render every case with one template, in one child process. Blocks for about 0.1 s; call it off the loop.

    Args:
        variables: What the template sees beside the messages, such as `bos_token`.
        date: An ISO date and time for `strftime_now`; without one, markers are written.

    Raises:
        TemplateRefused: With the reason.
    """
    if len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise TemplateRefused(f"it has more than {MAX_TEMPLATE_BYTES} bytes")
    request = {
        "template": template,
        "variables": dict(variables),
        "date": date,
        "cases": [[list(map(dict, case.messages)), case.add_generation_prompt] for case in cases],
    }
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        # -P: this file's own folder must not shadow modules of the standard library.
        done = subprocess.run(  # noqa: S603 - our own interpreter on our own file
            [sys.executable, "-P", "-s", str(Path(__file__).resolve())],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=wall_seconds,
            env={"PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateRefused(f"it took longer than {wall_seconds:g} s to render") from error
    except OSError as error:
        raise TemplateRefused(f"no process could be started to render it: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1][:200]}" if lines else ""
        raise TemplateRefused(f"it exceeded its limits of time or memory (exit status {done.returncode}){reason}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise TemplateRefused(answer["refused"])
    return [Rendered(*item) for item in answer["rendered"]]


# The child process.


class _Overflow(Exception):
    """A rendering that is longer than it may be."""


def _environment(dates: list[str], date: str | None) -> "jinja2.sandbox.ImmutableSandboxedEnvironment":
    from datetime import datetime

    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; its body is rendered as it stands."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Fails at once where the plain sandbox would give an undefined value."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
            raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of {type(obj).__name__!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        if date is not None:
            return datetime.fromisoformat(date).strftime(format)
        if format not in dates:
            dates.append(str(format))
        return f"{DATE_START}{dates.index(format)}{DATE_END}"

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _check_source(environment: "jinja2.Environment", source: str) -> None:
    """Raise where the source names Python's internals, also in a branch that no probe takes."""
    import jinja2
    import jinja2.sandbox
    from jinja2 import nodes

    tree = environment.parse(source)
    forbidden = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in tree.find_all(nodes.Node):
        if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"line {node.lineno}: access to {node.attr!r}")
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and re.fullmatch(r"[\w.]*__\w+", node.value):
            raise jinja2.exceptions.SecurityError(f"line {node.lineno}: the name {node.value!r}")
        if isinstance(node, forbidden):
            raise jinja2.exceptions.SecurityError(f"line {node.lineno}: {type(node).__name__.lower()} of another file")


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Have the kernel end this process when it uses too much. Windows has no such limits."""
    if sys.platform == "win32":
        return
    import resource

    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(kind, (value, value))


def _serve(request: Mapping[str, Any]) -> dict[str, Any]:
    import jinja2
    import jinja2.sandbox

    dates: list[str] = []
    environment = _environment(dates, request["date"])
    rendered: list[list[Any]] = []
    length = 0
    try:
        _check_source(environment, request["template"])
        template = environment.from_string(request["template"])
        for messages, add_generation_prompt in request["cases"]:
            try:
                chunks = []
                for chunk in template.generate(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **request["variables"],
                ):
                    length += len(chunk)
                    if length > MAX_RENDERED_CHARS:
                        raise _Overflow
                    chunks.append(chunk)
                rendered.append(["".join(chunks), None, list(dates)])
            except jinja2.exceptions.SecurityError:
                raise
            except _Overflow:
                return {"refused": f"it renders to more than {MAX_RENDERED_CHARS} characters"}
            except MemoryError:
                return {"refused": "it needs too much memory"}
            except Exception as error:  # a template may fail in any way on a conversation that it does not expect
                rendered.append([None, f"{type(error).__name__}: {error}"[:500], []])
    except jinja2.exceptions.SecurityError as error:
        return {"refused": f"it reaches for what a template must not: {error}"}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": f"it does not compile, line {error.lineno}: {error.message}"}
    except (RecursionError, MemoryError) as error:
        return {"refused": f"it is too deeply nested or too large to compile: {type(error).__name__}"}
    return {"rendered": rendered}


def _main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 - before the limit on memory

    _limit(CPU_SECONDS, MEMORY_BYTES)
    sys.stdout.buffer.write(json.dumps(_serve(request)).encode())


if __name__ == "__main__":
    _main()
