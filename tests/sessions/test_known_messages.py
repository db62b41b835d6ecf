"""The index of known messages, beside a plain model of what it should find."""

from hypothesis import given, settings
from hypothesis import strategies as st

from chatd.engine.messages import LeaseId
from chatd.engine.sampling import SamplingParams
from chatd.protocol import Message
from chatd.sessions.conversation import Conversation, Owner
from chatd.sessions.events import EventRing
from chatd.sessions.known_messages import KnownMessages
from chatd.sessions.leases import Lease
from chatd.sessions.logs import Node
from chatd.sessions.session import Session

OWNERS = (Owner("t", "a"), Owner("t", "b"))


def session_of(owner: Owner, number: int) -> Session:
    return Session(
        f"s{number}",
        owner,
        Conversation(),
        Lease(LeaseId(number)),
        EventRing(max_events=1, max_bytes=1, ttl_s=1.0),
        model_id="m",
        context_max=lambda: 1,
        clock=lambda: 0.0,
    )


def grow(session: Session, user: str, said: str) -> Node:
    conversation = session.conversation
    asked = conversation.add_message(f"u{len(conversation)}", "user", user, conversation.head)
    answer = conversation.begin_answer(f"a{len(conversation)}", asked, [1], SamplingParams(max_tokens=1), ())
    answer.append_text(said)
    return answer


TURN = st.tuples(st.sampled_from("xy"), st.sampled_from("pq"))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 5), TURN),
        st.tuples(st.just("find"), st.integers(0, 1), st.lists(TURN, max_size=4)),
        st.tuples(st.just("forget"), st.integers(0, 5), st.none()),
    ),
    max_size=40,
)


def as_messages(turns: list[tuple[str, str]]) -> list[Message]:
    said = [
        Message(role=role, content=text)
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*said, Message(role="user", content="next")]


@settings(max_examples=300, deadline=None)
@given(OPERATIONS)
def test_the_longest_chain_with_a_holder_is_found(operations: list) -> None:
    known = KnownMessages(10_000)
    sessions = [session_of(OWNERS[i % 2], i) for i in range(6)]
    turns: list[list[tuple[str, str]]] = [[] for _ in sessions]
    holders: dict[tuple[Owner, tuple], tuple[Session, Node]] = {}
    for kind, number, value in operations:
        if kind == "grow":
            session = sessions[number]
            turns[number].append(value)
            answer = grow(session, *value)
            key = (session.owner, tuple(turns[number]))
            before = holders.get(key)
            holders[key] = (session, answer)
            superseded = known.remember(session, answer)
            still = {holder for holder, _ in holders.values()}
            assert superseded is (before[0] if before is not None and before[0] not in still else None)
            assert known.holds(session)
        elif kind == "forget":
            known.forget(sessions[number])
            holders = {key: held for key, held in holders.items() if held[0] is not sessions[number]}
            turns[number] = []
            sessions[number]._conversation = Conversation()
        else:
            owner = OWNERS[number]
            found = known.find(owner, as_messages(value))
            expected = None
            for end in range(len(value), 0, -1):
                held = holders.get((owner, tuple(value[:end])))
                if held is not None:
                    expected = (*held, 2 * end)
                    break
            assert (None if found is None else (found.session, found.node, found.num_messages)) == expected
        nodes = {(owner, path[: i + 1]) for owner, path in holders for i in range(len(path))}
        asked = {(owner, path[:-1], path[-1][0]) for owner, path in nodes}
        assert len(known) == len(nodes) + len(asked)
    for session in sessions:
        known.forget(session)
    assert len(known) == 0
    assert known._roots == known._held == known._num_under_root == {}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), TURN), max_size=60), st.integers(2, 12))
def test_the_number_of_messages_is_bounded(grown: list, most: int) -> None:
    known = KnownMessages(most)
    sessions = [session_of(OWNERS[i % 2], i) for i in range(6)]
    for number, turn in grown:
        known.remember(sessions[number], grow(sessions[number], *turn))
        assert len(known) <= most
    for session in sessions:
        known.forget(session)
    assert len(known) == 0


def test_the_last_message_is_always_left_to_say() -> None:
    known = KnownMessages(100)
    session = session_of(OWNERS[0], 1)
    known.remember(session, grow(session, "x", "p"))
    assert known.find(OWNERS[0], as_messages([("x", "p")])[:2]) is None
    assert known.find(OWNERS[0], []) is None


def test_roles_tell_messages_apart() -> None:
    known = KnownMessages(100)
    session = session_of(OWNERS[0], 1)
    known.remember(session, grow(session, "x", "p"))
    swapped = [Message(role="assistant", content="x"), Message(role="user", content="p"), *as_messages([])]
    assert known.find(OWNERS[0], swapped) is None
