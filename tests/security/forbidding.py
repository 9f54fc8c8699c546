"""A program that runs another one as in a container that does not let a process use the descriptors of its children.

python forbidding.py PROGRAM [ARGUMENT…]
"""

import ctypes
import errno
import os
import struct
import sys

PIDFD_GETFD = 438
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000


def forbid():
    """Have the kernel refuse the call for this process and its descendants."""
    steps = [(_LOAD, 0, 0, 0), (_IF_EQUAL, 0, 1, PIDFD_GETFD), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, program, 0, 0)):
        if library.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - no shell is wanted
