"""Who gets in: keys, tickets, Host, Origin, and keys in URLs."""

import json

import httpx
import pytest
from starlette.requests import HTTPConnection
from starlette.routing import Route
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from chatd.config import Settings
from chatd.errors import AuthenticationError, ConfigError, RateLimited
from chatd.protocol import Ping, Pong
from chatd.server.app import ROUTES
from chatd.server.auth import (
    ANONYMOUS,
    MAX_TICKETS_PER_KEY,
    TICKET_TTL_S,
    Principal,
    check_exposure,
    host_name,
    is_loopback,
)
from chatd.server.policy import Access, PolicyError, check_routes
from chatd.server.serve import open_daemon
from chatd.tenants.keys import mint
from chatd.testing.engine import FakeClock


async def refused_handshake(port: int, path: str = "/v1/chat/ws", **options) -> tuple[int, dict]:
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{port}{path}", proxy=None, **options).__aenter__()
    return refused.value.response.status_code, json.loads(refused.value.response.body)["error"]


async def test_every_route_but_liveness_needs_a_key(start) -> None:
    open_paths = {policy.path for policy in ROUTES if policy.access is Access.OPEN}
    assert open_paths == {"/health", "/ready"}
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        for policy in ROUTES:
            if policy.method == "WEBSOCKET" or policy.path in open_paths or policy.access is Access.LOCAL:
                continue
            path = policy.path.replace("{model:path}", "bytes")
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {running.key}"}):
                answer = await http.request(policy.method, path, headers=headers)
                assert answer.status_code == 401, (policy.path, headers)
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        status, error = await refused_handshake(running.port)
        assert (status, error["code"]) == (401, "missing_api_key")


def test_a_route_without_a_policy_fails_start_up() -> None:
    async def endpoint(request):
        return None

    with pytest.raises(PolicyError, match="/naked"):
        check_routes([Route("/naked", endpoint)])


async def test_a_key_that_is_almost_right_is_refused(start) -> None:
    async with start() as running:
        key = running.key
        stranger, _ = mint(key.split("_")[1])
        for wrong in (key[:-1], key + "0", key.swapcase(), stranger, key.replace("ck_", "")):
            headers = {"Authorization": f"Bearer {wrong}"}
            status, error = await refused_handshake(running.port, additional_headers=headers)
            assert (status, error["code"]) == (401, "invalid_api_key")


async def test_metrics_are_the_operators(start) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        answer = await http.get("/metrics", headers=running.headers())
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        answer = await http.get("/metrics", headers=running.headers(running.keys["ann"]))
        assert answer.status_code == 200


async def test_a_key_in_a_url_is_refused_and_not_logged(start, log) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        for query in (f"key={running.key}", f"x={running.key}", "api_key=abc", "token=abc", "access_token="):
            answer = await http.get(f"/v1/models?{query}", headers=running.headers())
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "key_in_url")
            assert running.key not in answer.text
        answer = await http.get(f"/{running.key}", headers=running.headers())
        assert answer.json()["error"]["code"] == "key_in_url"
        status, error = await refused_handshake(
            running.port, f"/v1/chat/ws?token={running.key}", additional_headers=running.headers()
        )
        assert (status, error["code"]) == (401, "key_in_url")
    said = log.getvalue()
    assert "key_in_url" not in said
    assert said.count('"status": 401') == 7
    assert running.key not in said
    assert running.key.split("_")[2] not in said
    assert "ERROR" not in said.upper()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8790", "127.0.0.1.evil.example", "localhost@evil", ""])
