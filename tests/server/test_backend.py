"""What settings mean to the sessions behind the doors."""

from pathlib import Path

import pytest

from chatd.config import Settings
from chatd.errors import ConfigError
from chatd.journal.records import SaveSession
from chatd.kvcache.block_directory import BlockDirectory
from chatd.server.backend import load_encoder, open_journal, public_prompts, retention_of, session_limits
from chatd.sessions.manager import PublicPrompt
from chatd.testing.journal_records import make_session


def test_bounds_reach_the_sessions() -> None:
    limits = session_limits(Settings(sessions={"max_text_bytes_per_user": 2**21, "replay_events": 99}))
    assert (limits.max_text_bytes_per_user, limits.replay_events) == (2**21, 99)


@pytest.mark.model
@pytest.mark.parametrize(("thoughts", "dropped"), [("auto", False), ("keep", False), ("drop", True)])
def test_the_encoder_does_with_thoughts_what_settings_say(thoughts: str, dropped: bool) -> None:
    from chatd.models.registry import resolve

    settings = Settings(model={"thoughts": thoughts}, server={"max_body_bytes": 4096})
    _, encoder = load_encoder(resolve("smollm2-135m").path, settings)
    assert (encoder.drops_thoughts, encoder.max_bytes) == (dropped, 4096)


def test_public_prompts_are_read_from_text_and_files(tmp_path: Path) -> None:
    file = tmp_path / "shop.txt"
    file.write_bytes("You help é.\r\n\r\n".encode())
    settings = Settings(public_prompts={"shop": {"file": file}, "brief": {"text": "Be brief.\n"}})
    # One line end at the end of a file is the editor's.
    assert public_prompts(settings) == [
        PublicPrompt("shop", "You help é.\r\n"),
        PublicPrompt("brief", "Be brief.\n"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r"shop.txt cannot be read: No such file"),
        (b"\xff\xfe", r"shop.txt is not UTF-8"),
        (b"\n", r"shop.txt is empty"),
        (b"", r"shop.txt is empty"),
        ("é".encode() * 600, r"public_prompts.shop is above 1024 bytes"),
        (b"x" * 1025, r"public_prompts.shop is above 1024 bytes"),
        (b"x" * 10**6, r"public_prompts.shop is above 1024 bytes"),
    ],
)
def test_a_public_prompt_that_is_none_is_refused_by_name(tmp_path: Path, data: bytes | None, message: str) -> None:
    file = tmp_path / "shop.txt"
    if data is not None:
        file.write_bytes(data)
    settings = Settings(public_prompts={"shop": {"file": file}}, sessions={"max_content_bytes": 1024})
    with pytest.raises(ConfigError, match=message) as refused:
        public_prompts(settings)
    assert refused.value.param == "public_prompts.shop"


def test_a_prompt_as_large_as_is_allowed_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "shop.txt"
    file.write_bytes(b"x" * 1024 + b"\r\n")
    settings = Settings(public_prompts={"shop": {"file": file}}, sessions={"max_content_bytes": 1024})
    assert public_prompts(settings) == [PublicPrompt("shop", "x" * 1024)]


async def test_a_journal_is_opened_without_what_is_kept_no_longer(tmp_path: Path) -> None:
    settings = Settings(
        journal={"directory": tmp_path / "journal", "retention_days": 3},
        engine={"disk_directory": tmp_path / "kv"},
        tenants={"lab": {"retention_days": 30}, "acme": {"weight": 2}},
    )
    assert retention_of(settings) == ({"lab": 30.0}, 3.0)
    journal = await open_journal(settings, 0.0)
    for tenant in ("acme", "lab"):
        for name, day in (("old", 1), ("new", 8)):
            session = make_session(f"{tenant}-{name}", tenant=tenant, updated_at=86400.0 * day)
            await journal.commit([SaveSession(session)])
    await journal.close()
    journal = await open_journal(settings, 86400.0 * 10)
    assert sorted(session.id for session in await journal.sessions()) == ["acme-new", "lab-new", "lab-old"]
    await journal.close()


async def test_a_disk_tier_that_another_daemon_has_keeps_none_from_starting(tmp_path: Path) -> None:
    settings = Settings(
        journal={"directory": tmp_path / "journal", "retention_days": 3}, engine={"disk_directory": tmp_path / "kv"}
    )
    journal = await open_journal(settings, 0.0)
    await journal.commit([SaveSession(make_session("old", updated_at=0.0))])
    await journal.close()
    others = BlockDirectory(tmp_path / "kv")
    journal = await open_journal(settings, 86400.0 * 10)
    assert await journal.sessions() == []
    await journal.close()
    others.close()
