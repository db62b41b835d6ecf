from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatd.journal import reader as journal_reader
from chatd.journal.directory import DATABASE
from chatd.journal.journal import Journal
from chatd.journal.passages import has_words, words_of
from chatd.journal.reader import JournalReader, connect_to_read
from chatd.journal.records import Match, RemoveMessages, SaveMessage, SaveSession
from chatd.journal.search import MAX_INDEXED_CHARS, NUM_PARTS
from chatd.journal.tables import Tables
from chatd.testing.journal_records import make_answer, make_session, make_user_message

TEXTS = {
    "de": "Donaudampfschifffahrtsgesellschaft, größer als Straße",
    "zh": "北京欢迎你，明天再见",
    "ja": "ありがとうございます",
    "ar": "السلام عليكم",
    "el": "ΟΔΥΣΣΕΑΣ",
    "emoji": "see 👩‍👩‍👧 and 🙂🙂🙂",
    "quotes": 'he said "no" AND left* NOT (here) col:on ^x -y',
    "nul": "before\0after",
    "lines": "first line\nsecond line",
}


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    for session, text in TEXTS.items():
        await journal.commit(
            [SaveSession(make_session(session)), SaveMessage(session, make_user_message(f"m-{session}", text))]
        )
    yield journal
    await journal.close()


@pytest.mark.parametrize(
    ("query", "session"),
    [
        ("dampfschiff", "de"),
        ("STRASSE", "de"),
        ("größer straße", "de"),
        ("straße gesellschaft", "de"),
        ("欢迎你", "zh"),
        ("欢迎", "zh"),
        ("再", "zh"),
        ("とうござ", "ja"),
        ("عليكم", "ar"),
        ("οδυσσεας", "el"),
        ("🙂", "emoji"),
        ("🙂🙂🙂", "emoji"),
        ('"no"', "quotes"),
        ("left*", "quotes"),
        ("AND", "quotes"),
        ("(here)", "quotes"),
        ("col:on", "quotes"),
        ("^x -y", "quotes"),
        ("after", "nul"),
        ("second first", "lines"),
    ],
)
async def test_parts_of_words_are_found_in_any_language(journal: Journal, query: str, session: str) -> None:
    assert session in await journal.search("acme", "ann", query, 100)


@pytest.mark.parametrize("query", ["", "  ", "\0", "absent", "dampf absent", "fore\0af", "\ud800", "schifx", "'; DROP"])
async def test_what_is_not_there_is_not_found(journal: Journal, query: str) -> None:
    assert [s for s in await journal.search("acme", "ann", query, 100) if s != "nul"] == []


async def test_others_sessions_are_not_found(journal: Journal) -> None:
    await journal.commit(
        [
            SaveSession(make_session("foreign", user="bob", title="dampfschiff")),
            SaveMessage("foreign", make_user_message("f", TEXTS["de"])),
            SaveSession(make_session("elsewhere", tenant="other", title="dampfschiff")),
        ]
    )
    assert await journal.search("acme", "ann", "dampfschiff", 100) == ["de"]
    assert await journal.search("acme", "bob", "dampfschiff", 100) == ["foreign"]
    assert await journal.search("other", "ann", "dampfschiff", 100) == ["elsewhere"]
    assert await journal.search("nobody", "ann", "dampfschiff", 100) == []


async def test_a_text_that_spells_anothers_number_is_not_found_by_them(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("foreign", user="bob", title="x"))])
    await journal.commit([SaveMessage("foreign", make_user_message("f", "\ue000\ue000\ue001 dampfschiff"))])
    assert await journal.search("acme", "ann", "dampfschiff", 100) == ["de"]


async def test_titles_go_before_messages_and_later_ones_before_earlier_ones(journal: Journal) -> None:
    for number in range(3):
        session = f"s{number}"
        await journal.commit([SaveSession(make_session(session, title="about whales" if number == 1 else "other"))])
        await journal.commit([SaveMessage(session, make_user_message(f"w{number}", "a whale, or two whales"))])
    assert await journal.search("acme", "ann", "whales", 100) == ["s1", "s2", "s0"]
    assert await journal.search("acme", "ann", "whales", 2) == ["s1", "s2"]
    assert await journal.search("acme", "ann", "whales", 0) == []


