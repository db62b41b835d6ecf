"""What a chat template writes around contents, found by rendering it with markers in their place.

A conversation is then composed from the pieces: what opens it, what stands between two messages, what leads to an
answer. No real content is ever rendered by the template, so content cannot steer it, and what stands between the
markers is what the template wrote. The pieces depend on the two neighbors only; where a template looks further
(moves the system prompt, drops old thoughts), that is found here and said in `TemplateKind`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, zip_longest
from typing import Literal

from chatd.errors import ModelError
from chatd.protocol import Role
from chatd.sessions.template_sandbox import DATE_END, DATE_START, Case, Rendered

SystemPlace = Literal["first", "floating", "unsupported"]


@dataclass(frozen=True, slots=True)
class DateSlot:
    """A place where the template writes the date."""

    format: str


Text = tuple[str | DateSlot, ...]
"""What a template wrote in one place."""


@dataclass(frozen=True, slots=True)
class Trim:
    """What a template strips from one end of a content: `None` nothing, "" every blank, else these characters."""

    left: str | None = None
    right: str | None = None

    def apply(self, content: str) -> str:
        """Return the content as the template would write it."""
        if self.left is not None:
            content = content.lstrip(self.left or None)
        if self.right is not None:
            content = content.rstrip(self.right or None)
        return content


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """How a chat template behaves, found by probing it.

    Args:
        append_only: A prompt and its answer are a prefix of the next prompt, always.
        drops_thoughts: Earlier answers are written without their `<think>` part.
        generation_prompt_differs: What leads to an answer is not what stands before the same answer in history.
        system: Where a system prompt goes: at its place; to the last user message ("floating"); or nowhere, then it is
            put before the first user message's text.
        default_system: Where there is no system prompt the template writes one of its own.
        writes_date: The template writes the date, which is frozen at the session's creation.
        trims: Roles whose content the template strips.
        strict_turns: Only user and assistant in turn; messages in a row are joined.
    """

    append_only: bool
    drops_thoughts: bool
    generation_prompt_differs: bool
    system: SystemPlace
    default_system: bool
    writes_date: bool
    trims: tuple[Role, ...]
    strict_turns: bool

    def __str__(self) -> str:
        words = ["append-only"] if self.append_only else []
        if self.drops_thoughts:
            words.append("drops earlier thoughts")
        if self.generation_prompt_differs:
            words.append("generation prompt differs from history")
        words.append(
            {
                "first": "system prompt first",
                "floating": "floating system prompt, kept first",
                "unsupported": "no system prompt, put before the first message",
            }[self.system]
        )
        if self.default_system:
            words.append("default system prompt")
        if self.writes_date:
            words.append("writes the date")
        if self.trims:
            words.append("trims " + " and ".join(self.trims))
        if self.strict_turns:
            words.append("strict turns")
        if not (self.append_only or self.drops_thoughts or self.generation_prompt_differs or self.system == "floating"):
            words.append("rewrites its history, which is kept as it was computed")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The pieces of text from which every conversation is composed.

    Args:
        opening: Before the first message, by its role, where there is no system prompt.
        before_system: Before the system prompt; None where there is no place for one.
        after_system: Between the system prompt and the first message, by its role.
        between: Between two messages, by their roles.
        to_answer: From a message, by its role, to where the answer begins.
        closing: After an answer that ends the conversation.
        trims: What is stripped from the contents of each role.
        trim_after_system: The same for a user message that follows the system prompt, which Llama 2 puts inside it.
        thought_strip: Characters stripped from what follows a thought that is dropped.
        ignores_empty_system: An empty system prompt is none.
    """

    kind: TemplateKind
    opening: Mapping[Role, Text]
    before_system: Text | None
    after_system: Mapping[Role, Text]
    between: Mapping[tuple[Role, Role], Text]
    to_answer: Mapping[Role, Text]
    closing: Text
    trims: Mapping[Role, Trim]
    trim_after_system: Trim
    thought_strip: str
    ignores_empty_system: bool

    def without_thoughts(self, content: str) -> str:
        """Return an earlier answer's text as a thought-dropping template writes it."""
        if THOUGHT_END not in content:
            return content
        return content.rpartition(THOUGHT_END)[2].lstrip(self.thought_strip)

    def texts(self) -> list[Text]:
        """Return every piece once."""
        return [
            *self.opening.values(),
            *([] if self.before_system is None else [self.before_system]),
            *self.after_system.values(),
            *self.between.values(),
            *self.to_answer.values(),
            self.closing,
        ]


