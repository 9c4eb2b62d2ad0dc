"""Certificates and keys for trying out a federation; a consortium brings its own.

The server has a TLS certificate that sites check against ``ca.crt``. Each site has its own key
(ECDSA on P-384, as ``ssh-keygen -t ecdsa -b 384`` makes it), by which the server recognizes it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, at no time anyone else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


class Authority:
    """A certificate authority for testing."""

    def __init__(self, name: str) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.subject = _name(f"{name} test CA")
        self.certificate = (
            _builder(self.subject, self.subject, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA384())
        )

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def server(self, hosts: Iterable[str]) -> tuple[bytes, bytes]:
        """A server certificate for these host names and addresses, and its key, as PEM."""
        key = ec.generate_private_key(ec.SECP384R1())
        names = [_alternative(h) for h in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = (
            _builder(_name("protofed server"), self.subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self.key, hashes.SHA384())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private_pem(key)


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as unencrypted PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def node_key() -> tuple[bytes, str]:
    """A new site key: the private part in OpenSSH's format, the public part as one line."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public.decode()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
