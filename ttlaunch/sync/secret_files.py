"""Which files look as if they held a password, a token or a private key; such files stay on the launching machine."""

import fnmatch
import os
import re

_NAMES = {
    b".env",
    b".netrc",
    b"_netrc",
    b".pgpass",
    b".htpasswd",
    b".dockercfg",
    b".git-credentials",
    b"credentials",
    b"kubeconfig",
}
_PATTERNS = (b".env.*", b"*.p12", b"*.pfx", b"*.jks", b"*.keystore", b"*.kdbx", b"*.ppk")
_PRIVATE_KEY_NAMES = re.compile(rb"id_(rsa|dsa|ecdsa|ed25519|ecdsa_sk|ed25519_sk)\Z")
_SAMPLES = (b".example", b".sample", b".template", b".dist")

# Secret only if this stands in them; without it they are ordinary files.
_CONTENTS = {
    b"*.pem": re.compile(rb"PRIVATE KEY-----"),
    b"*.key": re.compile(rb"PRIVATE KEY-----"),
    b".npmrc": re.compile(rb"_authToken|_password|_auth\b"),
    b".pypirc": re.compile(rb"password"),
    b"*credential*.json": re.compile(rb"private_key|client_secret|refresh_token"),
    b"*service*account*.json": re.compile(rb"private_key"),
}
_READ = 65536


def looks_secret(path: bytes) -> bool:
    """Whether a file does, by its name and, for some names, by its beginning; unreadable ones are reported elsewhere."""
    name = os.path.basename(path)
    if name in _NAMES or _PRIVATE_KEY_NAMES.match(name):
        return True
    if name.endswith(_SAMPLES):
        return False
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS):
        return True
    for pattern, content in _CONTENTS.items():
        if fnmatch.fnmatchcase(name, pattern):
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
