"""Certificates and keys for trying out a federation; a consortium brings its own.

The server has a TLS certificate that sites check against ``ca.crt``. Each site has its own key
(ECDSA on P-384, as ``ssh-keygen -t ecdsa -b 384`` makes it), by which the server recognizes it, and
on request a TLS certificate, without which the server does not talk to it at all.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that is never, even while it is written, readable by others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def node_key() -> tuple[bytes, str]:
    """A new site key: the private part in OpenSSH's format, the public part as one line."""
    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return _private_pem(key, PrivateFormat.OpenSSH), public.decode()


class Authority:
    """A certificate authority for testing; certificates and keys are PEM."""

    def __init__(self, name: str) -> None:
        self._key = _new_key()
        self._name = f"{name} test CA"
        self.key = _private_pem(self._key)
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.certificate = self._sign(self._name, self._key, True, own)

    def server(self, hosts: Iterable[str]) -> tuple[bytes, bytes]:
        """A server certificate for these host names and addresses, and its key."""
        names = [_host(h) for h in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        return self._issue(
            "protofed server", ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names)
        )

    def client(self, site: str) -> tuple[bytes, bytes]:
        """A client certificate for a site, and its key."""
        return self._issue(site, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(
        self, name: str, usage: x509.ObjectIdentifier, *more: x509.ExtensionType
    ) -> tuple[bytes, bytes]:
        key = _new_key()
        certificate = self._sign(
            name,
            key,
            False,
            *more,
            x509.ExtendedKeyUsage([usage]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
        )
        return certificate, _private_pem(key)

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, ca: bool, *more: x509.ExtensionType
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(
            digital_signature=not ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=ca,
            crl_sign=ca,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(_common_name(name))
            .issuer_name(_common_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))  # a site's clock may be behind
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, SHA384()).public_bytes(Encoding.PEM)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private_pem(
    key: ec.EllipticCurvePrivateKey, format: PrivateFormat = PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(Encoding.PEM, format, NoEncryption())


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
