"""A certificate authority of our own, and a certificate for ``localhost`` and ``127.0.0.1``."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme

__all__ = ["Tls"]


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of one throw-away authority: ``ca`` to trust, ``cert`` (with its chain) and ``key`` to serve with."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def create(cls, directory: Path, *names: str) -> Tls:
        """Write a new authority and a certificate for ``names`` into ``directory``."""
        authority = trustme.CA()
        leaf = authority.issue_cert(*(names or ("localhost", "127.0.0.1", "::1")))
        made = cls(directory / "ca.pem", directory / "server.pem", directory / "server.key")
        authority.cert_pem.write_to_path(str(made.ca))
        for part, pem in enumerate(leaf.cert_chain_pems):
            pem.write_to_path(str(made.cert), append=part > 0)
        leaf.private_key_pem.write_to_path(str(made.key))
        return made

    def server_context(self) -> ssl.SSLContext:
        """What a Python server needs to present the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """What a Python client needs to trust the authority, and nothing else."""
        return ssl.create_default_context(cafile=str(self.ca))
