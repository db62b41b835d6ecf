"""Files with a key in them: for one daemon, readable by their owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from chatd.errors import ConfigError

MAX_KEY_CHARS = 4096


def read_key_file(folder: Path, name: str) -> str:
    """Return the key in a file that only its owner can read.

    Args:
        folder: In which it is, unless its name is absolute or begins with "~".
        name: Of the file.

    Raises:
        ConfigError: There is no key in it, or others can read it.
    """
    path = folder / name
    try:
        path = folder / Path(name).expanduser()
        # A pipe would be waited for as long as nobody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="ascii") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"the key in {path} cannot be read: it is no file")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(f"others can read the key in {path}", hint=f"chmod 600 {path}")
            key = file.read(MAX_KEY_CHARS + 1).strip()
    except OSError as error:
        raise ConfigError(f"the key in {path} cannot be read: {error.strerror}") from None
    except RuntimeError:
        raise ConfigError(f"the key in {path} cannot be read: there is no such home") from None
    except ValueError:
        # No text, or a zero in the name.
        raise ConfigError(f"there is no key in {path}") from None
    if not key or len(key) > MAX_KEY_CHARS or not key.isprintable() or " " in key:
        raise ConfigError(f"there is no key in {path}")
    return key
