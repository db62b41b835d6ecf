"""The errors that chatd shows to people.

```
ChatdError                    a user's mistake, or overload; raised before any state changes
├── InvalidRequest            a field is wrong                               HTTP 400
│   ├── UnknownType           a command that does not exist                  HTTP 400
│   └── ContextLengthExceeded prompt and answer cannot fit                   HTTP 400
├── AuthenticationError       no key, or a key that is not known             HTTP 401
├── PermissionDenied          a known key that may not do this               HTTP 403
├── NotFound                  unknown, or somebody else's                    HTTP 404
├── Conflict                  the session is busy, an id was used twice      HTTP 409
├── RateLimited               a quota; says when to come back                HTTP 429
├── Unavailable               loading, draining, overloaded                  HTTP 503
├── StorageError              what must be kept cannot be written or read     HTTP 503
│   └── DamagedRecord         what was kept is not what was written          HTTP 500
├── EngineError               the engine failed while it computed this       HTTP 500
└── StartupError              the daemon or a command cannot start
    ├── ConfigError           exit code 2
    ├── EnvironmentProblem    exit code 3
    ├── ModelError            exit code 4
    └── PortInUse             exit code 5
```

A broken invariant is an `AssertionError`, never one of these. "Not now" is `None`, never an exception.
"""

from typing import ClassVar


class ChatdError(Exception):
    """A mistake or a refusal with a stable `code`, which both doors show in the same words.

    Args:
        message: Lowercase, value first, names what to change.
        code: Overrides the class's `code` where a class serves several.
        param: The field that is at fault.
        hint: What would help, if that is known.
        retry_after_ms: When it is worth trying again.
    """

    code: ClassVar[str] = "error"
    error_type: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = code or type(self).code
        self.param = param
        self.hint = hint
        self.retry_after_ms = retry_after_ms


class InvalidRequest(ChatdError):
    """A request or a field of it is malformed or out of range."""

    code = "invalid_request"
    error_type = "invalid_request_error"
    http_status = 400


class UnknownType(InvalidRequest):
    """A frame names a command that does not exist."""

    code = "unknown_type"


class ContextLengthExceeded(InvalidRequest):
    """A prompt that can never fit the context or the pool."""

    code = "context_length_exceeded"


class AuthenticationError(ChatdError):
    """No key, or one that is not known."""

    code = "invalid_api_key"
    error_type = "authentication_error"
    http_status = 401


class PermissionDenied(ChatdError):
    """A known key that may not do this."""

    code = "permission_denied"
    error_type = "permission_error"
    http_status = 403


class NotFound(ChatdError):
    """Something unknown; what belongs to somebody else is unknown too."""

    code = "not_found"
    error_type = "not_found_error"
    http_status = 404


class Conflict(ChatdError):
    """The session is in a state that does not allow this."""

    code = "conflict"
    error_type = "conflict_error"
    http_status = 409


class RateLimited(ChatdError):
    """A quota is used up for now."""

    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"
    http_status = 429


class Unavailable(ChatdError):
    """The daemon is loading, draining or overloaded."""

    code = "unavailable"
    error_type = "server_error"
    http_status = 503


class StorageError(ChatdError):
    """What had to be kept could not be written: no room, or an I/O error. Nothing was acknowledged."""

    code = "storage_error"
    error_type = "server_error"
    http_status = 503


class DamagedRecord(StorageError):
    """What was kept came back changed: bits have flipped, or something else wrote to the journal's files."""

    code = "damaged_record"
    http_status = 500


class EngineError(ChatdError):
    """The engine failed while it computed this request."""

    code = "engine_error"
    error_type = "server_error"
    http_status = 500


class StartupError(ChatdError):
    """A command that cannot do its work; `exit_code` is what the shell sees."""

    code = "startup_error"
    exit_code: ClassVar[int] = 1


class ConfigError(StartupError):
    """A setting that is unknown or out of range."""

    code = "config_error"
    exit_code = 2


class EnvironmentProblem(StartupError):
    """Something on this machine is missing or too small."""

    code = "environment_error"
    exit_code = 3


class ModelError(StartupError):
    """A model that cannot be found, read or served."""

    code = "model_error"
    exit_code = 4


class PortInUse(StartupError):
    """The address to listen on is taken."""

    code = "port_in_use"
    exit_code = 5
