"""Which files look as if they held a password, a token or a private key; such files stay on the launching machine."""

import os
import re

_ALWAYS = re.compile(
    rb"""
    \.env(\..*)?(?<!\.example)(?<!\.sample)(?<!\.template)(?<!\.dist)
    | [._]netrc | \.pgpass | \.htpasswd | \.dockercfg | \.git-credentials | credentials | kubeconfig
    | id_(rsa|dsa|ecdsa|ed25519|ecdsa_sk|ed25519_sk)
    | .*\.(p12|pfx|jks|keystore|kdbx|ppk)
    """,
    re.VERBOSE | re.DOTALL,
)

# Secret only if the second stands in them; without it they are ordinary files.
_BY_CONTENT = (
    (re.compile(rb".*\.(pem|key)", re.DOTALL), re.compile(rb"PRIVATE KEY-----")),
    (re.compile(rb"\.npmrc"), re.compile(rb"_authToken|_password|_auth\b")),
    (re.compile(rb"\.pypirc"), re.compile(rb"password")),
    (re.compile(rb".*credential.*\.json", re.DOTALL), re.compile(rb"private_key|client_secret|refresh_token")),
    (re.compile(rb".*service.*account.*\.json", re.DOTALL), re.compile(rb"private_key")),
)
_PERHAPS = (b".pem", b".key", b"rc", b".json")  # how the names of those end; saves time where there are many files
_READ = 65536


def looks_secret(path: bytes) -> bool:
    """Whether a file looks like a secret, by its name and, for some names, by its beginning; unreadable ones are reported elsewhere."""
    name = path[path.rfind(b"/") + 1 :]
    if _ALWAYS.fullmatch(name):
        return True
    if name.endswith(_PERHAPS):
        for names, content in _BY_CONTENT:
            if names.fullmatch(name):
                return bool(content.search(_beginning(path)))
    return False


def _beginning(path: bytes) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _READ)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
