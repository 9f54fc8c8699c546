"""The tokens of a run's service: invitations, by which one worker each registers, and what registered workers show then.

Only the SHA-256 of a token is kept. No clock is read here: whoever calls says what time it is.
"""

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

LONGEST_VALID_S = 3600.0
_ID_BYTES, _SECRET_BYTES = 4, 32


@dataclass
class Invitation:
    """A token that admits one worker, once.

    Attributes:
        id: What the owner calls it, to revoke it.
        expires: On the clock of the caller.
        used_by: The number of the worker that registered with it.
    """

    id: str
    expires: float
    used_by: int | None = None
    is_revoked: bool = False

    def problem(self, now: float) -> str:
        """Return why the token is not accepted; empty if it is."""
        if self.is_revoked:
            return "this token has been revoked"
        if self.used_by is not None:
            return "this token has been used already"
        return "this token has expired" if now >= self.expires else ""


@dataclass(frozen=True)
class WorkerToken:
    """What a registered worker shows: its number and the incarnation that it was given with it."""

    number: int
    incarnation: int


@dataclass
class Tokens:
    """All tokens of a run. The caller makes sure that one thread at a time uses it."""

    _invitations: dict[str, Invitation] = field(default_factory=dict)
    _workers: dict[str, WorkerToken] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # by number, the incarnation of the newest token

    def invite(self, valid_s: float, now: float) -> tuple[Invitation, str]:
        """Make an invitation and its token, which nobody can read back later.

        Raises:
            ValueError: It would be valid for less than a second or more than an hour.
        """
        if not 1.0 <= valid_s <= LONGEST_VALID_S:
            raise ValueError(f"an invitation is valid for 1 to {LONGEST_VALID_S:.0f} seconds")
        invitation, token = Invitation(secrets.token_hex(_ID_BYTES), now + valid_s), _new_token()
        self._invitations[_digest(token)] = invitation
        return invitation, token

    def revoke(self, identifier: str) -> Invitation | None:
        """Revoke an invitation; returns None if there is none with this id."""
        found = next((one for one in self._invitations.values() if one.id == identifier), None)
        if found is not None:
            found.is_revoked = True
        return found

    def give(self, number: int, incarnation: int) -> str:
        """Make the token of a worker that has registered; earlier tokens of the worker show that they are fenced."""
        token = _new_token()
        self._workers[_digest(token)] = WorkerToken(number, incarnation)
        self.newest[number] = incarnation
        return token

    def find(self, token: str) -> Invitation | WorkerToken | None:
        """Return whose token it is. A dictionary of digests leaks nothing about tokens through the time of a look-up."""
        digest = _digest(token)
        return self._workers.get(digest) or self._invitations.get(digest)

    def invitations(self, now: float) -> list[dict[str, Any]]:
        """Return all invitations as JSON, the newest last."""
        return [
            {
                "id": one.id,
                "expires_in_s": round(max(0.0, one.expires - now), 1),
                "used_by": one.used_by,
                "is_valid": not one.problem(now),
            }
            for one in self._invitations.values()
        ]


def _new_token() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
