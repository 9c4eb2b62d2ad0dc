"""Certificates and keys for trying out a federation; a consortium brings its own.

The server has a TLS certificate that sites check against ``ca.crt``. Each site has its own key
(ECDSA on P-384, as ``ssh-keygen -t ecdsa -b 384`` makes it), by which the server recognizes it, and
optionally a TLS certificate, without which the server does not talk to it at all.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protofed.errors import ProtofedError

DAYS, CA_DAYS = 365, 3650
"""How long certificates are valid, and the authority's own."""


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that others can never read, not even while it is being written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def node_key() -> tuple[bytes, str]:
    """A new site key: the private part in OpenSSH's format, the public part as one line."""
    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return _private_pem(key, PrivateFormat.OpenSSH), public.decode()


def certificate_request(key_path: Path, site: str) -> str:
    """A signing request for the private key in this file; the key is made if there is none."""
    if not key_path.exists():
        write_secret(key_path, _private_pem(_new_key()))
    try:
        key = _load_key(key_path)
    except ValueError as error:
        raise ProtofedError(f"'{key_path}' cannot be read: {error}") from None
    request = x509.CertificateSigningRequestBuilder().subject_name(_common_name(site))
    return request.sign(key, SHA384()).public_bytes(Encoding.PEM).decode()


def host_names(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = found.get_values_for_type(x509.IPAddress)
    return [*found.get_values_for_type(x509.DNSName), *map(str, addresses)]


class Authority:
    """A certificate authority for testing; certificates and keys are PEM."""

    def __init__(self, name: str) -> None:
        self._key = _new_key()
        self._name = _common_name(f"{name} test CA")
        self.key = _private_pem(self._key)
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        public = self._key.public_key()
        self.certificate = self._sign(self._name, public, True, own)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority whose ``ca.key`` and ``ca.crt`` are in this folder."""
        found = cls.__new__(cls)
        try:
            found._key = _load_key(folder / "ca.key")
            found.certificate = (folder / "ca.crt").read_bytes()
            own = x509.load_pem_x509_certificate(found.certificate)
        except (OSError, ValueError) as error:
            raise ProtofedError(
                f"the authority in '{folder}' cannot be read: {error}",
                "name the folder of ca.key and ca.crt with --ca; if you have an authority of your "
                "own, it renews the certificates",
            ) from None
        if own.public_key() != found._key.public_key():
            raise ProtofedError(f"ca.key in '{folder}' is not the key of ca.crt")
        found._name = own.subject
        return found

    def server(self, hosts: Iterable[str]) -> tuple[bytes, bytes]:
        """A server certificate for these host names and addresses, and its key."""
        names = [_host(h) for h in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        key, usage = _new_key(), ExtendedKeyUsageOID.SERVER_AUTH
        also = x509.SubjectAlternativeName(names)
        return self._issue("protofed server", key.public_key(), usage, also), _private_pem(key)

    def client(self, site: str) -> tuple[bytes, bytes]:
        """A client certificate for a site, and its key."""
        key = _new_key()
        return self._client(site, key.public_key()), _private_pem(key)

    def client_for(self, site: str, request: str) -> bytes:
        """A client certificate for a site that has sent a signing request."""
        try:
            found = x509.load_pem_x509_csr(request.encode())
            key = found.public_key()
        except (ValueError, UnsupportedAlgorithm):
            raise ProtofedError(f"the certificate request of site '{site}' is invalid") from None
        if not found.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ProtofedError(f"the certificate request of site '{site}' is invalid")
        return self._client(site, key)

    def _client(self, site: str, key: ec.EllipticCurvePublicKey) -> bytes:
        return self._issue(site, key, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        usage: x509.ObjectIdentifier,
        *more: x509.ExtensionType,
    ) -> bytes:
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return self._sign(_common_name(name), key, False, *more, x509.ExtendedKeyUsage([usage]), by)

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePublicKey,
        ca: bool,
        *more: x509.ExtensionType,
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
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))  # a site's clock may be behind
            .not_valid_after(now + datetime.timedelta(days=CA_DAYS if ca else DAYS))
            .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
            .add_extension(usage, critical=True)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, SHA384()).public_bytes(Encoding.PEM)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def read_key(load: Callable[[bytes, None], Any], path: Path) -> Any:
    """The private key in a file; a ``ValueError`` if it is damaged or has a password."""
    try:
        return load(path.read_bytes(), None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = read_key(load_pem_private_key, path)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path.name} is not a key on an elliptic curve")
    return key


def _private_pem(
    key: ec.EllipticCurvePrivateKey, format: PrivateFormat = PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(Encoding.PEM, format, NoEncryption())


def _common_name(text: str) -> x509.Name:
    short = text.encode()[:64].decode(errors="ignore")  # the most bytes that X.509 allows
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not name.isascii():
            advice = "write it as certificates do, with xn-- in front"
            raise ProtofedError(f"'{name}' is not ASCII", advice) from None
        return x509.DNSName(name)
