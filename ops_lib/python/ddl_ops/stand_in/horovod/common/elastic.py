"""State that ranks share, save and go back to. Imports no framework."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any


class State:
    """What a training is at.

    Args:
        bcast_object: gives an object of rank 0 to all ranks.
        get_rank: this rank's number.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """To be called when a training goes on after a restart, before its function is."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The training goes on after a restart."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Nothing: the launcher tells by a signal (see docs/coming-from-horovod.md)."""
        del timestamp, update_res

    def commit(self) -> None:
        """Saves, so that restore() and a restart of the job go on from here. All ranks."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Where all ranks end together, if one was asked to."""

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks rank 0's state, and saves it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses."""


class ObjectState(State):
    """Attributes of plain Python objects.

    Args:
        bcast_object: see State.
        get_rank: see State.
        kwargs: the attributes, with their first values.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Keeps copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Sets the attributes to what was kept."""
        self._set_attrs()

    def sync(self) -> None:
        """Gives all ranks rank 0's."""
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))
