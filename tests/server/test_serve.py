"""Taking the port, failing for the right reason, and stopping."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from chatd.client import Client
from chatd.config import Settings, cache_dir, child_environment
from chatd.errors import ConfigError, ModelError, PortInUse, Unavailable
from chatd.models.registry import resolve
from chatd.protocol import Params, PoolSnapshot, PoolSubscribe, decode_event, encode, unpack_cells
from chatd.server.backend import Backend, engine_options, session_limits
from chatd.server.daemon import Daemon
from chatd.server.listen import BehindProxy, bind, tls_context_arguments
from chatd.server.serve import serve_async
from chatd.tenants.keys import KeyStore, create_key


class FailingBackend:
    """A model that cannot be had."""

    closed = False

    async def load(self) -> None:
        raise ModelError("the model is not there", code="model_not_found")

    async def close(self) -> None:
        self.closed = True


def test_a_port_that_is_taken_is_said_so() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as refused:
            bind("127.0.0.1", port)
        assert refused.value.exit_code == 5


async def test_the_port_is_taken_before_anything_is_loaded(local_state) -> None:
    backends: list[Any] = []
    with bind("127.0.0.1", 0) as taken:
        settings = Settings(server={"port": taken.getsockname()[1]})
        with pytest.raises(PortInUse):
            await serve_async(settings, make_backend=lambda *made: backends.append(made), handle_signals=False)
    assert backends == []


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_a_setting_to_mend(host) -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind(host, 0)


def test_the_ipv6_loopback_can_be_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("there is no IPv6")
    with listener:
        assert listener.getsockname()[0] == "::1"


async def test_what_loading_failed_for_is_raised_and_all_is_closed(local_state) -> None:
    backend = FailingBackend()
    with pytest.raises(ModelError, match="not there") as failed:
        await serve_async(Settings(server={"port": 0}), make_backend=lambda *_made: backend, handle_signals=False)
    assert failed.value.exit_code == 4
    assert backend.closed


async def test_stopping_does_not_wait_for_a_download(local_state) -> None:
    forever, stop = threading.Event(), asyncio.Event()

    def resolve_for_ever(name, progress):
        progress("downloading", 0.25)
        forever.wait()

    def make_backend(daemon, settings):
        return Backend(daemon, settings, resolve=resolve_for_ever)

    serving = asyncio.create_task(
        serve_async(
            Settings(server={"port": 0}),
            make_backend=make_backend,
            stop=stop,
            handle_signals=False,
            on_listening=lambda _url: stop.set(),
        )
    )
    async with asyncio.timeout(10):
        await serving
    forever.set()


async def test_a_model_that_cannot_be_resolved_is_the_reason(local_state) -> None:
    def refuse(name, progress):
        raise ModelError(f"{name} is unknown")

    with pytest.raises(ModelError, match="smollm2-135m is unknown"):
        await serve_async(
            Settings(server={"port": 0}),
            make_backend=lambda daemon, settings: Backend(daemon, settings, resolve=refuse),
            handle_signals=False,
        )


@pytest.mark.parametrize(
    ("server", "what"),
    [
        ({"host": "0.0.0.0"}, "no keys"),
        ({"tls_cert": "/nowhere/cert.pem"}, "--tls-key"),
        ({"tls_cert": "/nowhere/cert.pem", "tls_key": "/nowhere/key.pem"}, "no certificate"),
        ({"keys_file": "/nowhere/keys.json"}, "cannot be read"),
    ],
)
async def test_settings_that_cannot_be_served_are_refused_before_loading(local_state, server, what) -> None:
    with pytest.raises(ConfigError, match=what):
        await serve_async(Settings(server=server), make_backend=lambda *_made: pytest.fail("loaded"))


@pytest.mark.parametrize("setting", ["kv_memory", "host_memory", "disk_space"])
async def test_a_size_that_is_none_is_refused_before_loading(local_state, setting) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{setting}"):
        await serve_async(Settings(engine={setting: "lots"}), make_backend=lambda *_made: pytest.fail("loaded"))


def test_settings_reach_the_engine_and_the_sessions(tmp_path) -> None:
    class Files:
        id, path, digest = "m", tmp_path, "d1"

    settings = Settings(
        engine={
            "kv_memory": "1MiB",
            "host_memory": "2MiB",
            "disk_space": "3MiB",
            "disk_directory": tmp_path / "kv",
            "block_size": 32,
            "max_num_seqs": 3,
            "threads": 1,
        },
        model={"quantization": "int8", "max_model_len": 128},
        sessions={"max_sessions_per_user": 9, "max_content_bytes": 2048},
        quotas={"max_inflight": 5},
        server={"max_body_bytes": 4096},
        tenants={"acme": {"weight": 2.0, "floor": 0.25}},
    )
    options = engine_options(settings)(Files())
    assert (options.model_id, options.model_path, options.model_digest) == ("m", str(tmp_path), "d1")
    assert (options.kv_memory_bytes, options.block_size, options.max_num_seqs) == (2**20, 32, 3)
    assert (options.host_memory_bytes, options.disk_space_bytes) == (2 * 2**20, 3 * 2**20)
    assert options.disk_directory == str(tmp_path / "kv")
    assert (options.quantization, options.max_model_len, options.num_threads) == ("int8", 128, 1)
    assert (options.tenants["acme"].weight, options.tenants["acme"].floor) == (2.0, 0.25)
    limits = session_limits(settings)
    assert (limits.max_sessions_per_user, limits.max_content_bytes) == (9, 2048)
    assert (limits.max_turns_per_user, limits.max_history_bytes) == (5, 4096)
    defaults = engine_options(Settings())(Files())
    assert defaults.kv_memory_bytes is None
    assert (defaults.host_memory_bytes, defaults.disk_space_bytes) == (0, 0)
    assert defaults.disk_directory == str(cache_dir() / "kv")


def test_tls_is_off_without_a_certificate() -> None:
    assert tls_context_arguments(Settings().server) == {}


@pytest.fixture
def certificate(tmp_path) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_over_tls_both_doors_answer(start, certificate) -> None:
    cert, key = certificate
    trusted = ssl.create_default_context(cafile=str(cert))
    async with start(server={"tls_cert": cert, "tls_key": key}) as running:
        assert running.url.startswith("https://")
        async with httpx.AsyncClient(base_url=running.url, verify=trusted, trust_env=False) as http:
            assert (await http.get("/v1/models", headers=running.headers())).status_code == 200
        async with connect(
            running.url.replace("https", "wss") + "/v1/chat/ws",
            additional_headers=running.headers(),
            ssl=trusted,
            proxy=None,
        ) as socket:
            assert json.loads(await socket.recv())["type"] == "hello"


@pytest.mark.parametrize(
    ("proxy", "address"), [("127.0.0.1", "198.51.100.7"), ("10.0.0.1", "127.0.0.1"), (None, "127.0.0.1")]
)
async def test_only_the_named_proxys_word_on_addresses_is_taken(start, proxy, address) -> None:
    async with start(server={"behind_proxy": proxy}) as running:
        seen = []
        authenticate = running.daemon.authenticator.authenticate
        running.daemon.authenticator.authenticate = lambda connection: (
            seen.append(connection.client.host) or authenticate(connection)
        )
        async with httpx.AsyncClient(base_url=running.url, headers=running.headers(), trust_env=False) as http:
            await http.get("/v1/models", headers={"X-Forwarded-For": "198.51.100.7"})
        assert seen == [address]


@pytest.mark.parametrize("proxy", ["nosuch", "*", "0.0.0.0/0", "::/0", "10.0.0.1,*", "10.0.0.1/8", ""])
def test_a_proxy_that_is_no_address_or_is_everybody_is_refused(proxy) -> None:
    with pytest.raises(ValueError, match="behind_proxy"):
        Settings(server={"behind_proxy": proxy})


async def test_peers_that_are_neither_the_proxy_nor_this_machine_are_refused() -> None:
    seen: list[tuple[str, str]] = []

    async def app(scope, receive, send) -> None:
        seen.append((scope["client"][0], scope["scheme"]))

    async def ask(peer: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"x-forwarded-for", b"198.51.100.7"), (b"x-forwarded-proto", b"https")]
        scope = {"type": "http", "client": (peer, 1), "scheme": "http", "headers": headers}
        await BehindProxy(app, "10.0.0.5, 10.1.0.0/16, 2001:db8::/64")(scope, None, send)
        return sent[0]["status"] if sent else 200

    for peer in ("10.0.0.5", "10.1.2.3", "2001:db8::7"):
        assert await ask(peer) == 200, peer
    assert seen == [("198.51.100.7", "https")] * 3
    seen.clear()
    for peer in ("10.0.0.6", "192.0.2.1", "2001:db8:1::1", "testclient"):
        assert await ask(peer) == 403, peer
    assert seen == []
    for peer in ("127.0.0.1", "::1"):
        assert await ask(peer) == 200, peer
    assert seen == [("127.0.0.1", "http"), ("::1", "http")]


REAL = (
    "import sys\n"
    "from chatd.config import load_settings\n"
    "from chatd.server.serve import serve\n"
    "settings = load_settings(None, {'server.port': 0, 'server.keys_file': sys.argv[1],\n"
    "    'engine.kv_memory': '64MiB', 'model.max_model_len': 1024}).settings\n"
    "serve(settings, on_ready=lambda serving: print(serving.url, flush=True))\n"
)


def start_python(code: str, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        env=child_environment(XDG_STATE_HOME=str(tmp_path)),
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.model
async def test_the_real_daemon_serves_and_stops_when_asked(tmp_path) -> None:
    """One process, as `chatd serve` runs it: ready, an answer on either door, SIGTERM, exit code 0."""
    resolve("smollm2-135m")
    key = create_key(tmp_path / "keys.json", tenant="acme", user="ann", operator=True)
    process = start_python(REAL, tmp_path, str(tmp_path / "keys.json"))
    try:
        url = (await asyncio.to_thread(process.stdout.readline)).strip()
        assert url.startswith("http://127.0.0.1:")
        question = "What is the capital of France?"
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, http_client=httpx.AsyncClient(trust_env=False)
        ) as openai:
            answer = await openai.chat.completions.create(
                model="smollm2-135m", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=12
            )
            assert "Paris" in answer.choices[0].message.content
        async with Client.connect(url, key=key) as client:
            session = await client.create_session()
            text = "".join(
                [part async for part in session.stream(question, params=Params(temperature=0, max_tokens=12))]
            )
            assert text == answer.choices[0].message.content
        async with connect(
            url.replace("http", "ws") + "/v1/chat/ws", additional_headers={"Authorization": f"Bearer {key}"}, proxy=None
        ) as socket:
            blocks = decode_event(await socket.recv()).model.blocks
            await socket.send(encode(PoolSubscribe(id="w", detail="map", cells=64)))
            while not isinstance(event := decode_event(await socket.recv()), PoolSnapshot):
                pass
            assert event.totals.blocks == blocks == sum(map(sum, unpack_cells(event.cells.data)))
            assert event.totals.free + event.totals.cached + event.totals.active == blocks
            assert [row.title for row in event.sessions if row.title] != []
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        end(process)


def test_a_second_signal_ends_at_once(tmp_path) -> None:
    """A daemon whose drain would last: the first SIGINT begins it, the second ends it; exit code 0."""
    code = (
        "import asyncio, os\n"
        "from chatd.config import Settings\n"
        "from chatd.server.daemon import Daemon\n"
        "from chatd.server.serve import serve_async\n"
        "class Backend:\n"
        "    def __init__(self, daemon, settings): pass\n"
        "    async def load(self): await asyncio.sleep(3600)\n"
        "    async def close(self): print('closed', flush=True)\n"
        "async def drain(self, deadline_s):\n"
        "    print('draining', flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "Daemon.drain = drain\n"
        "asyncio.run(serve_async(Settings(server={'port': 0}), make_backend=Backend,\n"
        "    on_listening=lambda url: print(url, flush=True)))\n"
    )
    process = start_python(code, tmp_path)
    try:
        said = []

        def read_until(word: str) -> None:
            while word not in (line := process.stdout.readline()):
                assert line, f"the process ended before it said {word}: {said}"
                said.append(line)

        read_until("http://127.0.0.1:")
        os.kill(process.pid, signal.SIGINT)
        read_until("draining")
        os.kill(process.pid, signal.SIGINT)
        read_until("closed")
        assert process.wait(10) == 0
    finally:
        end(process)


def test_the_front_imports_no_torch() -> None:
    code = (
        "import sys, chatd.server.serve\n"
        "loaded = {'torch', 'transformers', 'numba'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_daemon_that_is_not_open_is_unavailable(local_state) -> None:
    daemon = Daemon(Settings(), KeyStore(None))
    with pytest.raises(Unavailable, match="starting"):
        _ = daemon.manager
    daemon.report("loading weights", 0.25)
    with pytest.raises(Unavailable, match="loading weights 25%"):
        _ = daemon.manager
    daemon.fail("no model")
    assert (daemon.readiness.status, daemon.readiness.phase) == ("failed", "no model")
