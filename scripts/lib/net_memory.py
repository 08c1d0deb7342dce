"""Memory of a shard process by the number of learners, for scripts/bench-net.

What a connection takes by itself (heads, a buffer for payloads that are added) is fixed and counted out: it is
measured with learners that have joined and contributed once, less the same with a model of one block.
"""

from contextlib import ExitStack

import net_gradfs
from machine import MIB
from report import Figure

SIZE = 64 * MIB
BLOCK = 64 << 10
MANY = 32
STEPS = 4