async def test_a_request_to_another_name_is_refused(start, host) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        answer = await http.get("/v1/models", headers={**running.headers(), "Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "bad_host")


async def test_a_name_on_the_list_is_ours(start) -> None:
    async with (
        start(server={"allowed_hosts": ("Box.example",)}) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as http,
    ):
        for host in ("box.example", "BOX.example:443", "localhost:1", "[::1]:8790"):
            answer = await http.get("/v1/models", headers={**running.headers(), "Host": host})
            assert answer.status_code == 200, host


async def test_a_page_of_another_origin_is_refused(start) -> None:
    async with (
        start(server={"allowed_origins": ("https://app.example",)}) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as http,
    ):
        for origin in (
            "https://evil.example",
            "null",
            "https://app.example.evil.example",
            "http://app.example",
            running.url,
        ):
            answer = await http.get("/v1/models", headers={**running.headers(), "Origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "bad_origin"), origin
            headers = {**running.headers(), "Origin": origin}
            status, error = await refused_handshake(running.port, additional_headers=headers)
            assert (status, error["code"]) == (403, "bad_origin")
        headers = {**running.headers(), "Origin": "https://app.example"}
        answer = await http.get("/v1/models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        async with running.chat(headers={"Origin": "https://app.example"}) as talk:
            assert isinstance(await talk.ask(Ping(id="p", t=1)), Pong)
        preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        answer = await http.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200


async def test_a_ticket_opens_one_websocket(start) -> None:
    async with start() as running, httpx.AsyncClient(base_url=running.url, trust_env=False) as http:
        answer = await http.post("/v1/ws/tickets", headers=running.headers())
        ticket = answer.json()["ticket"]
        assert answer.json()["expires_in_s"] == 60
        assert answer.headers["cache-control"] == "no-store"
        offered = ["chatd.v1", f"chatd.ticket.{ticket}"]
        async with connect(f"ws://127.0.0.1:{running.port}/v1/chat/ws", subprotocols=offered, proxy=None) as socket:
            hello = json.loads(await socket.recv())
            assert (hello["tenant"], hello["user"]) == ("acme", "bob")
            assert socket.subprotocol == "chatd.v1"
        status, error = await refused_handshake(running.port, subprotocols=offered)
        assert (status, error["code"]) == (401, "bad_ticket")


async def test_a_ticket_grows_old_and_dies_with_its_key(start) -> None:
    async with start() as running:
        authenticator = running.daemon.authenticator
        clock = FakeClock()
        authenticator._clock = clock
        key = running.daemon.keys.authenticate(running.key)
        principal = Principal.of(key)
        old = authenticator.issue_ticket(principal)
        clock.advance(TICKET_TTL_S)
        with pytest.raises(AuthenticationError):
            authenticator._redeem(old)
        orphan = authenticator.issue_ticket(principal)
        running.daemon.keys._keys.pop(principal.key_id)
        with pytest.raises(AuthenticationError):
            authenticator._redeem(orphan)
        for _ in range(MAX_TICKETS_PER_KEY - 1):
            authenticator.issue_ticket(principal)
        authenticator.issue_ticket(principal)
        with pytest.raises(RateLimited):
            authenticator.issue_ticket(principal)


async def test_without_a_keys_file_the_local_key_lets_in_and_nothing_else(local_state, start) -> None:
    daemon = open_daemon(Settings())
    path = local_state / "local.key"
    assert path.stat().st_mode & 0o777 == 0o600
    key = daemon.keys.authenticate(path.read_text().strip())
    assert (key.tenant, key.user, key.is_operator) == ("local", "local", True)
    assert daemon.keys.authenticate(mint("local")[0]) is None
    assert open_daemon(Settings()).keys.authenticate(path.read_text().strip()) is not None


async def test_serving_without_a_key_is_an_opt_in_and_for_loopback_only(local_state) -> None:
    near = HTTPConnection({"type": "http", "headers": [], "client": ("127.0.0.1", 1)})
    far = HTTPConnection({"type": "http", "headers": [], "client": ("10.0.0.9", 1)})
    wrong = HTTPConnection(
        {"type": "http", "headers": [(b"authorization", b"Bearer ck_x")], "client": ("127.0.0.1", 1)}
    )
    other = HTTPConnection(
        {"type": "http", "headers": [(b"authorization", b"Bearer none")], "client": ("127.0.0.1", 1)}
    )
    opened = open_daemon(Settings(server={"allow_anonymous_loopback": True})).authenticator
    closed = open_daemon(Settings()).authenticator
    assert opened.authenticate(near) is ANONYMOUS
    assert opened.authenticate(other) is ANONYMOUS, "clients that must send something send this"
    for authenticator, connection in ((opened, far), (opened, wrong), (closed, near), (closed, other)):
        with pytest.raises(AuthenticationError):
            authenticator.authenticate(connection)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"host": "0.0.0.0"}, "no keys"),
        ({"host": "10.0.0.1", "has_keys_file": True}, "no TLS"),
        ({"host": "10.0.0.1", "has_tls": True}, "no keys"),
        ({"host": "0.0.0.0", "has_keys_file": True, "has_tls": True, "allow_anonymous": True}, "loopback only"),
        ({"host": "127.0.0.1", "behind_proxy": True, "allow_anonymous": True}, "loopback only"),
    ],
)
def test_an_address_that_lets_strangers_in_is_refused(options, what) -> None:
    arguments = {"has_keys_file": False, "has_tls": False, "behind_proxy": False, "allow_anonymous": False, **options}
    with pytest.raises(ConfigError, match=what):
        check_exposure(**arguments)


def test_loopback_needs_nothing_and_being_open_is_warned_of() -> None:
    arguments = {"has_keys_file": False, "has_tls": False, "behind_proxy": False}
    assert check_exposure(host="127.0.0.1", allow_anonymous=False, **arguments) == []
    assert len(check_exposure(host="::1", allow_anonymous=True, **arguments)) == 1


def test_loopback_is_told_by_the_address() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "example.com", "localhost.evil"))


