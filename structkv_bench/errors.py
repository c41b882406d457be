"""The one exception that stands for a user's mistake."""


class UserError(Exception):
    """Bad input: the message is one line that names what is wrong and what would be right.

    The command line prints it without a traceback and exits with code 2.
    """
