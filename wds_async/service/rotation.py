"""Who is next among many that wait: one of each in turn, however many of one there are."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Rotation"]

T = TypeVar("T")


class Rotation(Generic[T]):
    """A queue for each name; `pop` takes the first of the name whose turn it is, which then goes to the end."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, name: str, item: T) -> None:
        """Behind the others of its name; a name that has none waiting goes to the end."""
        self._queues.setdefault(name, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """The next. LookupError where nothing waits."""
        item = self.pop_if(lambda _: True)
        if item is None:
            raise LookupError("nothing waits")
        return item

    def pop_if(self, may: Callable[[T], bool]) -> T | None:
        """The next whose name's first ``may`` go; the names before it keep their places. None where there is none."""
        name = next((name for name, queue in self._queues.items() if may(queue[0])), None)
        if name is None:
            return None
        queue = self._queues.pop(name)
        item = queue.popleft()
        self._count -= 1
        if queue:
            self._queues[name] = queue
        return item

    def remove(self, name: str, item: T) -> bool:
        """Take ``item`` out before its turn; False where it does not wait (any more)."""
        queue = self._queues.get(name)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        self._count -= 1
        if not queue:
            del self._queues[name]
        return True
