"""The async client of chatd.v1; `Client` is where to begin."""

from chatd.client.address import websocket_url
from chatd.client.client import Client, FoundSession
from chatd.client.pool import CellMap, PoolState
from chatd.client.session import Session
from chatd.client.state import ConnectionPhase, ConnectionState
from chatd.client.turn import Turn

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
