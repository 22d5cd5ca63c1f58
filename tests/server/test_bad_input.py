"""Nothing that a client sends makes the server fail, hang or say something of another shape."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest
from bad_input import bad_requests
from live import live, speaker
from workers import eventually

from duodecoding.types import Mode

ALLOWED = {200, 204, 400, 401, 404, 405, 408, 413}


def test_hundreds_of_bad_requests():
    with live(lambda: speaker(Mode.SERIAL), max_body_mb=1) as server:
        netloc = urlsplit(server.url).netloc
        connection = http.client.HTTPConnection(netloc, timeout=60)
        statuses: dict[int, int] = {}
        for method, path, body, headers in bad_requests(400):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            connection.request(method, path, body, encoded)
            response = connection.getresponse()
            data = response.read()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status in ALLOWED, (method, path, body[:300], data)
            if response.status >= 400 and method != "HEAD":
                assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
        connection.close()
        assert statuses[400] > 100  # they are bad
        assert statuses[200] > 20  # and not all of them hopeless
        assert server.chat("hello")[0] == 200
        assert eventually(lambda: server.engines.running == 0)  # an engine ends its request after the client has read the answer


def test_schemathesis():
    """What the OpenAPI document promises is what happens: no 5xx, no undocumented answer."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    quick = settings(
        max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
    )
    with live(lambda: speaker(Mode.SERIAL)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        asked = 0

        def check(case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(checks=checks)

        for operation in (found.ok() for found in schema.get_all_operations()):
            quick(given(case=operation.as_strategy())(check))()
        assert asked > 50
