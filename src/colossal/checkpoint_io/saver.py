"""When a save is carried out: at once, or in the background; and who hears of its errors."""

import os
from collections.abc import Callable
from functools import partial
from typing import final

from colossal.checkpoint_io.background import Background
from colossal.checkpoint_io.content import Content, agree
from colossal.checkpoint_io.destination import Destination
from colossal.checkpoint_io.save import Save, carry_out
from colossal.checkpoint_io.snapshot import Arenas
from colossal.checkpoint_io.writers import Writers

_LARGE_BYTES = 1 << 20  # a copy that counts when too many wait


@final
class Saver:
    """Carries out saves in the order in which they were asked for."""

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self._aside: Writers | None = None
        self._background, self._arenas = Background(), Arenas()

    def save(
        self,
        look: Callable[[], Content],
        build: Callable[[Content, str], Save],
        destination: Callable[[], Destination],
        use_async: bool,
    ) -> None:
        """Save something."""
        save_id = self._begin(self._background.check if use_async else self._background.drain)
        save, where = build(agree(self._writers, look), save_id), destination()
        if not use_async:
            carry_out(save, self._writers, self._arenas, where)
            return
        large = save.total_size > _LARGE_BYTES
        self._background.make_room(large)
        give_back = save.copy(self._writers, self._arenas)
        self._background.submit(partial(carry_out, save, self._beside(), self._arenas, where), large, lastly=give_back)

    def after(self, job: Callable[[], None], use_async: bool, always: bool) -> None:
        """Do something on the first rank once everything saved so far is on the disk."""
        if use_async:
            self._begin(self._background.check)
            self._background.submit(partial(self._beside().write, job), always=always)
        else:
            self.settle()
            self._writers.write(job)

    def settle(self) -> None:
        """Wait until everything that was saved is on the disk."""
        self._begin(self._background.drain)

    def _begin(self, look: Callable[[], None]) -> str:
        """Raise the failures of earlier saves, on all ranks together; return an identifier that all agree on."""
        try:
            return self._writers.gather(lambda: look() or os.urandom(8).hex())[0]
        except Exception:
            self._background.forget()
            raise

    def _beside(self) -> Writers:
        """Return the writers of the background, which all ranks make together when they are first needed."""
        self._aside = self._aside or self._writers.aside()
        return self._aside
