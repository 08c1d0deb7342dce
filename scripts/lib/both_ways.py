"""What a link does when bytes go both ways at once: the bare sockets of scripts/bench-stall.

`serve PORT BYTES` answers one client: it takes so many bytes, sends so many, or does both at once. `ask HOST PORT BYTES
ROUNDS` has it do each of these in turn, and prints one line of JSON with the seconds that each took.
"""

import json
import socket
import statistics
import sys
import threading
import time

CHUNK = 64 << 10
# Words of the client. The server answers whatever it has taken all of with one byte.
PUSH, PULL, BOTH = b"<", b">", b"="


def _take(connection, size):
    buffer = bytearray(CHUNK)
    while size > 0:
        got = connection.recv_into(buffer, min(size, CHUNK))
        if not got:
            raise ConnectionError("the peer has ended the connection")
        size -= got


def _at_once(connection, data):
    """Sends `data`, and takes as many bytes."""
    sending = threading.Thread(target=connection.sendall, args=(data,))
    sending.start()
    _take(connection, len(data))
    sending.join()


def serve(port, size):
    data = bytes(size)
    with socket.create_server(("", port)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            while word := connection.recv(1):
                if word == PUSH:
                    _take(connection, size)
                elif word == PULL:
                    connection.sendall(data)
                else:
                    _at_once(connection, data)
                connection.sendall(b".")


def ask(host, port, size, rounds):
    data, took = bytes(size), {"push": [], "pull": [], "both": []}
    with socket.create_connection((host, port)) as connection:
        for _ in range(rounds):
            for name, word in (("push", PUSH), ("pull", PULL), ("both", BOTH)):
                begin = time.monotonic()
                connection.sendall(word)
                if name == "push":
                    connection.sendall(data)
                elif name == "pull":
                    _take(connection, size)
                else:
                    _at_once(connection, data)
                _take(connection, 1)
                took[name].append(time.monotonic() - begin)
    print(json.dumps({name: statistics.median(times) for name, times in took.items()}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        ask(sys.argv[2], *map(int, sys.argv[3:]))
