"""The turns of the scripted daemon: its sessions, and answers from scripts. It knows nothing of connections."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chatd import protocol as p
from chatd.errors import ChatdError, Conflict, NotFound
from chatd.testing.scripted_session import NOW, ScriptedSession


@dataclass(frozen=True)
class Script:
    """One answer.

    Attributes:
        deltas: Its pieces.
        before: State events to send first, without a session (it is filled in).
        delay_s: Before each piece.
        manual: Each piece waits for `ScriptedDaemon.release`.
        fail: Ends the turn with this error instead of a completion.
    """

    deltas: Sequence[str] = ("Hello", ".")
    before: Sequence[tuple[type[Any], dict[str, Any]]] = ()
    delay_s: float = 0.0
    manual: bool = False
    fail: ChatdError | None = None


class ScriptedTurns(ABC):
    """Keeps sessions and answers their messages.

    Args:
        scripts: Answers in order; when they are used up, the last one repeats.
    """

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.model = p.ModelInfo(id="smollm2-135m", context=8192, block_size=16, blocks=256)
        self.sessions: dict[str, ScriptedSession] = {}
        self._scripts = list(scripts)
        self._num_answers = 0
        self._ids = itertools.count(1)
        self._clock = itertools.count(1)
        self._answers: dict[str, p.Event] = {}
        self._permits = asyncio.Semaphore(0)

    @abstractmethod
    async def _broadcast(self, session: ScriptedSession, event: p.Event) -> None:
        """Send an event to everybody who is attached."""

    def release(self, deltas: int = 1) -> None:
        """Let a manual answer go on by this many pieces (its end counts as one)."""
        for _ in range(deltas):
            self._permits.release()

    def _fork(self, command: p.SessionFork) -> p.SessionCreated:
        origin = self._find(command.session)
        fork = ScriptedSession(f"ses_{next(self._ids)}", command.title or origin.title, origin.system)
        fork.params = origin.params
        at = command.at or (origin.items[-1].id if origin.items else None)
        for item in origin.items:
            fork.items.append(self._item(item.role, item.content, fork))
            if item.id == at:
                break
        else:
            raise NotFound(f"item {at!r} is not known", code="not_found")
        self.sessions[fork.id] = fork
        used = fork.info(self.model).context_used
        return p.SessionCreated(
            session=fork.info(self.model),
            shared_tokens=used,
            shared_blocks=-(-used // self.model.block_size),
            copies_on_write=int(used % self.model.block_size > 0),
            re=command.id,
        )

    async def _user_message(self, command: p.UserMessage | p.MessageEdit) -> None:
        session = self._free(command.session)
        item = self._item("user", command.content, session)
        if isinstance(command, p.MessageEdit):
            item = msgspec.structs.replace(item, parent=session.node(command.item).parent)
        shown = list(session.items)
        session.put(item)
        if not session.title:
            session.title = command.content[:40]
        added = p.ItemAdded(session=session.id, seq=0, ts=NOW, item=session.with_siblings(item), re=command.id)
        self._answers[command.id or ""] = await self._emit(session, added)
        self._begin(session, item, shown)

    async def _regenerate(self, command: p.ResponseRegenerate | p.ResponseContinue) -> None:
        session = self._free(command.session)
        target = session.node(command.item) if command.item else session.items[-1]
        asked = target if target.role == "user" else session.node(target.parent or "")
        begun = ""
        if isinstance(command, p.ResponseContinue):
            if target.status != "incomplete":
                raise Conflict("the answer is complete", code="not_continuable")
            begun = target.content
        shown = list(session.items)
        self._begin(session, asked, shown, re=command.id, begun=begun)

    def _free(self, ident: str) -> ScriptedSession:
        session = self._find(ident)
        if session.response is not None:
            raise Conflict("an answer is in progress in this session", code="turn_in_progress")
        return session

    def _begin(
        self,
        session: ScriptedSession,
        asked: p.Item,
        shown: Sequence[p.Item],
        *,
        re: str | None = None,
        begun: str = "",
    ) -> None:
        """Answer a message by the next script; `shown` is back if that fails."""
        session.response = f"res_{next(self._ids)}"
        session.cancelled = False
        script = self._scripts[min(self._num_answers, len(self._scripts) - 1)]
        self._num_answers += 1
        work = self._respond(session, script, asked, shown, re, begun)
        session.task = asyncio.get_running_loop().create_task(work)

    async def _respond(
        self,
        session: ScriptedSession,
        script: Script,
        asked: p.Item,
        shown: Sequence[p.Item],
        re: str | None,
        begun: str,
    ) -> None:
        response = session.response or ""
        for kind, fields in script.before:
            await self._broadcast(session, kind(session=session.id, **fields))
        item = p.Item(
            id=f"itm_{next(self._ids)}", role="assistant", content=begun, status="in_progress", parent=asked.id
        )
        session.put(item)
        item = session.with_siblings(item)
        created = p.ResponseCreated(session=session.id, seq=0, ts=NOW, response=response, item=item, re=re)
        stamped = await self._emit(session, created)
        if re is not None:
            self._answers[re] = stamped
        for delta in script.deltas:
            await self._pace(script)
            if session.cancelled:
                break
            item = msgspec.structs.replace(item, content=item.content + delta)
            session.put(item)
            event = p.OutputTextDelta(session=session.id, seq=0, ts=NOW, item_id=item.id, delta=delta, n_tokens=1)
            await self._emit(session, event)
        else:
            await self._pace(script)
        session.response = None
        if script.fail is not None:
            await self._fail(session, item, shown, response, script.fail, re)
            return
        await self._complete(session, item, response, len(script.deltas))

    async def _fail(
        self,
        session: ScriptedSession,
        item: p.Item,
        shown: Sequence[p.Item],
        response: str,
        error: ChatdError,
        re: str | None,
    ) -> None:
        """Take a turn back: its answer and, unless it was an answer again, its message."""
        session.remove(item)
        asked = session.items[-1]
        if re is None:
            session.remove(asked)
        parent = asked.id if re is not None else asked.parent
        failed = p.ResponseFailed(
            session=session.id,
            seq=0,
            ts=NOW,
            response=response,
            item_id=item.id,
            error=p.ErrorBody.of(error),
            parent=parent,
        )
        await self._emit(session, failed)
        if [other.id for other in shown] != [other.id for other in session.items]:
            parent, items = session.select(shown[-1].id)
            selected = p.BranchSelected(
                session=session.id, seq=0, ts=NOW, leaf=shown[-1].id, items=items, parent=parent
            )
            await self._emit(session, selected)

    async def _complete(self, session: ScriptedSession, item: p.Item, response: str, num_tokens: int) -> None:
        usage = p.Usage.of(64, 48, num_tokens)
        timings = p.Timings(queue_ms=1.0, ttft_ms=120.0, prefill_tok_s=400.0, decode_tok_s=38.0, preemptions=0)
        reason = "cancelled" if session.cancelled else "stop"
        status: p.ItemStatus = "incomplete" if session.cancelled else "completed"
        item = msgspec.structs.replace(item, status=status, reason=reason, usage=usage, timings=timings)
        session.put(item)
        common: dict[str, Any] = {
            "session": session.id,
            "seq": 0,
            "ts": NOW,
            "response": response,
            "item": item,
            "reason": reason,
            "usage": usage,
            "timings": timings,
        }
        await self._emit(
            session, p.ResponseIncomplete(**common) if session.cancelled else p.ResponseCompleted(**common)
        )
        used = session.info(self.model).context_used
        await self._broadcast(
            session,
            p.SessionUsage(
                session=session.id,
                context_used=used,
                context_max=self.model.context,
                blocks_held=-(-used // self.model.block_size),
                blocks_shared=4,
            ),
        )

    async def _pace(self, script: Script) -> None:
        if script.manual:
            await self._permits.acquire()
        elif script.delay_s:
            await asyncio.sleep(script.delay_s)

    def _item(self, role: p.Role, content: str, session: ScriptedSession, status: p.ItemStatus = "completed") -> p.Item:
        parent = session.items[-1].id if session.items else None
        return p.Item(id=f"itm_{next(self._ids)}", role=role, content=content, status=status, parent=parent)

    def _find(self, ident: str) -> ScriptedSession:
        session = self.sessions.get(ident)
        if session is None:
            raise NotFound(f"session {ident!r} is not known", code="session_not_found")
        return session

    def _listed(self, command: p.SessionList) -> p.SessionListed:
        start = int(command.cursor or 0)
        found = [s for s in self.sessions.values() if s.archived == command.archived and _has(s, command.query)]
        infos = sorted((s.info(self.model) for s in found), key=lambda info: -info.updated_at)
        end = start + command.limit
        cursor = str(end) if end < len(infos) else None
        passages = [
            p.Passage(session=session.id, item=item.id, text=item.content)
            for session in found
            for item in session.items[::-1]
            if command.query and command.query.lower() in item.content.lower()
        ]
        return p.SessionListed(sessions=infos[start:end], next_cursor=cursor, passages=passages, re=command.id)

    async def _emit(self, session: ScriptedSession, event: Any) -> p.Event:
        """Give a transcript event its `seq`, keep it for replay and send it; `re` stays with the sender."""
        session.seq += 1
        session.touched = next(self._clock)
        stamped: p.Event = msgspec.structs.replace(event, seq=session.seq)
        session.ring.append(
            msgspec.structs.replace(event, seq=session.seq, re=None) if hasattr(event, "re") else stamped
        )
        await self._broadcast(session, stamped)
        return stamped


def _has(session: ScriptedSession, query: str | None) -> bool:
    texts = [session.title, *(item.content for item in session.items)]
    return query is None or any(query.lower() in text.lower() for text in texts)
