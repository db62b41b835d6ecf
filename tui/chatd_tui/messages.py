"""What the parts of the terminal client tell one another: the daemon's news first, then what the person wants."""

from __future__ import annotations

from textual.message import Message

from chatd.client import ConnectionState, PoolState
from chatd.errors import ChatdError
from chatd.protocol import Event, Hello, SessionAttached, SessionInfo


class DaemonNews(Message):
    """What a daemon has to say; `server` is its name, "" for the only one. Its link sets that."""

    server = ""


class ConnectionChanged(DaemonNews):
    """The connection came, went or waits."""

    def __init__(self, state: ConnectionState, hello: Hello | None) -> None:
        super().__init__()
        self.state = state
        self.hello = hello


class SessionsListed(DaemonNews):
    """The person's sessions, last used first."""

    def __init__(self, sessions: list[SessionInfo]) -> None:
        super().__init__()
        self.sessions = sessions


class SessionOpened(DaemonNews):
    """A session is shown from its snapshot on; also when a restarted daemon replaces what was shown."""

    def __init__(self, attached: SessionAttached) -> None:
        super().__init__()
        self.attached = attached


class SessionNews(DaemonNews):
    """One event of the session on the screen."""

    def __init__(self, session: str, event: Event) -> None:
        super().__init__()
        self.session = session
        self.event = event


class SessionLost(DaemonNews):
    """The daemon no longer has the session on the screen; `is_erased` where somebody erased it just now."""

    def __init__(self, session: str, *, is_erased: bool = False) -> None:
        super().__init__()
        self.session = session
        self.is_erased = is_erased


class PoolChanged(DaemonNews):
    """The pool at a later step."""

    def __init__(self, state: PoolState) -> None:
        super().__init__()
        self.state = state


class Noticed(DaemonNews):
    """An event of no session: draining, rate limits, an error of nobody's command."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class Refused(DaemonNews):
    """A command failed; `text` is what the person wrote, to give it back."""

    def __init__(self, error: ChatdError, text: str | None = None) -> None:
        super().__init__()
        self.error = error
        self.text = text


class Submitted(Message):
    """The person sends what is typed; `editing` is the message that it is to stand beside."""

    def __init__(self, text: str, editing: str | None = None) -> None:
        super().__init__()
        self.text = text
        self.editing = editing


class CommandChosen(Message):
    """The person wants a command carried out; `argument` is what stands after its name."""

    def __init__(self, name: str, argument: str = "") -> None:
        super().__init__()
        self.name = name
        self.argument = argument


class BranchChosen(Message):
    """The person wants to see another version of a message: the branch that ends at `leaf`."""

    def __init__(self, leaf: str) -> None:
        super().__init__()
        self.leaf = leaf


class SessionChosen(Message):
    """The person picks a session of a server; None is a new one there."""

    def __init__(self, session: str | None, server: str = "") -> None:
        super().__init__()
        self.session = session
        self.server = server


class LinkChosen(Message):
    """The person clicks a link of an answer."""

    def __init__(self, href: str) -> None:
        super().__init__()
        self.href = href
