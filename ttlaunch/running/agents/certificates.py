"""Certificates by which the ranks of one run know each other across hosts; their authority lives as long as the run.

The private key of the authority is in no file. A run that nobody can join forgets it when all certificates are made.
"""

import contextlib
import hashlib
import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ttlaunch.quick_dataclass import dataclass

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


class Authority:
    """The certificate authority of one run; about 1 ms for each certificate."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = self._make(self._key.public_key(), _NAME_OF_AUTHORITY, its=None)
        self.certificate = _pem(self._own)

    @property
    def sha256(self) -> str:
        """The SHA-256 of its own certificate, by which an invitation names it."""
        return fingerprint_of(self.certificate)

    def issue(self, names: Iterable[str]) -> HostCertificate:
        """Make a key and its certificate for these names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        return HostCertificate(
            self.certificate, _pem(self._make(key.public_key(), _NAME_OF_HOST, its=names)), key_pem(key)
        )

    def sign(self, request: str, name: str) -> str:
        """Return a certificate (PEM) for the key of a request and for `name` alone, whatever names the request has.

        Raises:
            ValueError: This is no request, its signature is wrong, or its key is not one of the kind that the run uses.
        """
        try:
            found = x509.load_pem_x509_csr(request.encode())
            key = found.public_key()
            is_right = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
            if not is_right or not found.is_signature_valid:
                raise ValueError("it is not signed by a key of the curve P-256")
        except UnsupportedAlgorithm as error:
            raise ValueError("its key is of an unknown kind") from error
        assert isinstance(key, ec.EllipticCurvePublicKey)  # noqa: S101 - as checked above
        return _pem(self._make(key, _NAME_OF_HOST, its=[name]))

    def _make(
        self, key: ec.EllipticCurvePublicKey, subject: x509.Name, *, its: Iterable[str] | None
    ) -> x509.Certificate:
        """Sign a certificate; `its` are its names, None for the authority's own."""
        now = datetime.now(UTC)
        is_authority = its is None
        builder = x509.CertificateBuilder(
            issuer_name=_NAME_OF_AUTHORITY,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _BEFORE,
            not_valid_after=now + _LONGEST_RUN,
        )
        constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
        builder = builder.add_extension(constraints, critical=True)
        # Without the next two, strict checks of Python 3.13 refuse a chain.
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        if is_authority:
            builder = builder.add_extension(_SIGNS_ONLY, critical=True)
        else:
            alternatives = x509.SubjectAlternativeName([_general_name(name) for name in its or ()])
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def make_certificates(
    names: Mapping[str, Iterable[str]], authority: Authority | None = None
) -> dict[str, HostCertificate]:
    """Make a certificate for each host.

    Args:
        names: By host, the names that its certificate is for.
        authority: The authority of the run; None for one that is forgotten when this function returns.

    Cost: about 1 ms for each host.
    """
    authority = authority or Authority()
    return {host: authority.issue(its) for host, its in names.items()}


def make_request() -> tuple[str, str]:
    """Make a private key and a request for a certificate for it, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
    return key_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


def fingerprint_of(certificate: str) -> str:
    """Return the SHA-256 of a certificate (PEM), in hexadecimal digits.

    Raises:
        ValueError: This is no certificate.
    """
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


def serving_context(proof: HostCertificate) -> ssl.SSLContext:
    """Return the TLS settings of a service that proves itself with a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # `load_cert_chain` reads only files, and a private key is to be in none: this one is in memory and has no name.
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, (proof.own + proof.key).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a private key as PEM."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(name)


_NAME_OF_AUTHORITY, _NAME_OF_HOST = _named("authority of a run"), _named("host of a run")
_NOTHING = dict.fromkeys(
    ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
)
_SIGNS_ONLY = x509.KeyUsage(**_NOTHING, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False)
