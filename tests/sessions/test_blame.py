"""What ended an engine is counted against whoever was in its step, and against nobody else."""

from chatd.engine.pulse import NO_SUSPECT, NOT_KNOWN
from chatd.protocol import Params
from chatd.testing.restarts import RestartingDaemon
from chatd.testing.sessions import encode_text

TEXT = "abcdefgh" * 3


async def with_a_suspect() -> tuple[RestartingDaemon, list]:
    """Return a daemon with a suspect that is tried, and an answer that began beside it."""
    daemon = await RestartingDaemon(lambda _log: encode_text(TEXT)).start()
    suspect, _ = await daemon.open(params=Params(max_tokens=20))
    await daemon.say(suspect, "first")
    daemon.engine.step()
    daemon.engine.die()
    daemon.engine.restart()
    await daemon.settle()
    assert daemon.engine.submits[-1].is_suspect
    other, _ = await daemon.open(params=Params(max_tokens=20))
    await daemon.say(other, "second")
    daemon.engine.step()
    await daemon.settle()
    return daemon, [suspect, other]


async def answers_after(daemon: RestartingDaemon, sessions: list) -> list[str | None]:
    """Return the answers once the engine is there again; None for one that failed."""
    daemon.engine.restart()
    await daemon.settle()
    await daemon.run()
    found = []
    for session in sessions:
        item = daemon.manager.items(session)[-1] if daemon.manager.items(session) else None
        found.append(item.content if item is not None and item.role == "assistant" else None)
    return found


async def test_a_suspect_is_not_to_blame_for_what_others_do_in_steps_of_theirs() -> None:
    daemon, sessions = await with_a_suspect()
    daemon.engine.die(NO_SUSPECT)
    daemon.engine.restart()
    await daemon.settle()
    assert [submit.is_suspect for submit in daemon.engine.submits[-2:]] == [True, True]
    assert await answers_after(daemon, sessions) == [TEXT[:20], TEXT[:20]]


async def test_a_suspect_fails_with_the_engine_that_ends_in_its_own_step_and_nobody_else_is_one() -> None:
    daemon, sessions = await with_a_suspect()
    request = daemon.engine.submits[-2].request
    daemon.engine.die(request)
    daemon.engine.restart()
    await daemon.settle()
    assert not daemon.engine.submits[-1].is_suspect
    assert await answers_after(daemon, sessions) == [None, TEXT[:20]]


async def test_where_nobody_knows_all_that_were_running_are_suspects() -> None:
    daemon, sessions = await with_a_suspect()
    daemon.engine.die(NOT_KNOWN)
    daemon.engine.restart()
    await daemon.settle()
    assert daemon.engine.submits[-1].is_suspect
    assert await answers_after(daemon, sessions) == [None, TEXT[:20]]
