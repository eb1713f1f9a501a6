"""Errors that a user can mend."""


class RunFailed(RuntimeError):
    """The run cannot continue, and not for a fault of the code: the message says why and what to do.

    The command line prints it without a traceback and exits with code 1.
    """


class InputError(ValueError):
    """The user's input is bad: recipe, data, model folder or reward function.

    The message is one clear line: what was given, what was expected, what to do. The command line
    prints it without a traceback and exits with code 2.
    """
