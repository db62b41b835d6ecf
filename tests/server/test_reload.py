"""Settings that are read again on SIGHUP: tenants' weights and floors, and nothing else."""

import asyncio
import os
import signal

import pytest

from chatd.config import Settings, TenantSettings, load_settings
from chatd.engine.messages import SetTenant
from chatd.server.reload import TenantReload, on_hangup

BEFORE = {"acme": TenantSettings(weight=3.0, floor=0.4), "blue": TenantSettings(floor=0.1)}


def reload_of(load, tenants=BEFORE):
    sent = []
    return TenantReload(tenants, load, sent.append), sent


async def test_only_tenants_that_changed_are_told_and_lowered_floors_go_first():
    after = {"acme": TenantSettings(weight=3.0, floor=0.1), "blue": TenantSettings(floor=0.4), "crow": TenantSettings()}
    reload, sent = reload_of(lambda: Settings(tenants=after))
    await reload.run()
    assert sent == [SetTenant("acme", 3.0, 0.1), SetTenant("blue", 1.0, 0.4)]
    sent.clear()
    await reload.run()
    assert sent == []


async def test_a_tenant_that_is_no_longer_named_has_the_defaults():
    reload, sent = reload_of(lambda: Settings(tenants={"blue": BEFORE["blue"]}))
    await reload.run()
    assert sent == [SetTenant("acme", 1.0, 0.0)]


async def test_settings_that_are_wrong_change_nothing_and_are_one_line_in_the_log(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("[tenants.acme]\nweight = -1\n")
    reload, sent = reload_of(lambda: load_settings(path, environment={}).settings)
    lines = []
    monkeypatch.setattr("chatd.server.reload.logger.error", lambda event, **fields: lines.append((event, fields)))
    await reload.run()
    assert sent == []
    assert [event for event, _ in lines] == ["settings.unreadable"]
    assert "tenants.acme.weight" in lines[0][1]["error"]
    path.write_text("[tenants.acme]\nweight = 2\nfloor = 0.4\n[tenants.blue]\nfloor = 0.1\n")
    await reload.run()
    assert sent == [SetTenant("acme", 2.0, 0.4)]


async def test_a_hangup_reads_the_settings_again_and_afterwards_is_what_it_was():
    before = signal.getsignal(signal.SIGHUP)
    heard = asyncio.Event()
    with on_hangup(heard.set, lambda: pytest.fail("it was stopped")):
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            await heard.wait()
    assert signal.getsignal(signal.SIGHUP) in (before, signal.SIG_DFL)


async def test_a_hangup_of_the_terminal_stops_the_daemon(monkeypatch):
    has_terminal = [True, False]
    monkeypatch.setattr("chatd.server.reload._has_terminal", lambda: has_terminal.pop(0))
    heard = asyncio.Event()
    with on_hangup(lambda: pytest.fail("settings were read again"), heard.set):
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            await heard.wait()
