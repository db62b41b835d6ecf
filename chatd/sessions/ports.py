"""What sessions need of the engine's client, the prompt encoder and the tokenizer, and nothing more of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import date as Date
from typing import TYPE_CHECKING, Protocol

from chatd.engine.client import EngineEvent
from chatd.engine.messages import FrontMessage, Ready
from chatd.journal.records import Change, Erased, Match, MessageRecord, SaveAnswer, SessionRecord
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


class Journal(Protocol):
    """What sessions need of `journal.journal.Journal`: what is committed survives a crash of everything.

    All methods are called on the event loop, which none of them blocks for longer than a dictionary's work; but
    `note_crashes` does at the start, for two small files.
    """

    @property
    def crash(self) -> str:
        """What is known of a fault in native code, or of want of memory, that ended the daemon before; "" of none."""
        ...

    def note_crashes(self, *, is_counted: bool) -> None:
        """Have a crash of this process noted from now on, and forget the one that was found where it is counted.

        The thread that calls it is the one whose stack may overflow and be noted.
        """
        ...

    async def commit(self, changes: Sequence[Change]) -> None:
        """Return when all changes are durable; commits that come together share one (group commit).

        They take effect in the order of the calls. Raises `StorageError` where nothing of them was kept: no room, an
        I/O error, a closed journal.
        """
        ...

    def append_tokens(self, message: str, start: int, ids: Sequence[int]) -> None:
        """Note tokens of an answer in flight; they are written soon, and never waited for.

        `start` is the position in the answer; what is known from there on is replaced.
        """
        ...

    async def erase(self, session: str) -> Erased:
        """Commit an `EraseSession` and return what it removed, when nothing of it is left in the journal's files."""
        ...

    async def erase_tenant(self, tenant: str) -> tuple[int, Erased]:
        """Remove all that there is of a tenant, its usage too; return how many sessions, and what they had."""
        ...

    async def message(self, message: str) -> tuple[str, str, MessageRecord] | None:
        """Return a message's tenant, user and record; None where there is none of this id."""
        ...

    async def sessions(self) -> list[SessionRecord]:
        """Return every session, for the daemon's start."""
        ...

    async def in_flight(self) -> list[tuple[str, str]]:
        """Return (session id, message id) of every answer that has not ended."""
        ...

    async def messages(self, session: str) -> list[MessageRecord]:
        """Return a session's messages, parents before children, siblings in the order they were added.

        An answer in flight has the ids that were written.
        """
        ...

    async def find(self, tenant: str, user: str, query: str, limit: int) -> list[Match]:
        """Return an owner's sessions whose messages or titles match, and where, the best first."""
        ...

    async def answers(self, since: float) -> list[SaveAnswer]:
        """Return the kept answers to commands, oldest first, for the daemon's start."""
        ...
