"""How the devices of allreduce_conv_mix share memory, as a state machine without any GPU.

Every device r goes through the same steps in every call. Between calls XLA may use the memory of
the summand and of the semaphore for anything.

  write   the kernel before this one puts r's summand into r's buffer
  clear   XLA zeroes r's semaphore
  arrive  XLA's barrier in front of the kernel: r has come this far
  leave   … and goes on when every device has
  read p  r reads the buffer of device p, once for each p, itself included
  tell p  r adds 1 to the semaphore of device p, once for each p
  wait    until every device has told r; takes that many off r's semaphore
  reuse   r's call is over: XLA writes something else over the buffer and the semaphore

There are two barriers. The first (arrive, leave) says that all summands and semaphores are ready to
be read and told, the second (tell, wait) that all have been read, so that they may be reused. The
time for the second passes while conv_mix computes. Steps of a device happen in this order as seen
from the others: XLA's steps and ours are kernels of one stream, `tell` releases and `wait` acquires
at system scope.

`explore` runs through all interleavings.
"""

from collections.abc import Iterator

STEPS = ("write", "clear", "arrive", "leave", "read", "tell", "wait", "reuse")
GARBAGE = -1

Program = tuple[tuple[str, int], ...]
# For each device: steps done, what lies in its buffer, its semaphore, its arrivals at the barrier.
State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ProtocolError(Exception):
    """An interleaving that reads a wrong summand, waits for ever or leaves a semaphore raised."""


def program(ranks: int, calls: int, steps: tuple[str, ...] = STEPS) -> Program:
    """Returns the steps of each device, `read` and `tell` with the device that they concern."""
    once = [(s, p) for s in steps for p in (range(ranks) if s in ("read", "tell") else (-1,))]
    return tuple(once) * calls


def explore(ranks: int, calls: int, steps: tuple[str, ...] = STEPS) -> int:
    """Runs through all interleavings of `ranks` devices in `calls` calls; returns their states.

    Raises:
      ProtocolError: there is one that goes wrong.
    """
    todo = program(ranks, calls, steps)
    first = ((0,) * ranks, (GARBAGE,) * ranks, (ranks,) * ranks, (0,) * ranks)
    seen, frontier = {first}, [first]
    while frontier:
        state = frontier.pop()
        following = list(_following(state, todo, len(todo) // calls))
        if not following and any(done < len(todo) for done in state[0]):
            raise ProtocolError(f"every device waits: {state}")
        frontier += (new := set(following) - seen)
        seen |= new
    return len(seen)


def _following(state: State, todo: Program, per_call: int) -> Iterator[State]:
    """Yields what comes of each device's next step, unless it has to wait."""
    done, buffers, semaphores, arrivals = state
    ranks = len(done)
    for r in range(ranks):
        if done[r] == len(todo):
            continue
        (step, p), call = todo[done[r]], done[r] // per_call
        buffer, semaphore, arrival = list(buffers), list(semaphores), list(arrivals)
        match step:
            case "write":
                buffer[r] = call
            case "clear":
                semaphore[r] = 0
            case "arrive":
                arrival[r] += 1
            case "leave":
                if min(arrivals) <= call:
                    continue
            case "read":
                if buffers[p] != call:
                    raise ProtocolError(f"device {r} reads {buffers[p]} of {p} in call {call}")
            case "tell":
                semaphore[p] += 1
            case "wait":
                if semaphores[r] < ranks:
                    continue
                semaphore[r] -= ranks
                if semaphore[r]:
                    raise ProtocolError(f"device {r} was told too often in call {call}")
            case "reuse":
                buffer[r], semaphore[r] = GARBAGE, ranks  # the worst: all seem to have told
        next_done = (*done[:r], done[r] + 1, *done[r + 1 :])
        yield next_done, tuple(buffer), tuple(semaphore), tuple(arrival)
