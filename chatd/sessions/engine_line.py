"""The front's end of the line to the engine: what is sent, how requests are numbered, and which engine it is."""

from __future__ import annotations

import logging

from chatd.engine.messages import FrontMessage
from chatd.engine.plan import RequestId
from chatd.errors import Unavailable
from chatd.sessions.leases import Lease
from chatd.sessions.ports import EngineGateway

_log = logging.getLogger(__name__)


class EngineLine:
    """Sends messages to the engine that serves now.

    Args:
        engine: Where they go.

    Attributes:
        epoch: Counts engine processes; a lease of an earlier one holds nothing.
    """

    def __init__(self, engine: EngineGateway) -> None:
        self.epoch = 0
        self._engine = engine
        self._last_request = 0

    def new_request(self) -> RequestId:
        """Return an id that no request had."""
        self._last_request += 1
        return RequestId(self._last_request)

    def send(self, message: FrontMessage) -> None:
        """Send a message.

        Raises:
            Unavailable: The engine takes nothing.
        """
        self._engine.send(message)

    def tell(self, message: FrontMessage) -> None:
        """Send what only matters to an engine that is there."""
        try:
            self._engine.send(message)
        except Unavailable:
            _log.warning("the engine takes no %s", type(message).__name__)

    def holds(self, lease: Lease) -> bool:
        """Return whether this engine was told of a lease."""
        is_given = lease.node is not None or bool(lease.draft_ids)
        return lease.epoch == self.epoch and is_given and lease.fork_of is None
