"""The words of the system for an error, as every message has them. It imports nothing, so that whoever reads files can."""


def system_reason(error: Exception) -> str:
    """Return why the system refused something, in lower case, as it stands within a sentence.

    An exception that is not the system's has words of its own, which are kept as they are.

    >>> system_reason(FileNotFoundError(2, "No such file or directory", "hosts.txt"))
    'no such file or directory'
    """
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
