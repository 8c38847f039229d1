"""The features of a messaging instance, and its service properties (RFC 5.1, 5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from messaging.adapter import Adapter
from messaging.model import GENERATE_REPLY_CHANNEL_ALIAS, REPLY_FEATURES, Features
from messaging.services import Version

NAME_PROPERTY: Final = "osgi.messaging.name"
PROTOCOL_PROPERTY: Final = "osgi.messaging.protocol"
FEATURE_PROPERTY: Final = "osgi.messaging.feature"
PROVIDER_PROPERTY: Final = "osgi.messaging.provider"
#: capabilities, and the version of the specification they implement (RFC 5.1.3, 5.7.1, 5.8.3)
IMPLEMENTATION_PROPERTY: Final = "osgi.implementation"
VERSION_PROPERTY: Final = "version"
#: attribute of the reply-to capability: the supported sides of many replies (RFC 5.7.1)
MANY_PROPERTY: Final = "many"

IMPLEMENTATION: Final = "osgi.messaging"
REPLY_TO_IMPLEMENTATION: Final = "osgi.messaging.replyto"
ACKNOWLEDGE_IMPLEMENTATION: Final = "osgi.messaging.acknowledge"
SPECIFICATION_VERSION: Final = Version("1.0")


#: features an adapter must announce for requests and replies
_REPLY_NEEDS: Final = frozenset({Features.MESSAGE_PROPERTIES, Features.EXTENSION_HEADERS})


def announced(adapter: Adapter) -> frozenset[str]:
    """Return the ``osgi.messaging.feature`` of an instance: its adapter's features and those of the core (RFC 5.7)."""
    features = adapter.capabilities.features
    if adapter.settings.outbox_path is not None:
        features |= {Features.EXTENSION_STORE_AND_FORWARD}
    if not features >= _REPLY_NEEDS:
        return features
    found = features | REPLY_FEATURES
    if adapter.settings.generate_correlation_id:
        found |= {Features.GENERATE_CORRELATION_ID}
    if adapter.settings.generate_reply_channel:
        found |= {Features.GENERATE_REPLY_CHANNEL, GENERATE_REPLY_CHANNEL_ALIAS}
    return found


def instance_properties(name: str, adapter: Adapter) -> dict[str, Any]:
    """Return the properties of an instance's services, with the features its adapter announces now."""
    features = announced(adapter)
    properties: dict[str, Any] = {
        NAME_PROPERTY: name,
        PROVIDER_PROPERTY: adapter.provider,
        PROTOCOL_PROPERTY: list(adapter.capabilities.protocols),
        FEATURE_PROPERTY: sorted(features),
        VERSION_PROPERTY: SPECIFICATION_VERSION,
    }
    capabilities = [IMPLEMENTATION]
    if Features.REPLY_TO in features:
        capabilities.append(REPLY_TO_IMPLEMENTATION)
        properties[MANY_PROPERTY] = ["publish", "subscribe"]
    if Features.ACKNOWLEDGE in features:
        capabilities.append(ACKNOWLEDGE_IMPLEMENTATION)
    properties[IMPLEMENTATION_PROPERTY] = capabilities
    return properties


def builder_properties(instance: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an application's own context builder (RFC 5.6.4).

    These are the ``given`` ones, overridden by those of the instance.
    """
    features = sorted({*instance[FEATURE_PROPERTY], Features.MESSAGE_CONTEXT_BUILDER})
    return {**given, **instance, FEATURE_PROPERTY: features}
