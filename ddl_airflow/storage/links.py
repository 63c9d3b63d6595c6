"""Under which name what is in a folder counts, where links in it give it several."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path


class Names:
    """Of what is at certain places in a folder, or is given one by a link, each has one name.

    Its own, if that is such a place. Else that of a link to it, or to a folder around it: one at
    the top before one in a folder, then one that is called as what it leads to, then the first.

    Args:
        root: the folder.
        place: what the keys of these places are, of at most two names.
    """

    def __init__(self, root: Path, place: re.Pattern[str]) -> None:
        self._root, self._place = root, place

    @cached_property
    def _real_root(self) -> Path:
        return Path(os.path.realpath(self._root))

    def holds(self, real: Path) -> bool:
        """Whether it is in the folder."""
        return real.is_relative_to(self._real_root)

    def of(self, real: Path) -> str | None:
        """The key of what is in the folder; None: neither it nor what is around it is at a place.

        Args:
            real: where it is, without links.
        """
        own = real.relative_to(self._real_root).as_posix()
        if self._is_at_place(own):
            return own
        return self._by(self._links_at_top, real) or self._by(self._links_in_folders, real)

    def _by(self, links: dict[Path, Path], real: Path) -> str | None:
        for folder in (*reversed(real.parents), real):
            if folder in links:
                name = (links[folder] / real.relative_to(folder)).as_posix()
                if self._is_at_place(name):
                    return name
        return None

    def _is_at_place(self, key: str) -> bool:
        """Or in what is there."""
        return self._place.fullmatch("/".join(key.split("/")[:2])) is not None

    @cached_property
    def _links_at_top(self) -> dict[Path, Path]:
        return self._links("*")

    @cached_property
    def _links_in_folders(self) -> dict[Path, Path]:
        return self._links("*/*")

    def _links(self, pattern: str) -> dict[Path, Path]:
        """By where they lead, those at places."""
        found: dict[Path, tuple[bool, Path]] = {}
        for link in self._root.glob(pattern):
            key = link.relative_to(self._root)
            if self._place.fullmatch(key.as_posix()) and link.is_symlink():
                real = Path(os.path.realpath(link))
                one = (link.name != real.name, key)
                found[real] = min(one, found.get(real, one))
        return {real: key for real, (_, key) in found.items()}
