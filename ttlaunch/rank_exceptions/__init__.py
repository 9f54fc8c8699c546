"""What a rank records about its exceptions, so that the launcher can tell which rank failed first, and of what.

`describe.py` turns an exception into a record with its message, its place and its causes; `watch.py` looks for the exception that
the main thread is handling; `fate.py` tells whether that exception will end the process. Python 3.9 and the standard library only.
"""
