"""Ports of 127.0.0.1 that stay a test's own, also while the process that listened there is dead."""

import itertools
import os
import random
import re
import socket

# Below what the system gives to sockets that ask for any port (/proc/sys/net/ipv4/ip_local_port_range).
FIRST, AFTER = 10_000, 32_768
# Each worker of pytest has its own.
SHARES = 64
_SHARE = (AFTER - FIRST) // SHARES
_WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % SHARES
_START = random.SystemRandom().randrange(_SHARE)
_ports = (FIRST + _WORKER * _SHARE + (_START + step) % _SHARE for step in itertools.count())


def free_address():
    """One at which nobody listens, and which no connection of this host is given."""
    for port in itertools.islice(_ports, _SHARE):
        with socket.socket() as probe:
            # A connection that has ended there is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{port}"
    raise AssertionError(f"all {_SHARE} ports of worker {_WORKER} are taken")
