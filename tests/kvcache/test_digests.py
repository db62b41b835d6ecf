"""What blocks are called below the pool: by prefix, namespace and key, and never hashed twice."""

from array import array

import pytest

from chatd.kvcache.block_file import DIGEST_BYTES
from chatd.kvcache.digests import Digester
from chatd.kvcache.prefix_index import Namespace
from chatd.testing.engine import NAMESPACE


def names(digester, token_ids, tenant="acme", size=4):
    ids = array("i", token_ids)
    chain = []
    digester.extend(chain, ids, len(ids) // size)
    return [digester.digest(tenant, link) for link in chain]


@pytest.fixture
def digester():
    return Digester(b"key", NAMESPACE, 4)


def test_a_digest_names_the_whole_prefix(digester):
    one = names(digester, [1, 2, 3, 4, 5, 6, 7, 8])
    assert all(len(digest) == DIGEST_BYTES for digest in one)
    assert len(set(one)) == 2
    assert names(digester, [1, 2, 3, 4, 5, 6, 7, 8]) == one
    other = names(digester, [9, 2, 3, 4, 5, 6, 7, 8])
    assert other[0] != one[0]
    assert other[1] != one[1]


def test_nothing_of_another_tenant_model_or_key_has_the_same_name(digester):
    ids = [1, 2, 3, 4]
    mine = names(digester, ids)
    assert names(digester, ids, "blue") != mine
    assert names(digester, ids, None) != mine
    other_model = Namespace("other weights", "fp16", "float16", 1, None, None)
    assert names(Digester(b"key", other_model, 4), ids) != mine
    assert names(Digester(b"another", NAMESPACE, 4), ids) != mine


def test_a_longer_prefix_hashes_only_what_is_new(digester, monkeypatch):
    ids = array("i", range(4000))
    chain = []
    digester.extend(chain, ids, 999)
    hashed = []
    monkeypatch.setattr(digester, "_link", lambda data: hashed.append(data) or bytes(32))
    digester.extend(chain, ids, 1000)
    assert len(hashed) == 1
    assert len(chain) == 1000


def test_an_origin_says_namespace_parent_and_tokens(digester):
    ids = array("i", [1, 2, 3, 4, 5, 6, 7, 8])
    chain = []
    digester.extend(chain, ids, 2)
    first = digester.origin("acme", chain, ids, 0)
    second = digester.origin("acme", chain, ids, 1)
    assert first.namespace == second.namespace == NAMESPACE.of("acme").frame()
    assert (first.parent, second.parent) == (digester.root, chain[0])
    assert second.tokens == ids[4:8].tobytes()
