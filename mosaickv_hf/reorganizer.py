"""The background thread: work that goes on beside decoding, whose results are due at moments fixed in advance.

What the work is, and when it is due, is not decided here. Results do not depend on who did the work: the thread and
whoever asks first for a result run the same function with the same number of threads.
"""

import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

# Pieces of work that may wait for the thread; more are done when they are due.
_MOST_WAITING = 256
_JOIN_SECONDS = 10.0


class Ticket(Generic[T]):
    """A piece of work that is done once, by the background thread or, if that has not begun it, when it is due.

    Copies of a cache share their tickets.

    Args:
        work: is called without arguments; its result must not depend on the thread it runs in.
        threads: torch's threads for it.
    """

    def __init__(self, work: Callable[[], T], threads: int):
        self.work: Callable[[], T] | None = work
        self.outcome: T | None = None
        self.error: BaseException | None = None
        self._threads = threads
        self._lock = threading.Lock()
        self._process = os.getpid()

    @classmethod
    def of(cls, outcome: T) -> "Ticket[T]":
        """A ticket whose work is done already."""
        ticket = cls(lambda: outcome, 1)
        ticket.work, ticket.outcome = None, outcome
        return ticket

    def __deepcopy__(self, memo) -> "Ticket[T]":
        return self

    @property
    def done(self) -> bool:
        """Whether the work is finished and was successful."""
        return self.work is None

    def run(self) -> None:
        """Does the work if nobody has; waits if another thread is at it.

        Raises:
            BaseException: what the work raised; the ticket can then be run again.
        """
        if self._process != os.getpid():
            # A forked child has no other threads, and the lock may have been taken by one.
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            if self.work is None:
                return
            with _torch_threads(self._threads), torch.no_grad():
                self.outcome = self.work()
            self.work = self.error = None


class Reorganizer:
    """Runs tickets in a daemon thread of low priority, which starts with the first one and ends with this object.

    Args:
        threads: torch's threads for the work.
        background: whether there is a thread; without one, work is done when it is due, with the same results.

    Attributes:
        waits: times that a result was due and not there.
        wait_seconds: what that took, in seconds: waiting for the thread or doing the work in place.
    """

    def __init__(self, threads: int = 1, background: bool = True):
        self._threads, self._background = threads, background
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue | None = None
        self._finalizer: weakref.finalize | None = None
        self._warned = False
        self.waits = 0
        self.wait_seconds = 0.0

    def __deepcopy__(self, memo) -> "Reorganizer":
        return type(self)(self._threads, self._background)

    def __reduce__(self):
        raise TypeError("a MosaicKVCache cannot be pickled: it may have a thread at work; copy.deepcopy copies it")

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Work to be done until `result` is asked for."""
        ticket = Ticket(work, self._threads)
        if self._background:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            if self._queue.qsize() < _MOST_WAITING:
                # Weakly: nobody waits for the tickets of a cache that is gone.
                self._queue.put(weakref.ref(ticket))
        return ticket

    def result(self, ticket: Ticket[T]) -> T:
        """The work's result. If it failed in the background it is tried again here, with one warning.

        Raises:
            BaseException: what the work raises here.
        """
        if ticket.done:
            return ticket.outcome
        begin = time.perf_counter()
        outcome = self.finish(ticket)
        self.waits += 1
        self.wait_seconds += time.perf_counter() - begin
        return outcome

    def finish(self, ticket: Ticket[T]) -> T:
        """The work's result before it is due, otherwise as `result`."""
        if ticket.error is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"MosaicKVCache's background thread failed ({ticket.error!r}); its work is done in place",
                RuntimeWarning,
                stacklevel=2,
            )
        ticket.run()
        return ticket.outcome

    def close(self) -> None:
        """Ends the thread, after the piece of work it is at; a later `submit` starts another."""
        if self._finalizer is not None:
            self._finalizer()
            self._thread = self._queue = self._finalizer = None

    def _start(self) -> None:
        self.close()
        self._queue, stop = queue.SimpleQueue(), threading.Event()
        self._thread = threading.Thread(target=_serve, args=(self._queue, stop), name="mosaickv", daemon=True)
        self._thread.start()
        # Also at interpreter exit, where a thread amid torch's work would crash.
        self._finalizer = weakref.finalize(self, _stop, self._queue, stop, self._thread)


def _serve(waiting: queue.SimpleQueue, stop: threading.Event) -> None:
    with contextlib.suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    while True:
        reference = waiting.get()
        ticket = None if reference is None else reference()
        if stop.is_set():
            return
        if ticket is None:
            continue
        try:
            ticket.run()
        except Exception as error:  # reaches the user when the result is due
            ticket.error = error
        ticket = None  # not held while waiting for the next


def _stop(waiting: queue.SimpleQueue, stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    waiting.put(None)
    # The last reference may have gone in the thread itself.
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Torch's number of threads in this thread: sums, and so results, depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
