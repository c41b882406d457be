"""The one exception that stands for a user's mistake, and the one line that tells of any other."""

import difflib
from collections.abc import Collection


class UserError(Exception):
    """Bad input: the message is one line that names what is wrong and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """


def one_line(error: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(error).split())


def kind_and_line(error: Exception) -> str:
    """An exception of another library in one line of readable length, its class first."""
    return one_line(f"{type(error).__name__}: {error}")[:200]


def offer(given: str, valid: Collection[str]) -> str:
    """The valid names, and the one that was perhaps meant."""
    near = difflib.get_close_matches(given, list(valid), 1)
    return f"choose one of {', '.join(valid)}" + (f"; did you mean {near[0]}?" if near else "")
