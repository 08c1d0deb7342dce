"""What a worker does in a race: every contender's step in turn, round after round, timed.

A contender has `prepare()`, which is not timed, `step()`, which is, and `check(steps)`, which raises
unless everything is as it must be after that many steps.
"""

import time

from machine import Quiet


def race(member, contenders, rounds, warm_up, patience, alternate=False):
    """Gives {name: [(start, end), …]} for a dictionary of contenders; `alternate` turns their order round each time."""
    quiet = Quiet(patience) if member.rank == 0 and patience else None
    times = {name: [] for name in contenders}
    for turn in range(warm_up + rounds):
        order = list(contenders.items())
        for name, contender in reversed(order) if alternate and turn % 2 else order:
            contender.prepare()
            if quiet:
                quiet.wait()
            member.meet()
            start = time.monotonic()
            contender.step()
            end = time.monotonic()
            # Nobody goes on to what is not timed while another still is.
            member.meet()
            if turn >= warm_up:
                times[name].append((start, end))
            if turn in (0, warm_up + rounds - 1):
                contender.check(turn + 1)
    return times
