"""Ticket: how the sender and the receiver of a shown message keep step; pure.

Words in the sender's shared memory, each written by one of them:

    READY    sender    the data have been computed
    FILLED   sender    so many slots it has filled with them, if the receiver has asked for that
    ASKED    receiver  it cannot reach the array itself, and wants slots
    TAKEN    receiver  so many of them it has emptied; OVER, see taking.py: the message needs nothing any more

After OVER the words are the sender's, and serve the next message.
"""

from __future__ import annotations

from collections.abc import Callable

READY, FILLED, ASKED, TAKEN = range(4)
WORDS = 4
FAILED = OVER = -1


class Ticket:
    """The words of one message.

    Args:
        fence: None where the processor orders memory accesses.

    Attributes:
        words: WORDS of them.
        fence: orders memory accesses.
    """

    def __init__(self, words: memoryview, fence: Callable[[], object] | None = None) -> None:
        self.words = words
        self.fence = fence or _nothing

    # ------------------------------------------------------------------ the sender's

    def reset(self) -> None:
        """Before anybody else knows of it: for a new message."""
        for word in range(WORDS):
            self.words[word] = 0

    def tell_ready(self) -> None:
        """The array may be read."""
        self._tell(READY, 1)

    def tell_filled(self, slots: int) -> None:
        """So many of them so far."""
        self._tell(FILLED, slots)

    def tell_failed(self) -> None:
        """The data will not come; the receiver still looks at the words."""
        self._tell(FILLED, FAILED)
        self._tell(READY, FAILED)

    def is_asked(self) -> bool:
        """Whether slots are to be filled."""
        return self._look(ASKED) != 0

    def taken(self) -> int:
        """How many of them the receiver has emptied."""
        return self._look(TAKEN)

    def is_over(self) -> bool:
        """Whether the receiver needs neither the array nor the words any more."""
        return self._look(TAKEN) == OVER

    # ------------------------------------------------------------------ the receiver's

    def ready(self) -> int:
        """1 when the array may be read; FAILED if it never will."""
        return self._look(READY)

    def ask(self) -> None:
        """Have slots filled."""
        self._tell(ASKED, 1)

    def filled(self) -> int:
        """How many of them so far; FAILED if there will be no more."""
        return self._look(FILLED)

    def tell_taken(self, slots: int) -> None:
        """So many of them so far."""
        self._tell(TAKEN, slots)

    def _tell(self, word: int, value: int) -> None:
        self.fence()
        self.words[word] = value

    def _look(self, word: int) -> int:
        value: int = self.words[word]
        self.fence()
        return value


def _nothing() -> None:
    return None
