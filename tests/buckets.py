"""An S3 server for tests, and a way to it that does harm: an HTTP proxy that refuses, cuts and lies as it is told."""

import contextlib
import http.client
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import xml.sax.saxutils
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ENDS_WITH_US, REPOSITORY
from patience import HANGS, Limit

# Where scripts/setup puts the server. What it needs would change the versions of other packages.
PACKAGES = REPOSITORY / ".venv" / "s3-server"
KEY_ID = "known"
# The server takes the region from it, and does not check the signature.
SCOPE = "20260101/us-east-1/s3/aws4_request"
AUTHORIZATION = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/{SCOPE}, SignedHeaders=host, Signature=0"


def needed():
    """Skips the test where there is no S3 server; with CI=true it fails."""
    if not (PACKAGES / "moto").is_dir() and importlib.util.find_spec("moto") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no S3 server: scripts/setup test")


class Server:
    """An S3 server, which keeps its objects in memory."""

    def __init__(self):
        needed()
        self._scratch = Path(tempfile.mkdtemp(prefix="gradfs-test-s3-"))
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        command = [*ENDS_WITH_US, sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with open(self._scratch / "log", "wb") as log:
            env = {**os.environ, "PYTHONPATH": path}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        limit = Limit(HANGS)
        while not (found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", self._log())):
            assert self._process.poll() is None and not limit.over(), self._log()
            time.sleep(0.02)
        self.port = int(found[1])

    def _log(self):
        return (self._scratch / "log").read_text(errors="replace")

    def ask(self, method, path, body=b"", headers=()):
        """The status, the headers and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS)
        try:
            connection.request(method, path, body, {"Authorization": AUTHORIZATION, **dict(headers)})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def close(self):
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


class Exchange:
    """A request of a client, and the connection for the answer."""

    def __init__(self, server, handler):
        self._server, self._handler = server, handler
        self.method, self.path = handler.command, handler.path
        path, _, self.query = self.path.partition("?")
        asked = urllib.parse.parse_qs(self.query, keep_blank_values=True)
        # What a list is of. Parts of an object have a request before and one after them; deletions have one for all.
        actions = ("uploads", "uploadId", "delete") if self.method == "POST" else ()
        more = asked.get("prefix") or [word for word in actions if word in asked]
        self.name = "?".join([urllib.parse.unquote(path), *more])
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self.headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}

    def ask(self):
        """The server's answer."""
        return self._server.ask(self.method, self.path, self.body, self.headers)

    def answer(self, status, headers, body, promised=None):
        """Sends an answer, which may promise another length than it has."""
        self._handler.send_response_only(status)
        own = ("connection", "transfer-encoding", *(["content-length"] if self.method != "HEAD" else []))
        for name, value in headers:
            if name.lower() not in own:
                self._handler.send_header(name, value)
        if self.method != "HEAD":
            self._handler.send_header("Content-Length", str(len(body) if promised is None else promised))
        self._handler.end_headers()
        self._handler.wfile.write(body if self.method != "HEAD" else b"")
        self._handler.wfile.flush()

    def end(self, resets=False):
        """Ends the connection."""
        self._handler.close_connection = True
        with contextlib.suppress(OSError):
            if resets:
                self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                self._handler.connection.shutdown(socket.SHUT_RDWR)


def refuses(status, code, message="no"):
    """An answer as S3 gives it. With status 200 it is an error all the same."""
    text = f"<Code>{code}</Code><Message>{xml.sax.saxutils.escape(message)}</Message>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{text}</Error>'.encode()
    return lambda exchange: exchange.answer(status, [("Content-Type", "application/xml")], body)


def drops(exchange):
    """The server is not asked, and the connection ends."""
    exchange.end()


def loses(exchange):
    """The server does it, and the answer is lost."""
    exchange.ask()
    exchange.end()


def cuts(exchange):
    """Half of the body comes, and the connection is reset."""
    status, headers, body = exchange.ask()
    exchange.answer(status, headers, body[: len(body) // 2], len(body))
    exchange.end(resets=True)


def promises(more):
    """The answer promises another length than it has, and then the connection ends."""

    def fault(exchange):
        status, headers, body = exchange.ask()
        exchange.answer(status, headers, body[: len(body) + more], len(body) + more)
        exchange.end()

    def longer(exchange):
        status, headers, body = exchange.ask()
        exchange.answer(status, headers, body, len(body) + more)
        exchange.end()

    return longer if more > 0 else fault


def flips(exchange):
    """One bit in the middle of the body is another one."""
    status, headers, body = exchange.ask()
    body = bytearray(body)
    body[len(body) // 2] ^= 4
    exchange.answer(status, headers, bytes(body))


def without(name, fault=lambda exchange: exchange.answer(*exchange.ask())):
    """The fault, where the answer of the server lacks a header."""

    def lacks(exchange):
        ask = exchange.ask

        def stripped():
            status, headers, body = ask()
            return status, [header for header in headers if header[0].lower() != name.lower()], body

        exchange.ask = stripped
        fault(exchange)

    return lacks


class Harm:
    """A fault, and the requests that have it."""

    def __init__(self, fault, method, name, times, each):
        self._fault, self._method, self._name, self._times, self._each = fault, method, name, times, each
        self.hit = []

    def takes(self, exchange):
        """The fault, if this request is to have it."""
        if self._method not in (None, exchange.method) or not re.search(self._name, exchange.name):
            return None
        # In lists, too, what a request is about does not change when it is sent again.
        what = (exchange.method, exchange.path)
        before = self.hit.count(what) if self._each else len(self.hit)
        if self._times is not None and before >= self._times:
            return None
        self.hit.append(what)
        return self._fault


class Way:
    """A proxy in front of an S3 server. What is asked of it passes on, unless there is `harm`. `within` calls with the address
    to listen at, where that is not to be a port of this host."""

    def __init__(self, server, within=lambda call: call("127.0.0.1")):
        self.seen = []
        self._harms, self._lock = [], threading.Lock()
        way = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self):
                # A client may go away at any time.
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def exchange(self):
                exchange = Exchange(server, self)
                way.fault_for(exchange)(exchange)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = exchange

            def log_message(self, *_):
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 128

        self._listener = within(lambda host: Listener((host, 0), Handler))
        self.url = "http://%s:%d" % self._listener.server_address
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def fault_for(self, exchange):
        """What is done with a request."""
        with self._lock:
            self.seen.append((exchange.method, exchange.name))
            if f"Credential={KEY_ID}/" not in exchange.headers.get("authorization", ""):
                return refuses(403, "InvalidAccessKeyId", "The key ID you provided does not exist in our records.")
            for harm in self._harms:
                if fault := harm.takes(exchange):
                    return fault
        return lambda exchange: exchange.answer(*exchange.ask())

    def harm(self, fault, method=None, name="", times=None, each=False):
        """From now on requests of this method, with names that match, have a fault: all, or the first `times` of them.
        With `each`, that is the number for each object."""
        harm = Harm(fault, method, name, times, each)
        with self._lock:
            self._harms.append(harm)
        return harm

    def heal(self):
        """No request has a fault any more."""
        with self._lock:
            self._harms.clear()

    def count(self, method, name):
        """How many requests of this method there were, of names that match."""
        with self._lock:
            return sum(of == method and bool(re.search(name, named)) for of, named in self.seen)

    def close(self):
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()


class Bucket:
    """A bucket of its own for a test, and the way to it."""

    def __init__(self, server, name, way=None):
        self._server, self.name = server, name
        status, _, body = server.ask("PUT", f"/{name}")
        assert status == 200, body
        self.way = way or Way(server)
        self.url = f"s3://{name}/jobs/m"

    def environment(self):
        """What gradfs finds it by."""
        return {
            "AWS_ENDPOINT_URL": self.way.url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def objects(self):
        """The names of all objects."""
        status, _, body = self._server.ask("GET", f"/{self.name}?list-type=2")
        assert status == 200 and b"<IsTruncated>true" not in body, body
        return re.findall(r"<Key>(.*?)</Key>", body.decode())

    def uploads(self):
        """The names of objects that have begun to come in parts."""
        status, _, body = self._server.ask("GET", f"/{self.name}?uploads")
        assert status == 200, body
        return re.findall(r"<Key>(.*?)</Key>", body.decode())
