"""S17: crowds that never read, or never begin, cost a bounded queue and nobody's token."""

import asyncio
import base64
import os
import struct

import psutil

from chatd.client import Client
from chatd.protocol import Params
from chatd.testing.ports import free_port
from chatd.testing.toy_daemon import ToyFarm

NUM_EACH = 50
MIB = 2**20
BUFFER_BYTES = 2**15
# Eight times the high-water mark each, and as much again for what is being encoded and what the socket holds.
MAX_GROWTH_BYTES = NUM_EACH * 16 * BUFFER_BYTES


def masked(payload):
    size = len(payload)
    head = struct.pack("!BB", 0x81, 0x80 | size) if size < 126 else struct.pack("!BBH", 0x81, 0x80 | 126, size)
    return head + b"\0\0\0\0" + payload


async def open_socket(port, *, handshake):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**12)
    if handshake:
        nonce = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET /v1/chat/ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Key: {nonce}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def answers(client, num_turns):
    """Say the same things in a new session and return what is answered."""
    session = await client.create_session()
    said = []
    for turn in range(num_turns):
        asked = session.say(f"this is turn {turn}", params=Params(max_tokens=40))
        async for _ in asked:
            pass
        said.append((asked.text, asked.reason, asked.usage.output_tokens))
    return said


async def test_fifty_that_never_read_and_fifty_half_open_cost_bounded_memory_and_nobodys_token(tmp_path):
    port = free_port()
    server = {
        "send_buffer_bytes": BUFFER_BYTES,
        "send_timeout_s": 1.0,
        "max_connections_per_key": 400,
        "max_connections_per_address": 400,
    }
    with ToyFarm(tmp_path) as farm:
        pid = farm.start(port, pace_s=0.0, server=server)
        daemon = psutil.Process(pid)
        async with Client(f"http://127.0.0.1:{port}", wait_s=20.0) as witness:
            large = await witness.create_session()
            for number in range(6):
                async for _ in large.say(f"{number} " + "y" * 400, params=Params(max_tokens=64)):
                    pass
            alone = await answers(witness, 4)
            before = daemon.memory_info().rss
            deaf = [await open_socket(port, handshake=True) for _ in range(NUM_EACH)]
            # No handshake, or one and then nothing.
            half_open = [await open_socket(port, handshake=number % 2 == 0) for number in range(NUM_EACH)]
            ask = masked(b'{"type":"session.get","id":"g","session":"%s"}' % large.id.encode())
            attach = masked(b'{"type":"session.attach","id":"a","session":"%s","history":"full"}' % large.id.encode())
            most = before
            for _ in range(6):
                for _, writer in deaf:
                    writer.write(attach + ask * 50)
                beside = await answers(witness, 4)
                assert beside == alone
                most = max(most, daemon.memory_info().rss)
            # What the deaf are attached to goes on all the same.
            async for _ in large.say("go on", params=Params(max_tokens=200)):
                pass
            most = max(most, daemon.memory_info().rss)
            assert most - before < MAX_GROWTH_BYTES, f"{(most - before) / MIB:.1f} MiB more"
            for _, writer in [*deaf, *half_open]:
                writer.close()
            assert await answers(witness, 4) == alone
