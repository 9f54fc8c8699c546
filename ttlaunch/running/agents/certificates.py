"""Certificates by which the ranks of one run know each other across hosts; their authority lives as long as the run.

The private key of the authority is in no file and is forgotten when all certificates are made, so nobody can join the ranks later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_BEFORE = timedelta(days=2)  # clocks of hosts may be behind
_LONGEST_RUN = timedelta(days=400)


@dataclass(frozen=True)
class HostCertificate:
    """What the ranks of one host prove with who they are, as PEM.

    Attributes:
        authority: The certificate of the run's authority.
        own: The certificate of the host for the names of its ranks.
        key: Its private key.
    """

    authority: str
    own: str
    key: str = field(repr=False)


def make_certificates(names: Mapping[str, Iterable[str]]) -> dict[str, HostCertificate]:
    """Make an authority, and a certificate of it for each host.

    Args:
        names: By host, the names that its certificate is for.

    Cost: about 1 ms for each host.
    """
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    authority = _named("authority of a run")

    def make(owner: ec.EllipticCurvePrivateKey, subject: x509.Name, *, its: Iterable[str] | None) -> str:
        builder = x509.CertificateBuilder(
            issuer_name=authority,
            subject_name=subject,
            public_key=owner.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _BEFORE,
            not_valid_after=now + _LONGEST_RUN,
        )
        constraints = x509.BasicConstraints(ca=its is None, path_length=0 if its is None else None)
        builder = builder.add_extension(constraints, critical=True)
        if its is not None:
            alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in its])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    own_certificate = make(key, authority, its=None)
    found = {}
    for host, its in names.items():
        private = ec.generate_private_key(ec.SECP256R1())
        text = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        found[host] = HostCertificate(own_certificate, make(private, _named("host of a run"), its=its), text.decode())
    return found


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
