"""Asks a daemon that runs for what only an operator may have done: `chatd sessions import|rm|erase|erase-tenant`."""

from __future__ import annotations

import http
import http.client
import json
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from chatd.client.errors import error_from
from chatd.config import check_key_transport, client_defaults
from chatd.errors import ChatdError, EnvironmentProblem, PermissionDenied
from chatd.protocol import ErrorBody

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0
"""A tenant's conversations are many, and each answer in progress is waited for."""


class _Refusal(msgspec.Struct):
    error: ErrorBody


class OperatorClient:
    """One daemon, with the operator's key for it.

    Args:
        address: Its http(s) address.
        key: Default: `CHATD_KEY`, the one in `CHATD_KEY_FILE`, or this machine's local key for an address of the
            loopback.

    Raises:
        InvalidRequest: The key would go over the network in the clear.
    """

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address = address
        self._key = key or client_defaults(address).key
        check_key_transport(address, self._key)

    def take_in(self, exported: str) -> str:
        """Bring in a conversation as `session_files.as_json` writes it; return its name."""
        return str(self._ask("POST", "/v1/sessions/import", exported)["session"])

    def remove(self, sessions: Sequence[str]) -> list[str]:
        """Remove sessions by name; return them."""
        return self._removed({"sessions": list(sessions)})

    def remove_unused(self, unused_days: float, tenant: str | None) -> list[str]:
        """Remove what nobody used for so long; return which that was."""
        return self._removed({"unused_days": unused_days, "tenant": tenant})

    def erase(self, session: str) -> dict[str, Any]:
        """Erase a session; return the receipt."""
        return self._ask("DELETE", f"/v1/sessions/{quote(session, safe='')}")

    def erase_tenant(self, tenant: str) -> dict[str, Any]:
        """Erase all that there is of a tenant; return the receipt."""
        return self._ask("DELETE", f"/v1/tenants/{quote(tenant, safe='')}")

    def _removed(self, body: dict[str, object]) -> list[str]:
        return [str(session) for session in self._ask("POST", "/v1/sessions/remove", json.dumps(body))["removed"]]

    def _ask(self, method: str, path: str, body: str | None = None) -> dict[str, Any]:
        """Return the daemon's answer.

        Raises:
            ChatdError: It refuses, in its words.
            EnvironmentProblem: It does not answer, or not as a daemon of this version.
        """
        address = urlsplit(self.address)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "127.0.0.1", address.port, timeout=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_TIMEOUT_S)
            connection.request(method, path, None if body is None else body.encode(), headers)
            response = connection.getresponse()
            data = response.read()
        except ssl.SSLCertVerificationError as error:
            raise EnvironmentProblem(
                f"the certificate of {self.address} is not trusted: {error.verify_message}",
                code="untrusted_certificate",
                hint="name the daemon as its certificate does (--url), or the certificate in SSL_CERT_FILE",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentProblem(f"the daemon at {self.address} does not answer: {error}") from None
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise self._refused(response.status, data)
        try:
            return dict(json.loads(data))
        except ValueError:
            raise EnvironmentProblem(f"{self.address} does not answer as a daemon does") from None

    def _refused(self, status: int, data: bytes) -> ChatdError:
        try:
            error = error_from(msgspec.json.decode(data, type=_Refusal).error)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return EnvironmentProblem(f"{self.address} answered HTTP {status}, not as a daemon does")
        if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            hint = "name the operator's key with CHATD_KEY or CHATD_KEY_FILE (chatd keys create --operator)"
            return PermissionDenied(f"the daemon at {self.address} refuses: {error.message}", hint=hint)
        return error