async def test_a_text_that_was_changed_or_removed_is_not_found_any_more(journal: Journal) -> None:
    await journal.commit([SaveSession(make_session("s", title="old name"))])
    await journal.commit([SaveSession(make_session("s", title="new name"))])
    await journal.commit([SaveMessage("s", make_user_message("gone", "passing words"))])
    await journal.commit([RemoveMessages("s", ("gone",))])
    await journal.commit([SaveMessage("s", make_answer("a", None, None, []))])
    await journal.commit([SaveMessage("s", make_answer("a", None, "the answer", [1]))])
    assert await journal.search("acme", "ann", "old", 100) == []
    assert await journal.search("acme", "ann", "passing", 100) == []
    assert await journal.search("acme", "ann", "new", 100) == ["s"]
    assert await journal.search("acme", "ann", "answer", 100) == ["s"]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(query=st.text(max_size=40) | st.text(alphabet='"*()^:-+AND ORNT\0{}', max_size=200))
def test_no_query_is_an_error_and_what_is_found_has_its_words(journal: Journal, query: str) -> None:
    reader = JournalReader(connect_to_read(journal.directory / DATABASE))
    found = reader.search("acme", "ann", query, 100)
    reader.close()
    words = words_of(query)
    assert set(found) == {session for session, text in TEXTS.items() if words and has_words(text, words)}


async def test_a_damaged_index_is_made_anew_by_the_next_change(journal: Journal) -> None:
    def damage(tables: Tables) -> None:
        for part in range(NUM_PARTS):
            tables._db.execute(f"UPDATE search_{part}_data SET block = x'00ff00ff' WHERE id = 10")

    await journal._writer.submit(damage, 0)
    await journal.commit([SaveMessage("de", make_user_message("m-de", "Eisenbahnknotenpunkt"))])
    assert await journal.search("acme", "ann", "knoten", 100) == ["de"]
    assert await journal.search("acme", "ann", "schiff", 100) == []
    assert await journal.search("acme", "ann", "とうござ", 100) == ["ja"]
    await journal._writer.submit(damage, 0)
    await journal.erase("de")
    assert await journal.search("acme", "ann", "knoten", 100) == []
    assert await journal.search("acme", "ann", "とうござ", 100) == ["ja"]


async def test_a_search_looks_at_no_more_than_so_many_characters(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_reader, "MAX_SEARCHED_CHARS", 4000)
    old, *later = (make_user_message(f"old{i}", ("qq " if i == 0 else "rr ") + "x" * 1000) for i in range(5))
    await journal.commit([SaveMessage("de", message) for message in (old, *later)])
    assert await journal.search("acme", "ann", "qq", 100) == []
    assert await journal.search("acme", "ann", "rr", 100) == ["de"]


async def test_of_a_large_text_the_beginning_is_searched_and_all_of_it_can_be_taken_out(journal: Journal) -> None:
    text = "early " + "x" * MAX_INDEXED_CHARS + " later"
    await journal.commit([SaveMessage("de", make_user_message("large", text))])
    assert await journal.search("acme", "ann", "early", 100) == ["de"]
    assert await journal.search("acme", "ann", "later", 100) == []
    assert (await journal.messages("de"))[-1].content == text
    await journal.commit([RemoveMessages("de", ("large",))])
    assert await journal.search("acme", "ann", "early", 100) == []
    assert await journal.search("acme", "ann", "dampfschiff", 100) == ["de"]


async def test_a_match_is_the_latest_message_that_has_all_words_or_a_title(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "found")
    session = msgspec.structs.replace(make_session("s"), title="Rivers and lakes")
    texts = {"a": "rivers run", "b": "lakes stay, rivers run", "c": "lakes"}
    saved = [SaveMessage("s", make_user_message(ident, text)) for ident, text in texts.items()]
    titled = SaveSession(msgspec.structs.replace(make_session("t"), title="rivers alone"))
    await journal.commit([SaveSession(session), *saved, titled])
    found = {match.session: match for match in await journal.find("acme", "ann", "RIVERS", 10)}
    assert found == {"s": Match("s", "b", "lakes stay, rivers run"), "t": Match("t")}
    assert await journal.find("acme", "ann", "rivers lakes", 10) == [Match("s", "b", "lakes stay, rivers run")]
    await journal.close()
