"""A model's chat template: loaded, probed once in a process of its own, and classed.

What a conversation's ids are is the work of `prompt_encoder`, from the pieces found here.
"""

from collections.abc import Mapping, Sequence
from datetime import date as Date
from datetime import datetime, time
from pathlib import Path
from typing import Any

from chatd.errors import InvalidRequest, ModelError
from chatd.protocol import Message
from chatd.sessions.template_sandbox import MAX_TEMPLATE_BYTES, Case, TemplateRefused, render_all
from chatd.sessions.template_shape import TemplateKind, TemplateShape, probe_cases, shape_of
from chatd.sessions.tokenizer import MAX_CONFIG_BYTES, ChatTokenizer, read_json

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """A model's chat template: its source, its kind and the pieces that it writes around contents.

    Args:
        source: jinja2, as transformers understands it.
        tokenizer: Gives the template's variables, such as `bos_token`.
        name: Of the model, for messages.

    Raises:
        ModelError: The template is hostile, does not compile, or does not render plain conversations.
    """

    def __init__(self, source: str, tokenizer: ChatTokenizer, *, name: str = "") -> None:
        self.name = name or tokenizer.name
        self.source = source
        self._variables: Mapping[str, Any] = tokenizer.special_tokens
        try:
            self.shape: TemplateShape = shape_of(render_all(source, self._variables, probe_cases()))
        except TemplateRefused as error:
            raise ModelError(f"the chat template of {self.name} is refused: {error}") from error
        except ModelError as error:
            raise ModelError(f"{self.name}: {error.message}") from error

    @classmethod
    def load(cls, folder: Path, tokenizer: ChatTokenizer) -> "ChatTemplate":
        """Load the template of a model folder: chat_template.jinja, else the one in tokenizer_config.json.

        Raises:
            ModelError: There is none, or it is refused; see the class.
        """
        return cls(_source(folder), tokenizer, name=folder.name)

    @property
    def kind(self) -> TemplateKind:
        """How the template behaves; `str()` of it is what is printed at start."""
        return self.shape.kind

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, date: Date) -> str:
        """Return what the template itself makes of a conversation, contents and all.

        For checks and tools: it starts a process each time, and its text must not be encoded as it is, since content
        in it could read as control tokens.

        Raises:
            InvalidRequest: The template refuses the conversation, or exceeds its limits on it.
        """
        plain = [{"role": message.role, "content": message.content} for message in messages]
        moment = moment_of(date).isoformat()
        try:
            rendered = render_all(self.source, self._variables, [Case(plain, add_generation_prompt)], date=moment)[0]
        except TemplateRefused as error:
            raise InvalidRequest(f"the chat template cannot render this: {error}", param="messages") from error
        if rendered.text is None:
            raise InvalidRequest(f"the chat template refuses this: {rendered.error}", param="messages")
        return rendered.text


def moment_of(date: Date) -> datetime:
    """Return a date as the moment that a template formats: midnight, where it has no time of its own."""
    return date if isinstance(date, datetime) else datetime.combine(date, time())


def _source(folder: Path) -> str:
    path = folder / TEMPLATE_FILE
    try:
        if path.exists():
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ModelError(f"{TEMPLATE_FILE} of {folder.name} has more than {MAX_TEMPLATE_BYTES} bytes")
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{TEMPLATE_FILE} of {folder.name} cannot be read: {error}") from error
    config_path = folder / "tokenizer_config.json"
    found = read_json(config_path, MAX_CONFIG_BYTES).get("chat_template") if config_path.exists() else None
    if isinstance(found, list):
        found = next(
            (entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"),
            None,
        )
    if not isinstance(found, str):
        raise ModelError(
            f"{folder.name} has no chat template",
            hint=f"a base model cannot chat; put a {TEMPLATE_FILE} into its folder if it is a chat model",
        )
    return found
