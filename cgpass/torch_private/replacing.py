"""Functions of torch's that are replaced while something runs, in the thread that runs it."""

import functools
import threading
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""Called with the function that is replaced, and what that is called with."""


class Replaced:
    """Replaces an attribute as long as any thread is inside; only threads that are notice.

    The last one out puts back what was there: whichever order they come and go in.
    """

    def __init__(self, owner: Callable[[], Any], name: str, around: Around) -> None:
        """Replace nothing yet.

        Args:
            owner: Gives what has the attribute.
            name: The attribute's.
            around: What threads call that are inside.
        """
        self._owner = owner
        self._name = name
        self._around = around
        self._before: Any = None
        self._num_inside = 0
        self._lock = threading.Lock()
        self._here = threading.local()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                owner = self._owner()
                self._before = vars(owner)[self._name]
                setattr(owner, self._name, self._dispatching(getattr(owner, self._name)))
            self._num_inside += 1
        self._here.depth = getattr(self._here, "depth", 0) + 1

    def __exit__(self, *raised: object) -> None:
        self._here.depth -= 1
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                setattr(self._owner(), self._name, self._before)

    def _dispatching(self, fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "depth", 0):
                return self._around(fn, *args, **kwargs)
            return fn(*args, **kwargs)

        return staticmethod(call) if isinstance(self._before, staticmethod) else call
