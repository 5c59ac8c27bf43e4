"""`PoolState`: the answer of `/internal/state`, written once for all who look, but for whose requests are whose."""

import json
from dataclasses import asdict
from typing import Any

from jpaged.engine_client import EngineInfo, EngineReport, LiveRequest, PoolPicture
from jpaged.server.api_error import compact_json
from jpaged.server.keys import Tenant
from jpaged.server.live_requests import LiveRequests

_STATES = bytes.maketrans(bytes(range(5)), b"01234")


class PoolState:
    """The engine at one moment, as JSON in pieces.

    Args:
      model: its name.
      info, report, picture: of the engine.
    """

    def __init__(self, model: str, info: EngineInfo, report: EngineReport, picture: PoolPicture) -> None:
        head: dict[str, Any] = {
            "model": model,
            "info": asdict(info),
            "stats": asdict(report.stats),
            "is_paused": report.is_paused,
            "pages": picture.states.translate(_STATES).decode("ascii"),
        }
        self._head = compact_json(head)[:-1]
        self._requests = [(one.request_id, _without_id(one)) for one in picture.requests]

    def seen_by(self, tenant: Tenant, live: LiveRequests, *, shows_all: bool, age_s: float) -> bytes:
        """The JSON object; of other tenants' requests it has the sizes alone.

        Args:
          tenant: who looks.
          live: says whose requests are whose.
          shows_all: there are no tenants, or an admin looks.
          age_s: of this state.
        """
        requests = []
        for name, rest in self._requests:
            owner = None if shows_all else live.tenant_of(name)
            is_shown = shows_all or (owner is not None and owner.name == tenant.name)
            requests.append(b'{"request_id":%b,%b' % (json.dumps(name).encode() if is_shown else b"null", rest))
        return b'%b,"age_s":%.3f,"requests":[%b]}' % (self._head, age_s, b",".join(requests))


def _without_id(one: LiveRequest) -> bytes:
    fields = {name: getattr(one, name) for name in LiveRequest.__dataclass_fields__ if name != "request_id"}
    return compact_json(fields)[1:]
