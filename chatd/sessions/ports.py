"""What sessions need of the engine's client, the prompt encoder and the tokenizer, and nothing more of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import date as Date
from typing import TYPE_CHECKING, Protocol

from chatd.engine.client import EngineEvent
from chatd.engine.messages import FrontMessage, Ready
from chatd.protocol import Message
from chatd.sessions.detokenizer import Detokenizer

if TYPE_CHECKING:
    from chatd.sessions.prompt_encoder import SettledAnswer


class EngineGateway(Protocol):
    """What sessions need of `engine.client.EngineClient`."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it was last ready."""
        ...

    def send(self, message: FrontMessage) -> None:
        """Send without waiting; raises `Unavailable` where a `Submit` or `Fork` cannot be taken."""
        ...

    def batches(self) -> AsyncIterator[list[EngineEvent]]:
        """Yield what each read brought."""
        ...


class ChatEncoder(Protocol):
    """What sessions need of `sessions.prompt_encoder.PromptEncoder`."""

    @property
    def turn_end_id(self) -> int | None:
        """The template's turn end; of the stop ids only this one stays in a session's ids."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The ids at which an answer ends."""
        ...

    def begin(self, system: str | None, messages: Sequence[Message], *, date: Date) -> list[int]:
        """Return the ids of a whole conversation up to where the answer begins."""
        ...

    def extend(self, new_messages: Sequence[Message], *, answer_ended: bool, date: Date) -> list[int]:
        """Return the ids to append after an answer, up to where the next one begins."""
        ...

    def settle(self, answer_ids: Sequence[int]) -> SettledAnswer | None:
        """Return an answer as later prompts have it, where that differs: without its thoughts."""
        ...


class Vocabulary(Protocol):
    """What sessions need of `sessions.tokenizer.ChatTokenizer`."""

    @property
    def token_bytes(self) -> Mapping[int, bytes]:
        """The bytes of each token."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        ...
