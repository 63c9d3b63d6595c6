import asyncio

import pytest

from ddl_airflow.demo.plugins.one_writer import OneWriter


def most_at_once(method: str, kind: str = "http") -> int:
    inside = most = 0

    async def app(scope, receive, send):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)  # the others may come in now
        inside -= 1

    async def three():
        one_writer = OneWriter(app)
        requests = (one_writer({"type": kind, "method": method}, None, None) for _ in range(3))
        await asyncio.gather(*requests)

    asyncio.run(three())
    return most


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "DELETE"])
def test_writes_take_turns(method):
    assert most_at_once(method) == 1


@pytest.mark.parametrize(("method", "kind"), [("GET", "http"), ("", "lifespan")])
def test_what_does_not_write_waits_for_nobody(method, kind):
    assert most_at_once(method, kind) == 3


def test_a_request_that_fails_lets_the_next_in():
    async def app(scope, receive, send):
        raise OSError(scope["path"])

    async def two():
        one_writer = OneWriter(app)
        for path in ("/first", "/second"):
            with pytest.raises(OSError, match=path):
                await one_writer({"type": "http", "method": "POST", "path": path}, None, None)

    asyncio.run(two())
