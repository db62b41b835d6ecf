"""A session that is removed while no engine runs leaves no KV in the disk tier."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from chatd.journal.records import ID_TYPE, MessageRecord, SaveMessage, SaveSession
from chatd.kvcache.block_directory import BlockDirectory, load_key
from chatd.kvcache.block_file import write_block
from chatd.kvcache.digests import Digester
from chatd.sessions.stored_blocks import remove_stored_blocks
from chatd.testing.engine import NAMESPACE
from chatd.testing.journal import MemoryJournal
from chatd.testing.journal_records import make_answer, make_session, make_user_message


def of(*ids: int) -> array[int]:
    return array(ID_TYPE, ids)


def answer(message: str, parent: str, content: str | None, prompt_ids: array[int], ids: array[int]) -> MessageRecord:
    record = make_answer(message, parent, content, ids, prompt_ids=prompt_ids)
    return msgspec.structs.replace(record, log_system="", context_from=None)


def store(root: Path, tenant: str, token_ids: list[int]) -> list[Path]:
    directory = BlockDirectory(root)
    digester, ids, chain = Digester(load_key(root), NAMESPACE, 4), of(*token_ids), []
    digester.extend(chain, ids, len(token_ids) // 4)
    paths = []
    for place, link in enumerate(chain):
        digest = digester.digest(tenant, link)
        if not directory.path(digest).exists():
            write_block(directory.writing, digester.origin(tenant, chain, ids, place), memoryview(bytes(64)))
            directory.publish(digest)
        paths.append(directory.path(digest))
    directory.close()
    return paths


async def test_the_blocks_of_every_branch_go_and_those_of_other_sessions_stay(tmp_path: Path) -> None:
    journal = MemoryJournal()
    first = answer("msg_2", "msg_1", "x", of(1, 2, 3), of(4, 5))
    beside = answer("msg_3", "msg_1", "y", of(1, 2, 3), of(*range(9)))
    begun = answer("msg_4", "msg_2", None, of(6, 7), of(8, 9, 10, 11, 12, 13))
    other = answer("msg_6", "msg_5", "z", of(9, 9, 9), of(9, 9))
    await journal.commit(
        [
            SaveSession(make_session("s", head="msg_4")),
            *(SaveMessage("s", m) for m in (make_user_message("msg_1", "q"), first, beside, begun)),
            SaveSession(make_session("t", head="msg_6")),
            *(SaveMessage("t", m) for m in (make_user_message("msg_5", "q"), other)),
        ]
    )
    root = tmp_path / "kv"
    own = store(root, "acme", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]) + store(root, "acme", [1, 2, 3, *range(9)])
    others = store(root, "acme", [9, 9, 9, 9, 9]) + store(root, "blue", [1, 2, 3, 4, 5])
    assert len(set(own)) == 6
    assert await remove_stored_blocks(journal, root, ["s", "nobody"]) == {"s": 6}
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in others)
    assert not await remove_stored_blocks(journal, tmp_path / "nowhere", ["s"])