@dataclass(frozen=True, slots=True)
class _Probe:
    roles: str  # one letter a message
    add_generation_prompt: bool = True
    style: Literal["plain", "blanks", "thoughts", "empty", "prose"] = "plain"


_ROLES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant"}
_LEFT_BLANKS, _RIGHT_BLANKS = "\n\n \t", "\t \n\n"
# What is left of these blanks, by what was stripped (see `Trim`).
_LEFT_RESTS: dict[str | None, str] = {None: _LEFT_BLANKS, "\n": " \t", "": ""}
_RIGHT_RESTS: dict[str | None, str] = {None: _RIGHT_BLANKS, "\n": "\t ", "": ""}
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
PLAIN_TEXTS = (
    "What is the capital of France?",
    "It is Paris.\n\nAnything else?",
    'Schreib `x = [1, 2]` auf, bitte: naïve café & "東京" < 3 🙂!',
    "def f(x):\n    return x + 1\n\n\nprint(f(10))  # {{ 11 }}",
    "ok",
)
"""Contents as people write them, by which a template and a tokenizer are checked when a model is loaded."""
_THOUGHT, _AFTER_THOUGHT = "quite a secret thought", "\n\n"

_PLAIN = ["u", "su", "uau", "suau", "uauau", "suauau", "uu", "uaau", "usu", "uasu", "suasu", "ssu", "au", "sau", "ua"]
_PROBES = [
    *(_Probe(roles) for roles in _PLAIN),
    _Probe("ua", add_generation_prompt=False),
    *(_Probe(roles, style="blanks") for roles in ("u", "su", "uau")),
    _Probe("uau", style="thoughts"),
    _Probe("su", style="empty"),
    *(_Probe(roles, style="prose") for roles in ("u", "su", "uau")),
]

# Letters, quotes and the rest betray a template that changes case, escapes or quotes.
_SLOT = re.compile("\ue000<\"Mm&([0-9]+)'>\ue001")
_DATE = re.compile(f"{DATE_START}([0-9]+){DATE_END}")
_MAX_DATE_FORMAT = 100
_PRIVATE = re.compile(f"[\ue000\ue001{DATE_START}{DATE_END}]")


def probe_cases() -> list[Case]:
    """Return the conversations to render for `shape_of`."""
    return [Case(_messages(probe), probe.add_generation_prompt) for probe in _PROBES]


def shape_of(rendered: Sequence[Rendered]) -> TemplateShape:
    """Return the shape that follows from the renderings of `probe_cases`.

    Raises:
        ModelError: The template refuses plain conversations, or changes contents in a way that is not understood.
    """
    return _Findings(dict(zip(_PROBES, rendered, strict=True))).shape()


def _messages(probe: _Probe) -> list[dict[str, str]]:
    messages = []
    for number, letter in enumerate(probe.roles):
        content = f"\ue000<\"Mm&{number}'>\ue001"
        if probe.style == "blanks":
            content = f"{_LEFT_BLANKS}{content}{_RIGHT_BLANKS}"
        elif probe.style == "prose":
            content = PLAIN_TEXTS[number]
        elif probe.style == "empty" and letter == "s":
            content = ""
        elif probe.style == "thoughts" and letter == "a":
            content = f"{THOUGHT_START}\n{_THOUGHT}\n{THOUGHT_END}{_AFTER_THOUGHT}{content}"
        messages.append({"role": _ROLES[letter], "content": content})
    return messages