def test_the_name_in_a_host_header() -> None:
    assert [host_name(text) for text in ("a.b:80", "[::1]:8790", "A", "127.0.0.1")] == ["a.b", "::1", "a", "127.0.0.1"]
    assert [host_name(text) for text in ("a:b", "u@a", "a/b", "a?b")] == [None] * 4


PAGE = {"Origin": "https://app.example"}


async def test_a_listed_page_may_send_what_its_client_likes_to_and_read_errors(start) -> None:
    async with (
        start(server={"allowed_origins": ("https://App.example/",)}) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as http,
    ):
        wanted = (
            "authorization,content-type,x-stainless-os,x-stainless-retry-count,x-conversation-id,x-openwebui-chat-id"
        )
        preflight = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
        answer = await http.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert {name.strip() for name in answer.headers["access-control-allow-headers"].split(",")} >= set(
            wanted.split(",")
        )
        for path, headers, status in (
            ("/v1/models", {}, 401),
            ("/v1/models?key=x", running.headers(), 401),
            ("/v1/models/x", running.headers(), 404),
            ("/v1/nothing", running.headers(), 404),
            ("/metrics", running.headers(), 403),
        ):
            answer = await http.get(path, headers={**PAGE, **headers})
            assert answer.status_code == status, path
            assert answer.headers["access-control-allow-origin"] == "https://app.example", path
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_failure_of_the_daemon_can_be_read_by_a_listed_page(start, monkeypatch) -> None:
    async with (
        start(server={"allowed_origins": ("https://app.example",)}) as running,
        httpx.AsyncClient(base_url=running.url, trust_env=False) as http,
    ):
        monkeypatch.setattr(running.daemon.authenticator, "authenticate", lambda _: 1 / 0)
        answer = await http.get("/v1/models", headers={**PAGE, **running.headers()})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize("origin", ["*", "https://*.example", "app.example", "https://app.example/path", "null", ""])
def test_what_is_no_origin_is_refused_at_start(origin) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        Settings(server={"allowed_origins": (origin,)})
