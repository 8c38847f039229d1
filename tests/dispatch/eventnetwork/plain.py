"""Plain programs: members of event networks that know the format, and not this library."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import messaging
from messaging.testing.waiting import PATIENCE, Recorder


def announcement(kind: str, member: str, **fields: Any) -> bytes:
    """Return an announcement."""
    return json.dumps({"announcement": 1, "kind": kind, "member": member, **fields}).encode()


def update(member: str | None = None, *topics: str, **fields: Any) -> bytes:
    """Return an announcement of all interests, or of further ones with ``kind="add"``."""
    interests = [{"topics": each} for each in topics]
    return announcement(**{"kind": "update", "member": member or str(uuid4()), "interests": interests, **fields})


def event(data: Any, **fields: Any) -> bytes:
    """Return an event."""
    return json.dumps({"event": 1, "data": data, **fields}).encode()


def answers_to(m: messaging.Messaging, member: str, network: str = "topics") -> Recorder[dict[str, Any]]:
    """Record the announcements to a member."""
    found: Recorder[dict[str, Any]] = Recorder()
    stream = m.subscribe(f"{network}-members/{member}")
    stream.subscribe(lambda message: found.append(json.loads(message.payload)))
    stream.ready.result(PATIENCE)
    return found
