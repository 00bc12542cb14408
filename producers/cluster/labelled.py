"""Nodes and namespaces: objects that are known by name, and of which only labels matter.

In: names and labels, deletions, full lists. Out: what changed.
State: the labels by name. All of it is pure.
"""

from collections.abc import Iterator


class Labelled:
    """Objects by name, with their labels."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[str, str]] = {}
        self._unseen: dict[str, None] | None = None

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __contains__(self, name: str) -> bool:
        return name in self._labels

    def get(self, name: str) -> dict[str, str] | None:
        """The labels of the object of that name."""
        return self._labels.get(name)

    def begin(self) -> None:
        """A full list begins."""
        self._unseen = dict.fromkeys(self._labels)

    def seen(self, name: str) -> None:
        """A full list has the object."""
        if self._unseen is not None:
            self._unseen.pop(name, None)

    def missing(self) -> list[str]:
        """The full list is over: the names that it did not have."""
        missing, self._unseen = self._unseen or {}, None
        return list(missing)

    def put(self, name: str, labels: dict[str, str]) -> bool:
        """An object as it is now; gives whether it is new or has other labels."""
        self.seen(name)
        changed = self._labels.get(name) != labels
        self._labels[name] = labels
        return changed

    def remove(self, name: str) -> bool:
        """An object is gone; gives whether it was there."""
        return self._labels.pop(name, None) is not None