class _Findings:
    """The renderings of all probes, and what can be read off them."""

    def __init__(self, results: Mapping[_Probe, Rendered]) -> None:
        self.results = results

    def shape(self) -> TemplateShape:
        user, turns = self.needed(_Probe("u")), self.needed(_Probe("uau"))
        closing = self.needed(_Probe("ua", add_generation_prompt=False))[-1]
        self.check_prose()
        opening: dict[Role, Text] = {"user": user[0]}
        between: dict[tuple[Role, Role], Text] = {("user", "assistant"): turns[1], ("assistant", "user"): turns[2]}
        to_answer: dict[Role, Text] = {"user": user[-1]}
        before_system: Text | None = None
        after_system: dict[Role, Text] = {}
        if texts := self.cut(_Probe("su")):
            before_system, after_system["user"] = texts[0], texts[1]
        if before_system is not None and (texts := self.cut(_Probe("sau"))):
            after_system["assistant"] = texts[1]
        if texts := self.cut(_Probe("au")):
            opening["assistant"] = texts[0]
        # An answer after an answer needs a header of its own.
        if (texts := self.cut(_Probe("ua"))) and texts[-1] != closing:
            to_answer["assistant"] = texts[-1]
        if texts := self.cut(_Probe("uu")):
            between["user", "user"] = texts[1]
        if texts := self.cut(_Probe("uaau")):
            between["assistant", "assistant"] = texts[2]
        if (texts := self.cut(_Probe("uasu"))) and (user_system := self.cut(_Probe("usu"))):
            between["assistant", "system"], between["system", "user"] = texts[2:4]
            between["user", "system"] = user_system[1]
        trims: dict[Role, Trim] = {"user": self.trim("u", 0), "assistant": self.trim("uau", 1)}
        trim_after_system = trims["user"]
        if before_system is not None:
            trims = {"system": self.trim("su", 0), **trims}
            trim_after_system = self.trim("su", 1)
        return TemplateShape(
            self.kind(before_system, between, to_answer, trims),
            opening,
            before_system,
            after_system,
            between,
            to_answer,
            closing,
            trims,
            trim_after_system,
            self.thought_strip(),
            self.ignores_empty_system(),
        )

    def kind(
        self,
        before_system: Text | None,
        between: Mapping[tuple[Role, Role], Text],
        to_answer: Mapping[Role, Text],
        trims: Mapping[Role, Trim],
    ) -> TemplateKind:
        system: SystemPlace = "first"
        if before_system is None:
            system = "unsupported"
        elif self.cut(_Probe("suau")) is None:
            system = "floating"
        drops_thoughts = _THOUGHT not in (self.results[_Probe("uau", style="thoughts")].text or "")
        opening = self.parts(_Probe("u"))[0]
        before, after = self.parts(_Probe("su"))[:2] if before_system is not None else (opening, "")
        differs = to_answer["user"] != between["user", "assistant"]
        texts = [text for probe in _PROBES for text in self.cut(probe) or ()]
        return TemplateKind(
            append_only=self.composes(system) and not (drops_thoughts or differs or system == "floating"),
            drops_thoughts=drops_thoughts,
            generation_prompt_differs=differs,
            system=system,
            default_system=opening.startswith(before) and opening not in (before, before + after),
            writes_date=any(isinstance(piece, DateSlot) for text in texts for piece in text),
            trims=tuple(role for role, trim in trims.items() if trim != Trim()),
            strict_turns=("user", "user") not in between,
        )

    def composes(self, system: SystemPlace) -> bool:
        """Return whether longer conversations are what their neighbors' pieces give."""
        if system == "first":
            first, turn = self.cut(_Probe("su")), self.cut(_Probe("suau"))
            longer = self.cut(_Probe("suauau"))
            if first is None or turn is None or longer is None:
                return False
            if turn[:2] != first[:2] or longer != (*turn[:4], *turn[2:]):
                return False
        first, turn = self.needed(_Probe("u")), self.needed(_Probe("uau"))
        return turn[0] == first[0] and self.cut(_Probe("uauau")) == (*turn[:3], *turn[1:])

    def trim(self, roles: str, number: int) -> Trim:
        """Return what is stripped from one message of a conversation."""
        plain, blanks = self.parts(_Probe(roles)), self.parts(_Probe(roles, style="blanks"))
        left: list[str | None] = []
        right: list[str | None] = []
        if len(plain) == len(blanks):
            before, after = blanks[number], blanks[number + 1]
            left = [chars for chars, rest in _LEFT_RESTS.items() if before.endswith(plain[number] + rest)]
            right = [chars for chars, rest in _RIGHT_RESTS.items() if after.startswith(rest + plain[number + 1])]
        if not left or not right:
            raise ModelError(
                f"the chat template strips {_ROLES[roles[number]]} messages in a way that is not understood"
            )
        return Trim(left[0], right[0])

    def check_prose(self) -> None:
        """Refuse a template that writes real messages otherwise than the markers."""
        for roles in ("u", "su", "uau"):
            probe = _Probe(roles)
            if self.cut(probe) is None:
                continue
            contents = [message["content"] for message in _messages(_Probe(roles, style="prose"))]
            expected = "".join(chain.from_iterable(zip_longest(self.parts(probe), contents, fillvalue="")))
            if self.results[_Probe(roles, style="prose")].text != expected:
                raise ModelError("the chat template changes the text of messages, which is not supported")

    def thought_strip(self) -> str:
        """Return what is stripped from the text after a thought."""
        plain, thoughts = self.parts(_Probe("uau")), self.parts(_Probe("uau", style="thoughts"))
        return "" if thoughts[1:2] == [plain[1] + _AFTER_THOUGHT] else _AFTER_THOUGHT

    def ignores_empty_system(self) -> bool:
        """Return whether an empty system prompt gives what none gives."""
        return self.parts(_Probe("su", style="empty")) == self.parts(_Probe("u"))

    def needed(self, probe: _Probe) -> tuple[Text, ...]:
        """Return the texts around the markers of a conversation that every template must render."""
        texts = self.cut(probe)
        if texts is None:
            roles = ", ".join(_ROLES[letter] for letter in probe.roles)
            why = self.results[probe].error or "a message is missing, moved or changed"
            raise ModelError(f"the chat template does not render a plain conversation ({roles}): {why}")
        return texts

    def parts(self, probe: _Probe) -> list[str]:
        """Return the texts around the markers, dates as the worker marked them."""
        return _SLOT.split(self.results[probe].text or "")[::2]

    def cut(self, probe: _Probe) -> tuple[Text, ...] | None:
        """Return the texts around the markers, or None where these do not all stand there once and in order."""
        rendered = self.results[probe]
        markers = _SLOT.split(rendered.text or "")[1::2]
        if markers != [str(number) for number in range(len(probe.roles))]:
            return None
        return tuple(_text(part, rendered.formats) for part in self.parts(probe))


def _text(part: str, formats: Sequence[str]) -> Text:
    """Return what a template wrote in one place, its dates found."""
    text: list[str | DateSlot] = []
    for position, piece in enumerate(_DATE.split(part)):
        if position % 2:
            text.append(_date_slot(formats[int(piece)]))
        elif _PRIVATE.search(piece):
            raise ModelError("the chat template takes the date or a message apart, which is not supported")
        elif piece:
            text.append(piece)
    return tuple(text)


def _date_slot(format: str) -> DateSlot:
    """Return a place for the date, its format checked."""
    try:
        if len(format) > _MAX_DATE_FORMAT:
            raise ValueError(f"it has more than {_MAX_DATE_FORMAT} characters")
        datetime(2024, 7, 26).strftime(format)
    except ValueError as error:
        raise ModelError(f"the chat template writes the date as {format[:80]!r}, which is refused: {error}") from error
    return DateSlot(format)
