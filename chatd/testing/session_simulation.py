"""Conversations at random, one level above the engine: a session manager on the real engine core, and its clients.

Every session has one client that never goes away and others that come and go. After every action, what each client
shows is what the session holds (I17), history has committed turns only (I22), a session has one turn in flight and is
free after each (I24), and the engine's lease begins with the session's own ids (I25); the runner compares every slot
with them as well. Each step that a seed takes is the same the next time: what the manager does in threads is done on
the spot here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from chatd.engine.messages import Release
from chatd.errors import ChatdError, NotFound
from chatd.protocol import (
    BranchSelect,
    MessageEdit,
    Params,
    ResponseRegenerate,
    SessionCreate,
    SessionFork,
    UserMessage,
)
from chatd.sessions.logs import Node, log_of
from chatd.sessions.manager import Owner, Session, SessionLimits
from chatd.sessions.ports import Journal
from chatd.sessions.turn import Turn
from chatd.testing.sessions import TURN_END, CoreEngine, encode_text, make_manager
from chatd.testing.transcripts import TranscriptClient

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

OWNERS = (Owner("acme", "ann"), Owner("acme", "bob"), Owner("blue", "ann"))
SYSTEMS = (None, "be brief", "you know all about the pool, " * 2)
TEXTS = ("", "hi", "é🙂", "what is a block?", "and one that is longer than a few blocks are")
PARAMS = (
    Params(),
    Params(max_tokens=1),
    Params(max_tokens=3),
    Params(stop=("be", "ab")),
    Params(stop=("🙂", "eeee")),
    Params(ignore_eos=True),
    Params(stop_token_ids=(65, 97)),
)
ANSWER_IDS = (*encode_text("aabbee   é🙂"), TURN_END)
MAX_SESSIONS = 7
NUM_CLIENTS = 3
REFUSALS = {
    *("session_busy", "not_responding", "context_length_exceeded", "engine_unavailable", "too_many_sessions"),
    *("invalid_request", "too_many_turns"),
}
"""What may be answered to a command that is well-formed."""

_MAX_TURNS_OF_THE_LOOP = 10_000


class _OnTheSpot(ThreadPoolExecutor):
    """Runs what it is given before it answers, so that a seed decides what happens when."""

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Run a function now."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def on_the_spot() -> ThreadPoolExecutor:
    """Return an executor that runs what it is given before it answers."""
    return _OnTheSpot()


class Watched:
    """A session and those who look at it; `always` is never away.

    Attributes:
        turn: In flight when it was looked at last.
        path: Its messages when it was last free.
    """

    def __init__(self, session: Session) -> None:
        self.turn: Turn | None = None
        self.path: list[str] = []
        self.session = session
        self.always = TranscriptClient(f"{session.id}_always")
        self.clients = [TranscriptClient(f"{session.id}_{number}") for number in range(NUM_CLIENTS)]


class SessionSimulation:
    """One run; made and used inside a running loop.

    Args:
        seed: Of everything random.
        num_blocks: Of the pool.
        replay_events: That a session keeps for those who come back.
        journal: Keeps the sessions; with one, nothing that is told is only in memory.

    Attributes:
        counts: What happened.
    """

    def __init__(
        self, seed: int, *, num_blocks: int = 60, replay_events: int = 40, journal: Journal | None = None
    ) -> None:
        asyncio.get_running_loop().set_default_executor(on_the_spot())
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.engine = CoreEngine(
            num_blocks,
            answer_ids=ANSWER_IDS,
            block_size=4,
            max_model_len=160,
            max_num_seqs=4,
            max_num_batched_tokens=40,
            max_leases=12,
        )
        limits = SessionLimits(replay_events=replay_events, max_closed_sessions_per_user=4)
        self.manager = make_manager(self.engine, limits=limits, max_tokens=12, context=160, journal=journal)
        self.watched: list[Watched] = []
        self._may_fail = False

    async def run(self, num_actions: int) -> None:
        """Act so many times, and let everything come to its end."""
        for _ in range(num_actions):
            await self.act()
        await self.finish()

    async def act(self) -> None:
        """Do something, and check everything."""
        verb = self.rng.choices(_VERBS, _WEIGHTS)[0]
        await self.do(verb)

    async def do(self, verb: str) -> None:
        """Do one thing, and check everything."""
        try:
            if await getattr(self, f"_{verb}")():
                self.counts[f"session {verb}"] += 1
        except ChatdError as error:
            self._note_refusal(error)
        self.watched = [watched for watched in self.watched if await self._is_known(watched.session)]
        self.check()

    async def finish(self) -> None:
        """Let every turn end, and compare everything once more with every client."""
        self.engine.runner.failing.clear()
        self.engine.runner.not_finite.clear()
        self.engine.run()
        await self._settle()
        assert self.manager.num_in_flight == 0, "I24: turns are in flight and nothing runs"
        for watched in self.watched:
            assert watched.session.turn is None, f"I24: {watched.session.id} is busy and nothing runs"
            for client in watched.clients:
                if client.connection is None and not watched.session.closed:
                    client.connect(self.manager, watched.session)
        self.check()
        for reason, number in self.manager.stats.turns_ended.items():
            self.counts[f"end {reason}"] += number
        if not self._may_fail:
            assert self.engine.core.stats().num_failed_steps == 0, "a step failed with nothing wrong"

    # What can happen; each says whether it did.

    async def _create(self) -> bool:
        if len(self.watched) >= MAX_SESSIONS:
            return False
        rng = self.rng
        command = SessionCreate(system=rng.choice(SYSTEMS), params=rng.choice(PARAMS))
        self._watch(await self._done(self.manager.create(rng.choice(OWNERS), command)))
        return True

    async def _say(self) -> bool:
        watched = self._any()
        if watched is None:
            return False
        await self._done(self.manager.user_message(watched.session, self._message(watched)))
        return True

    async def _say_at_once(self) -> bool:
        """Several writers at the same time: one is answered, the others are told that it is busy."""
        watched = self._any()
        if watched is None:
            return False
        session = watched.session
        # Drawn before any command is made: whoever draws may end the run, and a command that is made has to be awaited.
        messages = [self._message(watched) for _ in range(3)]
        commands = [self.manager.user_message(session, message) for message in messages]
        commands.append(self.manager.regenerate(session, ResponseRegenerate(session=session.id)))
        before = session.turn
        results = await self._done(asyncio.gather(*commands, return_exceptions=True))
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            assert isinstance(error, ChatdError), f"a writer was answered with {error!r}"
            assert error.error_code in REFUSALS, f"a writer was refused: {error.error_code}"
        assert len(errors) >= len(commands) - (before is None), "I24: two turns of one session at once"
        return True

    async def _note(self) -> bool:
        watched = self._any()
        if watched is None:
            return False
        session = watched.session
        command = UserMessage(session=session.id, content=self.rng.choice(TEXTS), respond=False)
        await self._done(self.manager.user_message(session, command))
        return True

    async def _edit(self) -> bool:
        found = self._any_node()
        if found is None:
            return False
        session, node = found
        respond = node.role == "user" and self.rng.random() < 0.8
        command = MessageEdit(session=session.id, item=node.id, content=self.rng.choice(TEXTS), respond=respond)
        await self._done(self.manager.edit(session, command))
        return True

    async def _regenerate(self) -> bool:
        found = self._any_node()
        if found is None:
            return False
        session, node = found
        item = node.id if self.rng.random() < 0.5 else None
        await self._done(self.manager.regenerate(session, ResponseRegenerate(session=session.id, item=item)))
        return True

    async def _select(self) -> bool:
        found = self._any_node()
        if found is None:
            return False
        session, node = found
        await self._done(self.manager.select_branch(session, BranchSelect(session=session.id, leaf=node.id)))
        return True

    async def _fork(self) -> bool:
        found = self._any_node()
        if found is None or len(self.watched) >= MAX_SESSIONS:
            return False
        session, node = found
        at = node.id if self.rng.random() < 0.8 else None
        fork, _ = await self._done(self.manager.fork(session, SessionFork(session=session.id, at=at)))
        self._watch(fork)
        return True

    async def _cancel(self) -> bool:
        watched = self._any()
        if watched is None:
            return False
        await self._done(self.manager.cancel(watched.session))
        return True

    async def _close(self) -> bool:
        """Close a session; it can be gone on with, under another lease, or is forgotten here."""
        watched = self._any()
        if watched is None or self.rng.random() < 0.5:
            return False
        await self._done(self.manager.close(watched.session))
        for client in (watched.always, *watched.clients):
            client.read()
            assert client.connection is None, "a client of a closed session is still attached"
        if self.rng.random() < 0.5:
            self.watched.remove(watched)
        else:
            watched.always.connect(self.manager, watched.session)
        return True

    async def _connect(self) -> bool:
        watched = self._any()
        if watched is None:
            return False
        client = self.rng.choice(watched.clients)
        if client.connection is not None:
            return False
        client.connect(self.manager, watched.session)
        return True

    async def _disconnect(self) -> bool:
        watched = self._any()
        if watched is None:
            return False
        client = self.rng.choice(watched.clients)
        if client.connection is None:
            return False
        client.disconnect(self.manager)
        return True

    async def _give_up(self) -> bool:
        """A writer goes away while its command is being carried out."""
        watched = self._any()
        if watched is None:
            return False
        message, patience = self._message(watched), self.rng.randrange(4)
        task = asyncio.create_task(self.manager.user_message(watched.session, message))
        for _ in range(patience):
            await asyncio.sleep(0)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, ChatdError):
            raise result
        return True

    async def _step(self) -> bool:
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            self.engine.step()
            await self._settle()
        return True

    async def _break(self) -> bool:
        """A step fails, or the logits of a request are not finite."""
        runner, requests = self.engine.runner, list(self.engine.core.scheduler.requests)
        if not requests:
            return False
        self._may_fail = True
        dice = self.rng.random()
        if dice < 0.4:
            runner.raise_next = True
        else:
            (runner.failing if dice < 0.7 else runner.not_finite).add(self.rng.choice(requests))
        return True

    async def _lose(self) -> bool:
        """The engine forgets a lease, and the front does not know."""
        watched = self._any()
        if watched is None or watched.session.turn is not None:
            return False
        self.engine.core.handle(Release(watched.session.lease.id), self.engine.clock())
        return True

    async def _die(self) -> bool:
        """The engine dies; what is asked meanwhile is refused."""
        self.engine.die()
        await self._settle()
        self.check()
        if self.rng.random() < 0.5:
            try:
                await self._say()
            except ChatdError as error:
                self._note_refusal(error)
        self.engine.restart()
        return True

    # Parts.

    def check(self) -> None:
        """Check all sessions and all clients that are there.

        Raises:
            AssertionError: Names what is broken.
        """
        for watched in self.watched:
            session = watched.session
            items = self.manager.items(session)
            for client in (watched.always, *watched.clients):
                client.read()
                if client.connection is not None:
                    assert [_shown(item) for item in client.items] == [_shown(item) for item in items], (
                        f"I17: {client.name} shows another transcript"
                    )
                    assert client.last_seq == session.ring.head_seq, f"I17: {client.name} has not seen everything"
            self._check_history(session)
            self._check_rollback(watched)
            self._check_lease(session)

    async def _is_known(self, session: Session) -> bool:
        """Return whether a session can still be named: of the closed ones the longest unused are forgotten."""
        try:
            return await self.manager.resolve(session.owner, session.id) is session
        except NotFound:
            return False

    def _note_refusal(self, error: ChatdError) -> None:
        assert error.error_code in REFUSALS, f"what is well-formed is refused: {error.error_code}: {error}"
        self.counts[f"refused {error.error_code}"] += 1

    def _check_history(self, session: Session) -> None:
        open_answers = [node for node in session.conversation if node.status == "in_progress"]
        answer = None if session.turn is None else session.turn.answer
        assert open_answers == ([] if answer is None else [answer]), f"I22: {session.id} has answers that nobody ends"
        for node in session.conversation:
            if node.is_answer and node is not answer:
                assert node.reason is not None and node.usage is not None, f"I22: {node.id} never ended"  # noqa: PT018
                assert node.usage.output_tokens >= len(node.ids), f"I17: {node.id} has more ids than were counted"
            assert node.parent is None or session.conversation.get(node.parent.id) is node.parent, (
                f"I22: {node.id} hangs on a message that is gone"
            )

    def _check_rollback(self, watched: Watched) -> None:
        session, before = watched.session, watched.turn
        path = [node.id for node in session.conversation.path()]
        if session.turn is None:
            if before is not None and before.answer is not None and before.answer not in session.conversation:
                self.counts["rolled back"] += 1
                assert path == watched.path, f"I22: {session.id} is elsewhere than before the turn that failed"
            watched.path = path
        watched.turn = session.turn

    def _check_lease(self, session: Session) -> None:
        lease = session.lease
        held = self.engine.core.leases.get(lease.id)
        if held is None or lease.node is None or session.turn is not None or lease.fork_of is not None:
            return
        log = list(log_of(lease.node))[: lease.num_tokens]
        length = min(len(log), len(held.token_ids))
        assert list(held.token_ids[:length]) == log[:length], f"I25: the lease of {session.id} has other ids"

    def _watch(self, session: Session) -> None:
        watched = Watched(session)
        watched.always.connect(self.manager, session)
        self.watched.append(watched)

    def _any(self) -> Watched | None:
        return self.rng.choice(self.watched) if self.watched else None

    def _any_node(self) -> tuple[Session, Node] | None:
        watched = self._any()
        nodes = [] if watched is None else list(watched.session.conversation)
        if watched is None or not nodes:
            return None
        return watched.session, self.rng.choice(nodes)

    def _message(self, watched: Watched) -> UserMessage:
        rng, session = self.rng, watched.session
        nodes = list(session.conversation)
        parent = rng.choice(nodes).id if nodes and rng.random() < 0.1 else None
        return UserMessage(
            session=session.id, content=rng.choice(TEXTS), parent=parent, params=rng.choice((None, *PARAMS))
        )

    async def _done(self, command: Coroutine[Any, Any, Result] | asyncio.Future[Result]) -> Result:
        """Carry out a command, stepping the engine for as long as that waits for it."""
        task = asyncio.ensure_future(command)
        for turn in range(_MAX_TURNS_OF_THE_LOOP):
            if task.done():
                return await task
            await asyncio.sleep(0)
            if turn > 20:
                self.engine.step()
        raise AssertionError("a command never comes to its end")

    async def _settle(self) -> None:
        """Let the loop do what it has to."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.engine.flush()


def _shown(item: Any) -> tuple[object, ...]:
    """Return what a client must show of a message; what is beside it is told when it is asked for."""
    return (item.id, item.role, item.content, item.status, item.parent, item.reason, item.usage)


_WEIGHT_OF = {
    "create": 5,
    "say": 12,
    "say_at_once": 2,
    "note": 2,
    "edit": 5,
    "regenerate": 4,
    "select": 3,
    "fork": 3,
    "cancel": 5,
    "close": 3,
    "connect": 6,
    "disconnect": 6,
    "give_up": 2,
    "step": 30,
    "break": 2,
    "lose": 2,
    "die": 1,
}
VERBS = tuple(_WEIGHT_OF)
_VERBS, _WEIGHTS = list(_WEIGHT_OF), list(_WEIGHT_OF.values())


def simulate_sessions(seed: int, num_actions: int, **options: Any) -> Counter[str]:
    """Run a simulation to its end and return what happened."""

    async def run() -> Counter[str]:
        simulation = SessionSimulation(seed, **options)
        await simulation.run(num_actions)
        return simulation.counts

    return asyncio.run(run())
