"""Which of many waiting items is next: tenants in turn, and within each tenant its clients in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from wds_async.chunkcache.origin import Client

__all__ = ["Rotation"]

T = TypeVar("T")


class Rotation(Generic[T]):
    """A queue for each client; `pop` takes the first item of the client whose turn it is. Then that client goes to the
    end of its tenant's clients, and its tenant to the end of the tenants."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[Client, deque[T]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, client: Client, item: T) -> None:
        """Append to the queue of ``client``; a tenant or client without a queue goes to the end."""
        self._tenants.setdefault(client.tenant, OrderedDict()).setdefault(client, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """Remove and return the next item. LookupError where nothing waits."""
        item = self.pop_if(lambda _: True)
        if item is None:
            raise LookupError("nothing waits")
        return item

    def pop_if(self, may: Callable[[T], bool]) -> T | None:
        """Remove and return the next item that ``may`` go, of those that are first in their client's queue; None where
        there is none. Those before it keep their places."""
        for tenant, queues in self._tenants.items():
            for client, queue in queues.items():
                if may(queue[0]):
                    item = queue.popleft()
                    queues.move_to_end(client)
                    self._tenants.move_to_end(tenant)
                    self._taken(client, queue)
                    return item
        return None

    def remove(self, client: Client, item: T) -> bool:
        """Take ``item`` out before its turn; False where it does not wait (any more)."""
        queue = self._tenants.get(client.tenant, OrderedDict()).get(client)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        self._taken(client, queue)
        return True

    def _taken(self, client: Client, queue: deque[T]) -> None:
        """Count an item less, and drop what is empty."""
        self._count -= 1
        if not queue:
            queues = self._tenants[client.tenant]
            del queues[client]
            if not queues:
                del self._tenants[client.tenant]
