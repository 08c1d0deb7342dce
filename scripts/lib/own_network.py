"""A network namespace of one's own with loopback up, for programs that would otherwise have this machine's settings.

The congestion control that a machine uses by default may cost loopback TCP half its speed (BBR does), and a program that
does not choose one for its sockets has the one of its namespace.
"""

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNET = 0x4000_0000
SIOCSIFFLAGS = 0x8914
IFF_UP_RUNNING = 0x1 | 0x40
_libc = ctypes.CDLL(None, use_errno=True)


def move():
    """Moves this process to a new one with Reno; False where that is not permitted."""
    if _libc.unshare(CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
    with open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as setting:
        setting.write("reno")
    return True


def join(pid):
    """Moves this process to that of another one."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if _libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
