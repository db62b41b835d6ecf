"""Clients that mean no good on the wire: floods, fragments, half-open connections, bombs."""

import asyncio
import base64
import contextlib
import os
import struct
import zlib
from collections import Counter

import httpx
import pytest

from chatd.protocol import Ping, Pong
from chatd.server import http_protocol
from chatd.server.app import HANDSHAKES_PER_TURN


async def open_raw(running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a websocket by hand and read past the hello."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    nonce = base64.b64encode(os.urandom(16)).decode()
    request = (
        "GET /v1/chat/ws HTTP/1.1\r\n"
        f"Host: 127.0.0.1:{running.port}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Key: {nonce}\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Extensions: permessage-deflate\r\n"
        f"Authorization: Bearer {running.key}\r\n\r\n"
    )
    writer.write(request.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 101 " in head
    assert b"permessage-deflate" not in head
    return reader, writer


def masked(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv1: bool = False) -> bytes:
    first = (0x80 if fin else 0) | (0x40 if rsv1 else 0) | opcode
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 65536:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + b"\0\0\0\0" + payload


async def close_code(reader: asyncio.StreamReader) -> int | None:
    """Read frames up to the close frame and return its code; None where the connection is just dropped."""
    try:
        async with asyncio.timeout(10):
            while True:
                first, second = await reader.readexactly(2)
                size = second & 0x7F
                if size == 126:
                    [size] = struct.unpack("!H", await reader.readexactly(2))
                elif size == 127:
                    [size] = struct.unpack("!Q", await reader.readexactly(8))
                payload = await reader.readexactly(size)
                if first & 0x0F == 8:
                    return struct.unpack("!H", payload[:2])[0]
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def check_witness(talk) -> None:
    assert isinstance(await talk.ask(Ping(id="w", t=1)), Pong)


async def test_a_flood_of_pings_is_cut_off(start) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await open_raw(running)
        writer.write(masked(9, b"x" * 100) * 1000)
        assert await close_code(reader) == 4429
        writer.close()
        await check_witness(witness)


async def test_a_few_pings_are_answered(start) -> None:
    async with start() as running, running.chat() as talk:
        for _ in range(5):
            await (await talk.socket.ping())
        await check_witness(talk)


@pytest.mark.parametrize("payload", [b"", b"x"])
async def test_endless_fragments_are_cut_off(start, payload) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await open_raw(running)
        writer.write(masked(1, b"{", fin=False) + masked(0, payload, fin=False) * 10_000)
        assert await close_code(reader) == 1009
        writer.close()
        await check_witness(witness)


async def test_a_message_in_a_few_fragments_is_read(start) -> None:
    async with start() as running:
        reader, writer = await open_raw(running)
        writer.write(masked(1, b'{"type":', fin=False) + masked(0, b'"ping",', fin=False) + masked(0, b'"t":5}'))
        async with asyncio.timeout(10):
            await reader.readuntil(b'"pong","t":5.0')
        writer.close()


async def test_a_compressed_bomb_is_not_unpacked(start) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await open_raw(running)
        writer.write(masked(1, zlib.compress(b"x" * 2**22), rsv1=True))
        assert await close_code(reader) == 1002
        writer.close()
        await check_witness(witness)


async def test_a_frame_that_is_announced_too_large_is_refused_before_it_comes(start) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await open_raw(running)
        writer.write(struct.pack("!BBQ", 0x81, 0x80 | 127, 2**40) + b"\0\0\0\0")
        assert await close_code(reader) == 1009
        writer.close()
        await check_witness(witness)


async def test_text_that_is_not_utf8_ends_the_connection(start) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await open_raw(running)
        writer.write(masked(1, b"\xff\xfe"))
        assert await close_code(reader) == 1007
        writer.close()
        await check_witness(witness)


async def test_a_connection_that_never_asks_is_dropped(start, monkeypatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.05)
    async with start() as running, running.chat() as witness:
        silent = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(50)]
        silent[0][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(10):
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
        await check_witness(witness)


async def test_a_later_request_that_never_ends_its_headers_is_dropped(start, monkeypatch) -> None:
    async with start() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode()
        for _ in range(2):
            writer.write(request)
            async with asyncio.timeout(10):
                await reader.readuntil(b'{"status":"ok"}')
        monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.05)
        writer.write(request[:-2])
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_a_slow_answer_is_waited_for(start, monkeypatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.05)
    async with start() as running:
        running.engine.held = True
        body = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(base_url=running.url, headers=running.headers(), trust_env=False) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            async with asyncio.timeout(10):
                while not running.engine.submits:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            # A clock that the request has left running would ring before this one.
            passed = asyncio.Event()
            asyncio.get_running_loop().call_later(http_protocol.HEADER_TIMEOUT_S, passed.set)
            await passed.wait()
            running.engine.held = False
            assert (await asking).status_code == 200


async def test_too_many_half_open_connections_are_dropped_and_later_ones_get_in(start, monkeypatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_HALF_OPEN", http_protocol.BoundedHttpProtocol._num_half_open + 3)
    async with start() as running:
        silent = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(4)]
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await silent[3][0].read() == b""
        for _, writer in silent:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        async with running.chat() as talk:
            await check_witness(talk)


async def test_headers_without_end_are_refused(start) -> None:
    async with start() as running, running.chat() as witness:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000)
        async with asyncio.timeout(10):
            head = await reader.read(64)
        assert b" 400 " in head
        writer.close()
        await check_witness(witness)


async def test_a_crowd_that_never_reads_leaves_others_alone(start) -> None:
    options = {"send_buffer_bytes": 2**14, "send_timeout_s": 0.2, "max_connections_per_key": 64}
    async with start(server=options) as running, running.chat(running.keys["eve"]) as witness:
        crowd = [await open_raw(running) for _ in range(50)]
        for _, writer in crowd:
            writer.write(masked(1, b'{"type":"session.list","id":"l"}') * 20)
        for _ in range(20):
            await check_witness(witness)
        for _, writer in crowd:
            writer.close()


async def test_of_a_burst_of_handshakes_a_few_begin_in_one_turn_of_the_loop(start) -> None:
    async with start() as running:
        turn = 0
        begun: list[int] = []
        authenticate = running.daemon.authenticator.authenticate

        def note(connection):
            begun.append(turn)
            return authenticate(connection)

        running.daemon.authenticator.authenticate = note

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        opened = await asyncio.gather(*(open_raw(running) for _ in range(40)))
        counting.cancel()
        assert len(begun) == 40
        assert max(Counter(begun).values()) <= 2 * HANDSHAKES_PER_TURN
        for _, writer in opened:
            writer.close()
