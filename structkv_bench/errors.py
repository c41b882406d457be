"""The one exception that stands for a user's mistake, and the one line that tells of any other."""


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
