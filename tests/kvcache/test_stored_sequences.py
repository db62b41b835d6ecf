"""What a disk tier has of a sequence is found without the engine that wrote it, whatever weights that had."""

from array import array
from dataclasses import replace

import pytest

from chatd.kvcache.block_directory import BlockDirectory, DirectoryInUse, find_tenant, load_key
from chatd.kvcache.block_file import write_block
from chatd.kvcache.digests import Digester
from chatd.kvcache.prefix_index import namespace_of_frame
from chatd.kvcache.stored_sequences import StoredSequences
from chatd.testing.engine import NAMESPACE

OTHER = replace(NAMESPACE, weights_digest="other weights")
LOG = list(range(100, 121))


def store(root, namespace, tenant, token_ids, block_size):
    """Write the blocks of a sequence as an engine does; return the files."""
    directory = BlockDirectory(root)
    digester, ids, chain, paths = Digester(load_key(root), namespace, block_size), array("i", token_ids), [], []
    digester.extend(chain, ids, len(ids) // block_size)
    for place, link in enumerate(chain):
        digest = digester.digest(tenant, link)
        write_block(directory.writing, digester.origin(tenant, chain, ids, place), memoryview(bytes(64)))
        directory.publish(digest)
        paths.append(directory.path(digest))
    directory.close()
    return paths


def test_a_sequence_goes_and_another_tenants_and_public_blocks_stay(tmp_path):
    own = [*store(tmp_path, NAMESPACE, "acme", LOG, 4), *store(tmp_path, OTHER, "acme", LOG, 8)]
    others = [*store(tmp_path, NAMESPACE, "blue", LOG, 4), *store(tmp_path, NAMESPACE, None, LOG, 4)]
    other_text = store(tmp_path, NAMESPACE, "acme", [7, *LOG], 4)
    assert len(own) == 7
    with StoredSequences(tmp_path) as stored:
        assert stored.remove("acme", LOG) == 7
        assert stored.remove("acme", LOG) == 0
        assert stored.remove("nobody", LOG) == 0
        assert stored.remove("acme", [2**40] * 4) == 0
        with pytest.raises(DirectoryInUse):
            BlockDirectory(tmp_path)
    assert not any(path.exists() for path in own)
    assert all(path.exists() for path in [*others, *other_text])
    assert sorted(find_tenant(tmp_path, "acme")) == sorted(bytes.fromhex(path.stem) for path in other_text)
    assert find_tenant(tmp_path / "nowhere", "acme") == []


def test_what_is_no_file_is_nobodys_block(tmp_path):
    [path] = store(tmp_path, NAMESPACE, "acme", LOG[:4], 4)
    path.with_name(f"{path.name[:2]}{'0' * 62}.kv").mkdir()
    path.with_name(f"{path.name[:2]}{'1' * 62}.kv").symlink_to(path)
    assert find_tenant(tmp_path, "acme") == [bytes.fromhex(path.stem)]


@pytest.mark.parametrize("tenant", ["acme", None, ""])
def test_a_namespace_is_read_back_from_its_frame(tenant):
    namespace = OTHER.of(tenant)
    assert namespace_of_frame(namespace.frame()) == namespace


@pytest.mark.parametrize("frame", [b"", b"x", NAMESPACE.frame()[:-1], NAMESPACE.frame() + b"n\0\0\0\0"])
def test_what_is_no_frame_is_nobodys(frame):
    assert namespace_of_frame(frame) is None
