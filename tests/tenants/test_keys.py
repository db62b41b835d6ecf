"""Keys: made, shown once, stored hashed, revoked while somebody reads the file."""

import json
import os
import threading

import pytest

from chatd.errors import ConfigError, EnvironmentProblem, NotFound
from chatd.tenants import keys
from chatd.tenants.keys import KeyStore, create_key, digest, list_keys, local_key, mint, parse, revoke_key


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "keys.json"


def test_a_key_has_its_id_256_random_bits_and_a_check() -> None:
    token, key_id = mint()
    assert parse(token) == key_id
    prefix, middle, secret = token.split("_")
    assert (prefix, middle, len(secret)) == ("ck", key_id, 49)
    assert mint()[0] != mint()[0]
    alphabet = keys._ALPHABET
    assert sum(alphabet.index(digit) * 62**i for i, digit in enumerate(reversed(secret[:43]))) < 2**256


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t + "0",
        lambda t: t + "\n",
        lambda t: " " + t,
        lambda t: t.upper(),
        lambda t: t[:20] + ("0" if t[20] != "0" else "1") + t[21:],
        lambda t: "ck__" + t.split("_")[2],
        lambda t: "",
        lambda t: "ck_é_" + t.split("_")[2],
    ],
)
def test_what_is_not_quite_a_key_is_none(change) -> None:
    token, _ = mint("abc")
    assert parse(change(token)) is None


def test_the_secret_is_in_no_file(path) -> None:
    token = create_key(path, tenant="acme", user="ann", label="ann's laptop")
    text = path.read_text()
    assert token not in text
    assert token.split("_")[2] not in text
    [key] = list_keys(path)
    assert key.sha256 == digest(token)
    assert (key.tenant, key.user, key.label, key.is_operator) == ("acme", "ann", "ann's laptop", False)
    assert key.key_class == "interactive"
    assert key.created_at.year >= 2026
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(text)["keys"][0]["operator"] is False


def test_a_key_is_told_from_every_other(path) -> None:
    ann = create_key(path, tenant="acme", user="ann")
    bob = create_key(path, tenant="acme", user="bob", operator=True)
    store = KeyStore(path)
    assert store.authenticate(ann).user == "ann"
    assert store.authenticate(bob).is_operator
    forged = mint(parse(ann))[0]
    for wrong in (forged, mint()[0], "", "ck_x", ann[:-1], digest(ann)):
        assert store.authenticate(wrong) is None
    assert store.tenants == {"acme"}


def test_a_revoked_key_is_gone_at_the_next_refresh(path) -> None:
    ann = create_key(path, tenant="acme", user="ann")
    bob = create_key(path, tenant="acme", user="bob")
    store = KeyStore(path)
    assert store.refresh() == []
    assert revoke_key(path, parse(ann)).user == "ann"
    assert store.refresh() == [parse(ann)]
    assert store.authenticate(ann) is None
    assert store.authenticate(bob) is not None
    create_key(path, tenant="beta", user="eve")
    assert store.refresh() == []
    assert store.tenants == {"acme", "beta"}


def test_a_key_that_was_changed_counts_as_gone(path) -> None:
    token = create_key(path, tenant="acme", user="ann")
    store = KeyStore(path)
    path.write_text(path.read_text().replace('"acme"', '"beta"'))
    assert store.refresh() == [parse(token)]
    assert store.authenticate(token).tenant == "beta"


def test_a_file_that_breaks_keeps_the_keys_of_before(path) -> None:
    token = create_key(path, tenant="acme", user="ann")
    store = KeyStore(path)
    path.write_text("{")
    with pytest.raises(ConfigError):
        store.refresh()
    assert store.authenticate(token) is not None
    path.unlink()
    with pytest.raises(ConfigError):
        store.refresh()
    assert store.authenticate(token) is not None


def test_revoking_an_unknown_key_is_not_found(path) -> None:
    with pytest.raises(NotFound):
        revoke_key(path, "nothing")
    create_key(path, tenant="acme", user="ann")
    with pytest.raises(NotFound, match="nothing"):
        revoke_key(path, "nothing")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\n", "é", "-a", "x" * 65, ".."])
def test_a_tenant_or_user_with_strange_characters_is_refused(path, name) -> None:
    with pytest.raises(ConfigError):
        create_key(path, tenant=name, user="ann")
    with pytest.raises(ConfigError):
        create_key(path, tenant="acme", user=name)
    assert not path.exists()


@pytest.mark.parametrize("label", ["a\nb", "\x1b[31m", "a‮b", "x" * 129])
def test_a_label_that_could_steer_a_terminal_is_refused(path, label) -> None:
    with pytest.raises(ConfigError):
        create_key(path, tenant="acme", user="ann", label=label)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"keys":1}',
        '{"keys":[{"id":"a"}]}',
        '{"keys":[],"more":1}',
        '{"keys":[{"id":"a","tenant":"t","user":"u","sha256":"x"}]}',
        "\xff",
    ],
)
def test_a_file_that_is_no_keys_file_is_refused(path, text) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a keys file"):
        KeyStore(path)


def test_a_file_that_others_may_write_is_refused(path) -> None:
    create_key(path, tenant="acme", user="ann")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="others may write"):
        KeyStore(path)


def test_a_missing_file_is_refused(path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyStore(path)
    assert list_keys(path) == []


def test_an_id_that_is_there_twice_is_refused(path) -> None:
    create_key(path, tenant="acme", user="ann")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"keys": content["keys"] * 2}))
    with pytest.raises(ConfigError, match="twice"):
        KeyStore(path)


def test_two_commands_at_once_lose_nothing(path) -> None:
    threads = [
        threading.Thread(target=create_key, args=(path,), kwargs={"tenant": "t", "user": f"u{i}"}) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.user for key in list_keys(path)} == {f"u{i}" for i in range(8)}


def test_the_local_key_is_made_once_and_private(path) -> None:
    token = local_key(path)
    assert parse(token) == "local"
    assert local_key(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    key = KeyStore(None, local=token).authenticate(token)
    assert (key.tenant, key.user, key.is_operator) == ("local", "local", True)


def test_a_local_key_that_others_may_read_is_refused(path) -> None:
    local_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="readable by others"):
        local_key(path)


def test_a_local_key_that_is_none_or_a_link_is_refused(path, tmp_path) -> None:
    path.parent.mkdir()
    path.write_text("secret")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="does not hold a key"):
        local_key(path)
    link = tmp_path / "link"
    os.symlink(path, link)
    with pytest.raises(ConfigError, match="cannot be read"):
        local_key(link)


def test_a_key_may_be_of_the_batch_class(path) -> None:
    create_key(path, tenant="acme", user="nightly", key_class="batch")
    assert [key.key_class for key in list_keys(path)] == ["batch"]
    assert '"class": "batch"' in path.read_text()


def test_what_cannot_be_written_is_said_so(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "keys.json"
    for write in (
        lambda: create_key(blocked, tenant="acme", user="ann"),
        lambda: revoke_key(blocked, "x"),
        lambda: local_key(blocked),
    ):
        with pytest.raises(EnvironmentProblem, match=r"keys\.json cannot be written"):
            write()


def test_a_name_that_is_none_is_refused_in_words(path) -> None:
    with pytest.raises(ConfigError, match="the tenant has characters that it may not have") as refused:
        create_key(path, tenant="a b", user="ann")
    assert "regex" not in refused.value.message
