"""Runs saves, immediately or in the background, and reports their errors."""

import os
from collections.abc import Callable
from functools import partial
from typing import final

from colossal._src.checkpoint_io.background import Background
from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.content import Content, agree
from colossal._src.checkpoint_io.destination import Destination
from colossal._src.checkpoint_io.file_writers import FileWriter, run_save
from colossal._src.checkpoint_io.snapshot import Arenas

_LARGE_BYTES = 1 << 20  # a copy that counts when too many wait


@final
class SaveQueue:
    """Carries out saves in the order in which they were asked for."""

    def __init__(self, writers: CheckpointGroup) -> None:
        self._writers = writers
        self._background_group: CheckpointGroup | None = None
        self._background, self._arenas = Background(), Arenas()

    def save(
        self,
        collect_content: Callable[[], Content],
        make_writer: Callable[[Content, str], FileWriter],
        destination: Callable[[], Destination],
        use_async: bool,
    ) -> None:
        """Save something."""
        save_id = self._begin(self._background.check if use_async else self._background.drain)
        save, where = make_writer(agree(self._writers, collect_content), save_id), destination()
        if not use_async:
            run_save(save, self._writers, self._arenas, where)
            return
        large = save.total_size > _LARGE_BYTES
        self._background.make_room(large)
        give_back = save.copy(self._writers, self._arenas)
        self._background.submit(
            partial(run_save, save, self._get_background_group(), self._arenas, where), large, lastly=give_back
        )

    def after(self, job: Callable[[], None], use_async: bool, always: bool) -> None:
        """Do something on the first rank once everything saved so far is on the disk."""
        if use_async:
            self._begin(self._background.check)
            self._background.submit(partial(self._get_background_group().write, job), always=always)
        else:
            self.wait_until_saved()
            self._writers.write(job)

    def wait_until_saved(self) -> None:
        """Wait until everything that was saved is on the disk."""
        self._begin(self._background.drain)

    def _begin(self, collect_content: Callable[[], None]) -> str:
        """Raise the failures of earlier saves, on all ranks together; return an identifier that all agree on."""
        try:
            return self._writers.gather(lambda: collect_content() or os.urandom(8).hex())[0]
        except Exception:
            self._background.forget()
            raise

    def _get_background_group(self) -> CheckpointGroup:
        """Return the writers of the background, which all ranks make together when they are first needed."""
        self._background_group = self._background_group or self._writers.make_background_group()
        return self._background_group
