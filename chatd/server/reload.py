"""What `chatd serve` reads again on SIGHUP: tenants' weights and floors, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

from chatd.config import Settings, TenantSettings
from chatd.engine.messages import FrontMessage, SetTenant
from chatd.errors import ConfigError
from chatd.server.logging import get_logger

logger = get_logger("chatd.server")

LoadSettings = Callable[[], Settings]


class TenantReload:
    """Compares tenants' settings with those that hold now, and tells the engine what has changed.

    Args:
        tenants: Those that the engine was started with.
        load: Reads the settings again.
        send: To the engine; never raises for such a message.
    """

    def __init__(
        self, tenants: Mapping[str, TenantSettings], load: LoadSettings, send: Callable[[FrontMessage], None]
    ) -> None:
        self._tenants = dict(tenants)
        self._load = load
        self._send = send

    async def run(self) -> None:
        """Read the settings again; where they are wrong, all stays as it is, and one line in the log says why."""
        try:
            settings = await asyncio.to_thread(self._load)
        except ConfigError as error:
            logger.error("settings.unreadable", error=error.message)
            return
        self.apply(settings.tenants)

    def apply(self, tenants: Mapping[str, TenantSettings]) -> None:
        """Tell the engine of the tenants that have changed; one that is no longer named gets the defaults."""
        changed = {}
        for name in {**self._tenants, **tenants}:
            after = tenants.get(name, TenantSettings())
            if after != self._tenants.get(name, TenantSettings()):
                changed[name] = after
        # Floors that are lowered make room for those that are raised.
        for name in sorted(changed, key=lambda name: changed[name].floor - self._floor(name)):
            share = changed[name]
            self._send(SetTenant(name, share.weight, share.floor))
            logger.info("tenant.changed", tenant=name, weight=share.weight, floor=share.floor)
        self._tenants = dict(tenants)
        logger.info("settings.read", tenants=len(tenants), changed=len(changed))

    def _floor(self, name: str) -> float:
        return self._tenants[name].floor if name in self._tenants else 0.0


@contextlib.contextmanager
def on_hangup(reload: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call `reload` for each SIGHUP, but `stop` where it says that the terminal is gone in which this was started."""
    number = getattr(signal, "SIGHUP", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    had_terminal = _has_terminal()

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            stop()
        else:
            reload()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, hang_up)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def _has_terminal() -> bool:
    try:
        return os.isatty(sys.__stdin__.fileno()) if sys.__stdin__ is not None else False
    except (OSError, ValueError):
        return False
