"""A daemon's sessions over a journal in memory, that can be killed and started again in one process.

```
daemon = await RestartingDaemon(journal=MemoryJournal()).start()
session, connection = await daemon.open()
await daemon.say(session, "hello")
daemon.engine.step()
await daemon.start()                     killed, and another one has what was durable
session = await daemon.get(session)
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from chatd.protocol import SessionAttach, SessionCreate, UserMessage
from chatd.sessions.manager import Owner, Restored, Session, SessionManager
from chatd.testing.journal import JournalHandle, MemoryJournal
from chatd.testing.sessions import TURN_END, RecordingSubscriber, ScriptedEngine, encode_text, make_manager

ANN = Owner("acme", "ann")


class RestartingDaemon:
    """A manager over a journal; `start` kills the one before.

    Args:
        reply: What is answered, or what gives the ids of an answer to a log.
        journal: Outlives every daemon.
        options: Of `make_manager`.
    """

    def __init__(
        self,
        reply: str | Callable[[list[int]], Sequence[int]] = "hello",
        journal: MemoryJournal | None = None,
        **options: Any,
    ) -> None:
        self.journal = journal or MemoryJournal()
        self.num_starts = 0
        self.handle: JournalHandle | None = None
        self.engine: ScriptedEngine
        self.manager: SessionManager
        self.restored: Restored
        self._reply = reply
        self._options = options

    async def start(self, *, cut_at: int = 0, takes_effect: bool = False, **options: Any) -> Self:
        """Kill what runs, and start another one; that is killed at commit `cut_at`, where it is not 0."""
        self.num_starts += 1
        if self.handle is not None:
            self.handle.is_cut = True
        self.handle = JournalHandle(self.journal, cut_at=cut_at, takes_effect=takes_effect)
        reply = self._reply
        self.engine = ScriptedEngine(
            (lambda _log: [*encode_text(reply), TURN_END]) if isinstance(reply, str) else reply
        )
        boot = f"boot_{self.num_starts}"
        self.manager = make_manager(self.engine, **{"journal": self.handle, "boot": boot, **self._options, **options})
        self.restored = await self.manager.restore()
        return self

    async def settle(self) -> None:
        """Let the loop do what it has to."""
        for _ in range(20):
            await asyncio.sleep(0)
        self.engine.flush()

    async def until(self, is_so: Callable[[], bool], *, step: bool = False) -> None:
        """Return once something is so, with a step of the engine each time it is not."""
        async with asyncio.timeout(10):
            while not is_so():
                if step and self.engine.running:
                    self.engine.step()
                await asyncio.sleep(0.001)
                self.engine.flush()

    async def run(self) -> None:
        """Let every answer come to its end."""
        self.engine.run()
        await self.settle()

    async def open(self, **fields: Any) -> tuple[Session, RecordingSubscriber]:
        """Open a session, and attach to it."""
        session = await self.manager.create(ANN, SessionCreate(**fields))
        return session, self.listen(session)

    def listen(self, session: Session) -> RecordingSubscriber:
        """Attach to a session."""
        subscriber = RecordingSubscriber(f"con_{session.id}")
        self.manager.attach(session, subscriber, SessionAttach(session=session.id))
        self.manager.start(session, subscriber)
        return subscriber

    async def say(self, session: Session, text: str, **fields: Any) -> None:
        """Say something."""
        asked = {name: fields.pop(name) for name in ("receipt", "key_id") if name in fields}
        await self.manager.user_message(session, UserMessage(session=session.id, content=text, **fields), **asked)

    async def get(self, session: Session) -> Session:
        """Return a session of an earlier start as this one has it."""
        return await self.manager.resolve(ANN, session.id)
