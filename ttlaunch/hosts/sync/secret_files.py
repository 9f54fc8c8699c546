"""Which files look as if they held a password, a token or a private key; such files stay on the launching machine.

Three rules decide: names that secrets usually have; for some names, also the file's content; and a private key anywhere in
any file.
"""

import contextlib
import re
from collections.abc import Iterator

from ttlaunch.quick_pattern import quick_pattern
from ttlaunch.records.regular_files import open_regular

_EXAMPLE = quick_pattern(rb"(.*[._-])?(example|sample|template|tmpl|dist)([._-].*)?")
"""Names of files that show what a secret file looks like; they are sent unless a private key is in them."""

_NAMES = quick_pattern(
    rb"""
    .*\.env | \.env\..* | \.envrc
    | [._]netrc | \.pgpass | \.my\.cnf | \.mylogin\.cnf | \.htpasswd | \.dockercfg | \.git-credentials | \.s3cfg | \.boto
    | \.vault-token | \.databrickscfg | rclone\.conf | credentials | (.*\.)?kubeconfig(\.ya?ml)? | kaggle\.json
    | \.secrets? | (.*[._-])? secrets? \.(ya?ml|json|toml|ini|cfg|conf|txt|properties)
    | client_secret.*\.json | application_default_credentials\.json
    | (id_(rsa|dsa|ecdsa|ed25519)(_sk)? ([_-][\w-]+)? | ssh_host_\w+_key | (.*[._-])? (deploy|ssh|private|signing)[_-]?key)
      (\.(bak|backup|old|orig|save|txt|pem|key|\d+))? ~?
    | .*\.(p12|pfx|jks|jceks|keystore|kdbx|ppk|agekey)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)

_FOLDERS = quick_pattern(
    rb"""
    /(?: \.ssh/(?!(?:.*/)?(?:known_hosts|authorized_keys|[^/]*\.pub)$) | \.gnupg/ | \.aws/ | \.azure/ | \.config/gcloud/
       | \.?huggingface/(?:stored_)?tokens?$ | \.docker/config\.json$ | \.kube/config$ | gh/hosts\.yml$ )
    """,
    re.VERBOSE | re.DOTALL,
)

# Secret only if the second stands in them; without it they are ordinary files.
_BY_CONTENT = (
    (quick_pattern(rb".*\.(pem|key)", re.DOTALL), quick_pattern(rb"PRIVATE KEY-----")),
    (quick_pattern(rb"\.npmrc|\.yarnrc(\.yml)?"), quick_pattern(rb"_authToken|AuthToken|_password|_auth\b")),
    (quick_pattern(rb"\.pypirc"), quick_pattern(rb"password")),
    (
        quick_pattern(rb"pip\.(conf|ini)|\.condarc|\.wgetrc|\.curlrc"),
        quick_pattern(rb"://[^/\s:@]*:[^/\s@]+@|password"),
    ),
    (quick_pattern(rb".*credential.*\.json", re.DOTALL), quick_pattern(rb"private_key|client_secret|refresh_token")),
    (quick_pattern(rb".*service.*account.*\.json", re.DOTALL), quick_pattern(rb"private_key")),
)
_PERHAPS = (b".pem", b".key", b"rc", b".yml", b".conf", b".ini", b".json")  # their endings, which are tested first
_PIECE = 1024 * 1024

_BEGIN = rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_BETWEEN = rb"(?:\\+[rn]|[\s\"'`+,()\\]){1,200}"
"""What stands between the first line of a key and the next one in a text of any kind: line ends, also written as `\\n`, and quotes."""
_BODY = rb"(?:M[A-P][A-Za-z0-9+/=]{14}|b3BlbnNzaC1rZXkt|Proc-Type:)"
"""How the next line begins: the DER of a sequence, OpenSSH's name of its format, or a header of an encrypted key."""
_PRIVATE_KEY = quick_pattern(
    rb"[\r\n][ \t]{0,100}%b[ \t]{0,100}[\r\n]"  # a line of its own, as in PEM, in OpenSSH's and in PGP's files
    rb"|[\"']%b(?:\\+r)?\\+n[A-Za-z0-9+/=]{16}"  # a string in which `\n` ends the line, as in JSON
    rb"|%b%b%b"  # a text in which more stands on the line, as `KEY = \"\"\"-----BEGIN …` in Python or `export KEY="…` in a script
    rb"|[\r\n]---- BEGIN SSH2 (?:ENCRYPTED )?PRIVATE KEY ----[ \t]{0,100}[\r\n]"
    % (_BEGIN, _BEGIN, _BEGIN, _BETWEEN, _BODY)
)
_MARK = b"PRIVATE KEY"
_OTHER_KEY = quick_pattern(rb"(?:\A|[\r\n])PuTTY-User-Key-File-[0-9]+: [!-~]+[\r\n]|\bAGE-SECRET-KEY-1[0-9A-Z]{50}")
_OTHER_MARKS = (b"PuTTY-User-Key-File-", b"AGE-SECRET-KEY-1")
"""What keys without the usual first line have. They are looked for in the first piece of a file only, as their files are small."""
_WIDE = (b"\xff\xfe", b"\xfe\xff")
"""How a text in UTF-16 begins, as Windows writes it; a search without the zero bytes finds a key in either byte order."""
_LONGEST = 1024
"""More bytes than a match of `_PRIVATE_KEY` has, so that one across two pieces of a file is found in the second."""


def looks_secret(path: bytes) -> bool:
    """Return whether a file looks like a secret by its absolute path and, for some names, by its beginning.

    A private key in it does not count here: `KeySearch` finds it. An unreadable file is reported elsewhere.
    """
    name = path[path.rfind(b"/") + 1 :]
    if _FOLDERS.search(path):
        return True
    if _NAMES.fullmatch(name):
        return not _EXAMPLE.fullmatch(name)
    if name.endswith(_PERHAPS):
        for names, content in _BY_CONTENT:
            if names.fullmatch(name):
                return bool(content.search(next(_pieces(path), b"")))
    return False


def has_private_key(text: bytes) -> bool:
    """Return whether a text contains a private key."""
    search = KeySearch()
    search.add(text)
    return search.found


class KeySearch:
    """Looks for a private key in the pieces of a file.

    Attributes:
        found: Whether the pieces so far contain a private key.
    """

    def __init__(self) -> None:
        self.found = False
        self._end = b"\n"
        self._is_first, self._is_wide = True, False

    def add(self, piece: bytes) -> None:
        """Look at the next piece."""
        if self.found:
            return
        if self._is_first:
            self._is_first, self._is_wide = False, piece.startswith(_WIDE)
            self.found = any(mark in piece for mark in _OTHER_MARKS) and bool(_OTHER_KEY.search(piece))
        if self._is_wide:
            piece = piece.replace(b"\0", b"")
        # The seam is searched by itself: joining every piece with the end of the former would copy the whole file.
        for part in (self._end + piece[:_LONGEST], piece):
            if _MARK in part and _PRIVATE_KEY.search(part):
                self.found = True
        self._end = (self._end + piece[-_LONGEST:])[-_LONGEST:]


def holds_private_key(path: bytes) -> bool:
    """Return whether a private key stands at any place of a regular file; a file that cannot be read holds none."""
    search = KeySearch()
    for piece in _pieces(path):
        search.add(piece)
    return search.found


def _pieces(path: bytes) -> Iterator[bytes]:
    """Yield the content of a regular file; nothing of any other, which could block or never end."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        while piece := file.read(_PIECE):
            yield piece
