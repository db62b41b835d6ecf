"""Killed at any moment, also within a commit: what a client was told is there, and every client shows the same."""

import asyncio
import logging
import random

import pytest

from chatd.errors import ChatdError, StorageError
from chatd.protocol import BranchSelect, Item, MessageEdit, Params, ResponseRegenerate, SessionUpdate, UserMessage
from chatd.sessions.manager import Session, SessionLimits
from chatd.testing.journal import JournalHandle, Killed, MemoryJournal
from chatd.testing.restarts import RestartingDaemon
from chatd.testing.session_simulation import SessionSimulation, on_the_spot
from chatd.testing.sessions import TURN_END, ScriptedEngine, encode_text, make_manager
from chatd.testing.transcripts import TranscriptClient

NUM_CRASHES = 200
SAYINGS = ("hello", "é🙂", "a STOP b", "")


def reply(log: list[int]) -> list[int]:
    return [*encode_text(SAYINGS[len(log) % 4] + "!" * (len(log) % 7)), TURN_END]


class World:
    """One session of one user, clients that come and go, and a daemon that is killed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        limits = SessionLimits(replay_events=self.rng.choice((2, 6, 1000)))
        self.daemon = RestartingDaemon(reply, limits=limits)
        self.session: Session
        self.always = TranscriptClient("always")
        self.clients = [TranscriptClient(f"con_{number}") for number in range(3)]
        self.title = ""
        self.has_failed = False

    async def run(self) -> None:
        await self.daemon.start()
        stop = ("STOP",) if self.rng.random() < 0.5 else ()
        self.session, _ = await self.daemon.open(params=Params(stop=stop))
        self.always.connect(self.daemon.manager, self.session)
        for _ in range(self.rng.randrange(12, 30)):
            await self.act()
            if self.daemon.handle.is_cut:
                await self.restart()
            self.always.read()
            assert self.always.items == self.daemon.manager.items(self.session)
        self.daemon.journal.error = None
        await self.restart()
        await self.finish()
        ended = self.always.items
        await self.restart()
        assert self.daemon.restored.turns == []
        self.always.read()
        assert self.always.items == ended

    async def act(self) -> None:
        rng, manager, session = self.rng, self.daemon.manager, self.session
        nodes = list(session.conversation)
        node = rng.choice(nodes).id if nodes else "none"
        client = rng.choice(self.clients)
        try:
            match rng.choice(
                ("say",) * 4
                + ("step",) * 8
                + ("connect", "disconnect", "kill", "arm", "cancel", "note")
                + ("edit", "regenerate", "select", "title", "disk", "die", "fail")
            ):
                case "say" | "note" as kind:
                    command = UserMessage(session=session.id, content=rng.choice(SAYINGS), respond=kind == "say")
                    await manager.user_message(session, command)
                case "edit":
                    edit = MessageEdit(session=session.id, item=node, content="x", respond=rng.random() < 0.5)
                    await manager.edit(session, edit)
                case "regenerate":
                    await manager.regenerate(session, ResponseRegenerate(session=session.id))
                case "select":
                    await manager.select_branch(session, BranchSelect(session=session.id, leaf=node))
                case "title":
                    title = f"title {rng.random()}"
                    await manager.update(session, SessionUpdate(session=session.id, title=title))
                    self.title = title
                case "step":
                    self.daemon.engine.step(rng.choice((1, 2, 5)))
                case "cancel":
                    await manager.cancel(session)
                case "connect" if client.connection is None:
                    client.connect(manager, session)
                case "disconnect":
                    client.disconnect(manager)
                case "die":
                    self.daemon.engine.die()
                    self.daemon.engine.restart()
                case "kill":
                    await self.restart()
                case "arm":
                    await self.restart(cut_at=rng.choice((1, 1, 2, 3)), takes_effect=rng.random() < 0.5)
                case "disk":
                    self.has_failed = True
                    self.daemon.journal.error = StorageError("no room") if rng.random() < 0.5 else None
        except ChatdError:
            pass
        except Killed:
            assert self.daemon.handle.is_cut
        await self.daemon.settle()

    async def restart(self, **options) -> None:
        """Kill the daemon after what clients were told last, and compare with what another one has."""
        everybody = (self.always, *(client for client in self.clients if client.connection is not None))
        for client in everybody:
            client.read()
        told = self.always.items
        self.daemon.journal.error = None
        await self.daemon.start(**options)
        self.session = await self.daemon.get(self.session)
        for item in told:
            node = self.session.conversation.get(item.id)
            assert node is not None, f"I23: {item.id} was told and is gone"
            if item.status != "in_progress":
                assert (node.content, node.status, node.reason, node.usage) == (
                    *(item.content, item.status, item.reason, item.usage),
                ), f"I23: {item.id} is another one"
            elif node.status == "in_progress":
                # What an answer's end was about to send comes again.
                assert item.content.startswith(node.content), f"{item.id} goes on after other text"
                assert self.has_failed or len(item.content) - len(node.content) < 5, "noted tokens are gone"
        if self.title:
            assert self.session.title == self.title
        for client in everybody:
            client.connection = None
            client.connect(self.daemon.manager, self.session)
            client.read()

    async def finish(self) -> None:
        await self.daemon.run()
        assert self.session.turn is None
        for node in self.session.conversation:
            assert node.status != "in_progress", f"I22: {node.id} is in progress and nothing runs"
        for client in (self.always, *self.clients):
            if client.connection is None:
                client.connect(self.daemon.manager, self.session)
            client.read()
            assert client.items == self.daemon.manager.items(self.session)
            assert client.last_seq == self.session.ring.head_seq


def test_what_was_told_is_there_after_every_one_of_many_crashes() -> None:
    num_starts = 0
    for seed in range(NUM_CRASHES):

        async def run(seed: int = seed) -> int:
            asyncio.get_running_loop().set_default_executor(on_the_spot())
            world = World(seed)
            await world.run()
            return world.daemon.num_starts

        try:
            num_starts += asyncio.run(run())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert num_starts > 3 * NUM_CRASHES


async def turn_with(commit_that_fails: int) -> tuple[int, list]:
    """Have one turn whose n-th commit finds no room; return how many commits there were and what was told."""
    daemon = await RestartingDaemon("hello").start()
    session, connection = await daemon.open()
    other, _ = await daemon.open(title="other")
    connection.take()
    num_commits = 0

    def fail(_changes) -> None:
        nonlocal num_commits
        num_commits += 1
        if num_commits == commit_that_fails:
            raise StorageError("no room")

    daemon.journal.before_commit = fail
    try:
        await daemon.say(session, "one")
    except StorageError as error:
        told = [error.error_code]
        assert connection.take() == []
    else:
        await daemon.run()
        told = [event.__struct_config__.tag for event in connection.take() if hasattr(event, "seq")]
    await daemon.manager.settle()
    before = daemon.manager.items(session)
    await daemon.say(other, "two")
    await daemon.run()
    daemon.journal.before_commit = None
    await daemon.start()
    assert daemon.restored.turns == []
    assert daemon.manager.items(await daemon.get(session)) == before
    assert [item.content for item in daemon.manager.items(await daemon.get(other))] == ["two", "hello"]
    return num_commits, told


async def test_a_full_disk_at_each_commit_of_a_turn_is_a_typed_refusal_and_nothing_else() -> None:
    assert (await turn_with(1))[1] == ["storage_error"]
    assert (await turn_with(2))[1][-2:] == ["response.failed", "session.updated"]
    assert (await turn_with(0))[1][-1] == "response.completed"


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_the_journal_has_what_is_in_memory(seed: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        journal = MemoryJournal()
        simulation = SessionSimulation(
            300 + seed,
            num_blocks=100 if seed % 2 else 50,
            journal=JournalHandle(journal),
            replay_events=(3, 1000)[seed % 2],
        )
        await simulation.run(300)
        await simulation.manager.settle()
    finally:
        logging.disable(logging.NOTSET)
    engine = ScriptedEngine(reply)
    manager = make_manager(engine, journal=journal, boot="boot_2", context=160)
    assert (await manager.restore()).turns == []
    for watched in simulation.watched:
        before, after = watched.session, await manager.resolve(watched.session.owner, watched.session.id)
        assert {node.id for node in after.conversation} == {node.id for node in before.conversation}
        assert [item_of(item) for item in manager.items(after)] == [
            item_of(i) for i in simulation.manager.items(before)
        ]
        assert list(after.conversation.log()) == list(before.conversation.log())
        assert (after.title, after.params, after.closed, after.updated_at) == (
            *(before.title, before.params, before.closed, before.updated_at),
        )


def item_of(item: Item) -> tuple[object, ...]:
    return (item.id, item.role, item.content, item.status, item.parent, item.reason, item.usage, item.context_from)
