"""Why there is no daemon to talk to, and what to do about it: what a newcomer reads in place of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from chatd.clean import clean_line
from chatd.client import ConnectionPhase, ConnectionState
from chatd.config import is_loopback, serve_command, servers_path
from chatd.errors import AuthenticationError


@dataclass(frozen=True)
class Obstacle:
    """What is in the way.

    Attributes:
        title: What it is.
        remedies: What to type, or "", and what that is for.
        outlook: What happens by itself.
    """

    title: str
    remedies: tuple[tuple[str, str], ...]
    outlook: str


def obstacle(state: ConnectionState, url: str, connect_key: str) -> Obstacle | None:
    """Return what is in the way of a connection; None where nothing is, as far as is known.

    Args:
        state: Of the connection.
        url: Of the daemon.
        connect_key: The name of the key that tries to connect at once.
    """
    error = state.error
    if error is None or state.phase is ConnectionPhase.CONNECTED:
        return None
    where = clean_line(url, 80)
    if error.error_code == "loading":
        how_far = (("", clean_line(error.message, 200)),)
        return Obstacle(f"The daemon at {where} loads its model.", how_far, "This goes on as soon as it is ready.")
    if isinstance(error, AuthenticationError):
        keys = (
            (f"CHATD_KEY=ck_… chatd-tui {where}", "gives it one"),
            ('key_file = "…"', f"in {servers_path()}, for good"),
            ("chatd keys create --tenant … --user …", "makes one, there"),
        )
        return Obstacle(f"The daemon at {where} wants another key.", keys, "Another key in its file is used at once.")
    if state.phase is ConnectionPhase.CLOSED:
        hint = (("", clean_line(error.hint, 200)),) if error.hint else ()
        return Obstacle(clean_line(error.message, 200), hint, f"{connect_key} tries again.")
    here = is_loopback(urlsplit(url).hostname or "")
    start = "starts one, in another terminal" if here else "starts one, on that machine"
    return Obstacle(
        f"No daemon answers at {where}.",
        ((clean_line(serve_command(url)), start), ("chatd-tui https://…", "connects to another machine's")),
        f"It is tried again all the time; {connect_key} tries at once.",
    )
