"""Events as the documents and SDKs of CloudEvents show them. The comment of each one names project and document.

Where a document leaves data out, as ``... application data ...``, there is data of this project.
"""

from __future__ import annotations

import base64
from typing import Any, Final

_THRIFT: Final = base64.b64encode(b"\x80\x01\x00\x01\xff\xfe").decode()

#: by name: the JSON object of an event in structured mode
STRUCTURED: Final[dict[str, dict[str, Any]]] = {
    # cloudevents/spec, formats/json-format.md 3.2: data in base64
    "json-binary": {
        "specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext", "id": "A234-1234-1234",
        "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value", "comexampleothervalue": 5,
        "datacontenttype": "application/vnd.apache.thrift.binary", "data_base64": _THRIFT,
    },
    # cloudevents/spec, formats/json-format.md 3.2: XML as text, and an attribute that is null
    "json-xml": {
        "specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext", "id": "B234-1234-1234",
        "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value", "comexampleothervalue": 5,
        "unsetextension": None, "datacontenttype": "application/xml", "data": '<much wow="xml"/>',
    },
    # cloudevents/spec, formats/json-format.md 3.2: data as a JSON object
    "json-object": {
        "specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext", "subject": None,
        "id": "C234-1234-1234", "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value",
        "comexampleothervalue": 5, "datacontenttype": "application/json",
        "data": {"appinfoA": "abc", "appinfoB": 123, "appinfoC": True},
    },
    # cloudevents/spec, formats/json-format.md 3.2: a JSON string as data, without datacontenttype
    "json-string": {
        "specversion": "1.0", "type": "com.example.someevent", "source": "/mycontext", "subject": None,
        "id": "D234-1234-1234", "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value",
        "comexampleothervalue": 5, "data": "I'm just a string",
    },
    # cloudevents/spec, bindings/mqtt-protocol-binding.md 3.2.4
    "mqtt": {
        "specversion": "1.0", "type": "com.example.someevent", "time": "2018-04-05T03:56:24Z",
        "id": "1234-1234-1234", "source": "/mycontext/subcontext",
        "datacontenttype": "application/json; charset=utf-8", "data": {"celsius": 21.5},
    },
    # cloudevents/spec, spec.md 1.0.2, Example
    "spec": {
        "specversion": "1.0", "type": "com.github.pull_request.opened",
        "source": "https://github.com/cloudevents/spec/pull", "subject": "123", "id": "A234-1234-1234",
        "time": "2018-04-05T17:31:00Z", "comexampleextension1": "value", "comexampleothervalue": 5,
        "datacontenttype": "text/xml", "data": '<much wow="xml"/>',
    },
    # cloudevents/sdk-python, README.md: without datacontenttype
    "sdk-python": {
        "specversion": "1.0", "type": "com.example.sampletype2", "source": "https://example.com/event-producer",
        "id": "5d0d7b0b-4d36-4a4b-a7a9-3e2d3cc3e4f1", "time": "2025-01-02T03:04:05.678901Z",
        "data": {"message": "Hello World!"},
    },
    # cloudevents/sdk-java, docs/core.md: bytes, which its JSON format writes as text
    "sdk-java": {
        "specversion": "1.0", "id": "000", "type": "example.demo", "source": "http://example.com",
        "datacontenttype": "text/plain", "data": "Hello world!",
    },
    # cloudevents/sdk-csharp, docs/guide.md
    "sdk-csharp": {
        "specversion": "1.0", "id": "event-id", "type": "event-type", "source": "https://cloudevents.io/",
        "time": "2021-08-24T14:19:23.4234567+02:00", "datacontenttype": "text/plain",
        "data": "This is CloudEvent data",
    },
    "sdk-csharp-game": {
        "specversion": "1.0", "id": "result-1", "type": "game.played.v1", "source": "https://cloudevents.io/",
        "time": "2021-08-24T14:19:23Z", "datacontenttype": "application/json",
        "data": {"playerId": "player1", "gameId": "game1", "score": 200},
    },
    # cloudevents/sdk-go, README.md: a source that is no URI, and no time
    "sdk-go": {
        "specversion": "1.0", "type": "com.example.file.created", "id": "ea35b24ede421",
        "source": "/providers/Example.COM/storage/account#fileServices/default/{new-file}",
    },
}  # fmt: skip

#: by name: headers, content type, payload, and the name above of the same event
BINARY: Final[dict[str, tuple[dict[str, Any], str | None, bytes, str]]] = {
    # cloudevents/spec, bindings/mqtt-protocol-binding.md 3.1.4: it repeats datacontenttype as a user property
    "mqtt": (
        {
            "specversion": "1.0", "type": "com.example.someevent", "time": "2018-04-05T03:56:24Z",
            "id": "1234-1234-1234", "source": "/mycontext/subcontext",
            "datacontenttype": "application/json; charset=utf-8",
        },
        "application/json; charset=utf-8", b'{"celsius": 21.5}', "mqtt",
    ),
    # cloudevents/spec, bindings/amqp-protocol-binding.md 3.1.4
    "amqp": (
        {
            "cloudEvents:specversion": "1.0", "cloudEvents:type": "com.example.someevent",
            "cloudEvents:time": "2018-04-05T03:56:24Z", "cloudEvents:id": "1234-1234-1234",
            "cloudEvents:source": "/mycontext/subcontext",
        },
        "application/json; charset=utf-8", b'{\n    "celsius": 21.5\n}', "mqtt",
    ),
    # the same with the prefix of later versions of that document
    "amqp-underscore": (
        {
            "cloudEvents_specversion": "1.0", "cloudEvents_type": "com.example.someevent",
            "cloudEvents_time": "2018-04-05T03:56:24Z", "cloudEvents_id": "1234-1234-1234",
            "cloudEvents_source": "/mycontext/subcontext",
        },
        "application/json; charset=utf-8", b'{"celsius":21.5}', "mqtt",
    ),
    # cloudevents/spec, formats/json-format.md 3.2, re-encoded in binary mode, with the headers of AMQP: the string is
    # quoted, and the content type explicit
    "quoted-string": (
        {
            "cloudEvents:specversion": "1.0", "cloudEvents:type": "com.example.someevent",
            "cloudEvents:time": "2018-04-05T17:31:00Z", "cloudEvents:id": "D234-1234-1234",
            "cloudEvents:source": "/mycontext", "cloudEvents:comexampleextension1": "value",
            "cloudEvents:comexampleothervalue": 5,
        },
        "application/json", b'"I\'m just a string"', "json-string",
    ),
}  # fmt: skip
