"""Servers of engines, which are told by HTTP to load a version from its path."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gradfs.engines.pinned import Pinned, pin
from gradfs.errors import GradfsError, Refused, Timeout
from gradfs.following import Follower

# Characters of an answer that an error shows.
_SHOWN = 500
# Bytes of an answer that are read.
_MOST = 1 << 20
_PIECE = 1 << 16


class Server:
    """A server of this host and user, which reads versions by a path. Each request may take `timeout` seconds."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self.url, self._timeout = url, timeout

    def load(self, version: Pinned) -> int:
        """Has the server load a version, which stays until it has answered, and returns its number.

        Raises Refused if the server does not load it, and Timeout.
        """
        raise NotImplementedError

    def update(self, path: str | os.PathLike[str]) -> int:
        """Has the server load the newest version of a model, and returns its number."""
        with pin(path) as version:
            return self.load(version)

    def follow(self, path: str | os.PathLike[str], **options: Any) -> int | None:
        """Has the server load each newest version. The options are those of `gradfs.follow`, without `changes`."""
        return Follower(path, lambda _, version: self.load(version), take=Pinned, **options).run()

    def post(self, address: str, body: Mapping[str, Any]) -> Any:
        """Sends JSON to an address of the server, and returns its answer."""
        return _answer(self.url, address, body, self._timeout)


def _answer(server: str, address: str, body: Mapping[str, Any], timeout: float) -> Any:
    """Sends JSON to `server`, such as `http://127.0.0.1:30000`, and returns its answer, JSON or None.

    Raises Timeout if the answer is not here in time, Refused if it is not 2xx, and GradfsError without a connection.
    """
    url, deadline = urlsplit(server), time.monotonic() + timeout
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if url.scheme not in kinds or not url.hostname:
        raise Refused(f"{server!r} is no http:// or https:// URL", errno.EINVAL)
    connection = kinds[url.scheme](url.hostname, url.port, timeout=timeout)
    where = f"POST {server.rstrip('/')}{address}"
    # Each read may take all of the timeout, so one that goes on and on is cut off.
    cut = threading.Timer(timeout, _cut, [connection])
    cut.daemon = True
    cut.start()
    try:
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", url.path.rstrip("/") + address, json.dumps(body), headers)
            answer, text = connection.getresponse(), b""
            while len(text) < _MOST and (piece := answer.read1(_PIECE)):
                text += piece
            if time.monotonic() >= deadline:
                raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        # Python 3.9 tells the two apart.
        if isinstance(error, (TimeoutError, socket.timeout)) or time.monotonic() >= deadline:
            raise Timeout(f"{where}: no answer within {timeout} s", errno.ETIMEDOUT) from error
        raise GradfsError(f"{where}: {error or type(error).__name__}", getattr(error, "errno", None)) from error
    finally:
        cut.cancel()
    if not 200 <= answer.status < 300:
        raise Refused(f"{where}: {answer.status}: {text.decode(errors='replace')[:_SHOWN].strip()}")
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return None


def _cut(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
