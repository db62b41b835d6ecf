"""The async client of chatd.v1; `Client` is where to begin."""

from chatd.client.client import Client, FoundSession
from chatd.client.link import ConnectionPhase, ConnectionState, websocket_url
from chatd.client.pool import CellMap, PoolState
from chatd.client.session import Session, Turn

__all__ = [
    "CellMap",
    "Client",
    "ConnectionPhase",
    "ConnectionState",
    "FoundSession",
    "PoolState",
    "Session",
    "Turn",
    "websocket_url",
]
