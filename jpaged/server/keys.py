"""`KeyRing`: who a client is, by its API key."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jpaged.server.api_error import ApiError


@dataclass(frozen=True)
class Tenant:
    """Somebody who is served.

    Attributes:
      name: for logs and limits; says nothing of the key.
      salt: goes into the hashes of cached prefixes; `None` if there are no keys.
      is_admin: may use the admin endpoints.
    """

    name: str
    salt: str | None = None
    is_admin: bool = False

    def cache_salt(self, own: str | None) -> str | None:
        """The salt of a request: two keys never share a prefix, whatever salts their clients choose.

        Args:
          own: the request's `cache_salt`.
        """
        if self.salt is None:
            return own
        return self.salt if own is None else f"{self.salt}/{own}"


ANYBODY = Tenant("anybody")


class KeyRing:
    """The keys that the server knows. Without any, everybody is let in and nobody is an admin.

    Args:
      api_keys: for everything but the admin endpoints.
      admin_keys: for these too.

    Example:
      >>> ring = KeyRing(["first-key"], ["admin-key"])
      >>> ring.tenant([(b"authorization", b"Bearer first-key")]).name
      'key 1'
      >>> ring.admin([(b"authorization", b"Bearer admin-key")]).is_admin
      True
    """

    def __init__(self, api_keys: Sequence[str] = (), admin_keys: Sequence[str] = ()) -> None:
        self._known = [
            (_digest(key.encode()), Tenant(f"{kind} {number}", _salt(key), kind == "admin"))
            for kind, keys in (("key", api_keys), ("admin", admin_keys))
            for number, key in enumerate(keys, start=1)
        ]
        self._needs_key = bool(api_keys)
        self.has_admins = bool(admin_keys)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Who sends these headers.

        Raises:
          ApiError: 401: a key is needed, and there is none, or a wrong one.
        """
        if not self._needs_key:
            return self._find(headers) or ANYBODY
        found = self._find(headers)
        if found is None:
            raise ApiError(401, "no valid API key; send one as the header Authorization: Bearer KEY")
        return found

    def admin(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """The admin who sends these headers.

        Raises:
          ApiError: 401: there is no valid key; 403: it is not an admin's; 404: this server has no admins.
        """
        if not self.has_admins:
            raise ApiError(404, "admin endpoints are off; start the server with an admin key to have them")
        found = self._find(headers)
        if found is None:
            raise ApiError(401, "no valid admin key; send one as the header Authorization: Bearer KEY")
        if not found.is_admin:
            raise ApiError(403, "this key is not an admin's")
        return found

    def _find(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        value = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = value.partition(b" ")
        given = _digest(key.strip()) if scheme.lower() == b"bearer" else b""
        found = None
        for digest, tenant in self._known:  # all of them: the time says nothing of how far a guess got
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _salt(key: str) -> str:
    return hashlib.sha256(b"cache salt\0" + key.encode()).hexdigest()[:32]
