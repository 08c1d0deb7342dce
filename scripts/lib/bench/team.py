"""A team of worker processes that do the same thing at the same time, and say when.

A task is a function of a module. Every chosen member calls it with a `Member` first: its rank, a barrier that the chosen
share, and a place to keep things until the next task. Times are of CLOCK_MONOTONIC, which all processes share, so the
duration of a common step is the last end minus the first start.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import threading
import time
import traceback
from dataclasses import dataclass, field

from machine import Failed, Quiet
from programs import end_with_parent

BARRIER_DEADLINE = 300.0


@dataclass
class Member:
    """What a task knows of itself."""

    rank: int
    count: int
    barrier: object
    kept: dict = field(default_factory=dict)

    def meet(self):
        """Waits for the others."""
        self.barrier.wait(BARRIER_DEADLINE)


def _work(rank, pipe, barriers):
    # Ctrl-C is for the parent, which then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    kept = {}
    while True:
        try:
            function, count, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(Member(rank, count, barriers[count], kept), **arguments))
        except threading.BrokenBarrierError:
            # Another one failed, and says why; or it never came.
            answer = (False, None)
        except BaseException:  # whatever it is, the parent shows it
            barriers[count].abort()
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:
            break
    # Libraries that keep threads need not take them down in order.
    os._exit(0)


class Team:
    """`size` processes that wait for tasks, and end with `stack`."""

    def __init__(self, stack, size):
        # Libraries should not start more threads than a worker has use for.
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("spawn")
        # Kept, for a barrier goes away with its last owner, and the workers are slow to start.
        self.barriers = {count: context.Barrier(count) for count in range(1, size + 1)}
        self.pipes, self.processes = [], []
        stack.callback(self.end)
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_work, args=(rank, theirs, self.barriers), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)

    def run(self, function, count, deadline, **arguments):
        """Has the first `count` members call `function`; gives their results in order of rank."""
        pipes = self.pipes[:count]
        for pipe in pipes:
            pipe.send((function, count, arguments))
        results, broken = {}, []
        give_up = time.monotonic() + deadline
        while len(results) < count:
            waiting = [pipe for pipe in pipes if pipe not in results]
            ready = multiprocessing.connection.wait(waiting, max(0, give_up - time.monotonic()))
            if not ready:
                ranks = [pipes.index(pipe) for pipe in waiting]
                raise Failed(f"{function.__name__}: no answer of worker {ranks} after {deadline:.0f} s")
            for pipe in ready:
                try:
                    good, value = pipe.recv()
                except (EOFError, ConnectionError) as error:
                    raise Failed(f"{function.__name__}: worker {pipes.index(pipe)} died") from error
                if not good and value:
                    raise Failed(f"{function.__name__}, worker {pipes.index(pipe)}:\n{value}")
                broken += [] if good else [pipes.index(pipe)]
                results[pipe] = value
        if broken:
            raise Failed(f"{function.__name__}: workers {broken} waited for the others in vain")
        return [results[pipe] for pipe in pipes]


def durations(results, name):
    """Seconds of each common step of contender `name`, from what the members noted."""
    steps = zip(*(result[name] for result in results))
    return [max(end for _, end in step) - min(start for start, _ in step) for step in steps]


def median(results, name):
    return statistics.median(durations(results, name))


class Contender:
    """What a race is between: `prepare()`, which is not timed, `step()`, which is, and `check(steps)`, which raises unless
    everything is as it must be after so many steps."""

    def prepare(self):
        """Nothing to do."""


def race(member, contenders, rounds, warm_up, patience, alternate=False):
    """Every Contender's step in turn, round after round: {name: [(start, end), …]}. `alternate` turns their order round."""
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
