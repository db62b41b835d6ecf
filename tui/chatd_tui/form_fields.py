"""What the form of a conversation's settings shows and what is typed into it. No widgets, no daemon."""

from __future__ import annotations

from dataclasses import dataclass

from chatd import typed_params
from chatd.clean import clean
from chatd.errors import InvalidRequest
from chatd.protocol import ContextPolicy, Params
from chatd.protocol.ranges import RANGES


@dataclass(frozen=True)
class Field:
    """One parameter.

    Attributes:
        name: Of `Params`.
        label: Beside the input.
        unset: What holds where neither the conversation nor the model says anything.
    """

    name: str
    label: str
    unset: str = "the model's"

    def default(self, defaults: Params | None) -> str:
        """Say what an empty field means, where the daemon told the model's parameters."""
        value = getattr(defaults, self.name) if defaults is not None else None
        return self.unset if value in (None, ()) else typed_params.text_of(self.name, value)

    @property
    def range_text(self) -> str:
        """The range of a number, "" where there is none worth a word."""
        within = RANGES.get(self.name)
        if within is None:
            return ""
        low, high = within
        return f"{low:g} and more" if high > 2**30 else f"{low:g} to {high:g}"


FIELDS = (
    Field("temperature", "temperature"),
    Field("top_p", "top p"),
    Field("top_k", "top k"),
    Field("min_p", "min p"),
    Field("max_tokens", "longest answer", "what fits"),
    Field("min_tokens", "shortest answer"),
    Field("seed", "seed", "drawn anew"),
    Field("stop", "stop texts", "none"),
    Field("stop_token_ids", "stop token ids", "none"),
    Field("repetition_penalty", "repetition penalty"),
    Field("presence_penalty", "presence penalty"),
    Field("frequency_penalty", "frequency penalty"),
    Field("logit_bias", "logit bias", "none"),
    Field("logprobs", "log probabilities", "none"),
    Field("ignore_eos", "ignore the model's end"),
)


@dataclass(frozen=True)
class FormView:
    """What the form begins with.

    Attributes:
        title: Of the conversation, cleaned; "" for one that is not there yet.
        system: Its system prompt.
        params: Its own parameters.
        context_policy: What a full context does.
        typeahead: Whether what is typed is read ahead.
        defaults: The model's parameters, where the daemon told them.
        max_bytes: Of a frame, which the system prompt must fit.
        locked: Why nothing can be changed, "" where it can.
        no_policy: Why the context policy cannot be changed.
        no_typeahead: Likewise of type-ahead.
    """

    title: str = ""
    system: str = ""
    params: Params = Params()  # noqa: RUF009
    context_policy: ContextPolicy = "refuse"
    typeahead: bool = False
    defaults: Params | None = None
    max_bytes: int = 0
    locked: str = ""
    no_policy: str = ""
    no_typeahead: str = ""


@dataclass(frozen=True)
class Changes:
    """What was changed in the form; None is as it was.

    Attributes:
        system: The system prompt.
        params: The text of each parameter that was changed, "" for its default.
        context_policy: What a full context does.
        typeahead: Whether what is typed is read ahead.
    """

    system: str | None = None
    params: tuple[tuple[str, str], ...] = ()
    context_policy: ContextPolicy | None = None
    typeahead: bool | None = None

    def over(self, params: Params) -> Params:
        """Return the parameters with those that were changed.

        Raises:
            InvalidRequest: Names the one that is wrong.
        """
        for name, text in self.params:
            params = typed_params.with_value(params, name, text)
        typed_params.check(params)
        return params


def changes(view: FormView, system: str, texts: dict[str, str], *, drops_oldest: bool, typeahead: bool) -> Changes:
    """Return what differs from what the form began with."""
    policy: ContextPolicy = "drop_oldest" if drops_oldest else "refuse"
    return Changes(
        # What is shown is cleaned, and that alone changes nothing.
        system=None if system == clean(view.system) else system,
        params=tuple((name, text) for name, text in texts.items() if text != text_of(view.params, name)),
        context_policy=None if policy == view.context_policy else policy,
        typeahead=None if typeahead == view.typeahead else typeahead,
    )


def text_of(params: Params, name: str) -> str:
    """Return a parameter as it is typed, "" for its default."""
    value = getattr(params, name)
    return "" if value in (None, ()) else typed_params.text_of(name, value)


def mistakes(texts: dict[str, str]) -> dict[str, str]:
    """Return what is wrong with each field's text, by its name."""
    wrong: dict[str, str] = {}
    params = Params()
    for name, text in texts.items():
        try:
            params = typed_params.with_value(params, name, text)
        except InvalidRequest as error:
            wrong[name] = error.message
    try:
        typed_params.check(params)
    except InvalidRequest as error:
        wrong.setdefault(error.param or "", error.message)
    return wrong
