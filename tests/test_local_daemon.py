"""A daemon of one's own: where it listens, how it is asked, and what is said when it cannot start."""

import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatd.errors import EnvironmentProblem
from chatd.local_daemon import LocalDaemon, private_url, readiness


def test_a_free_port_is_taken_as_it_is() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert private_url(port) == f"http://127.0.0.1:{port}"


def test_where_the_port_is_taken_or_zero_a_free_one_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for wanted in (port, 0):
            found = int(private_url(wanted).rpartition(":")[2])
            assert found not in (0, port)


def test_a_port_of_zero_is_not_the_port_of_http() -> None:
    assert LocalDaemon("http://127.0.0.1:0")._command[-4:] == ["--host", "127.0.0.1", "--port", "0"]
    assert LocalDaemon("http://127.0.0.1")._command[-1] == "80"


def test_a_log_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"serve\.log cannot be written"):
        LocalDaemon("http://127.0.0.1:9", log_path=tmp_path / "file" / "serve.log").start()


@pytest.fixture
def https_url(tmp_path: Path) -> Iterator[str]:
    """Something that answers over TLS with a certificate that nobody trusts."""

    class Ready(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    class Server(http.server.HTTPServer):
        def handle_error(self, *_: object) -> None: ...

    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Server(("127.0.0.1", 0), Ready) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_an_untrusted_certificate_is_not_taken_for_no_daemon(https_url: str) -> None:
    with pytest.raises(EnvironmentProblem, match="is not trusted") as refused:
        readiness(https_url)
    assert "SSL_CERT_FILE" in (refused.value.hint or "")


def test_where_nobody_answers_there_is_no_daemon() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert readiness(f"http://127.0.0.1:{probe.getsockname()[1]}") is None
