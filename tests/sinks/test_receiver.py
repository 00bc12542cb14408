"""A receiver of alerts: the meaning of answers, and retries until a request is accepted or refused."""

import asyncio
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from aiohttp import web

from delivery.dead_letters import Abandoned
from delivery.instruments import Instruments
from sinks.http_server import listening
from sinks.receiver import Credentials, Http, Receiver, Reply, Request, instruments, meaning
from sinks.settings import HttpSettings
from tests.eventually import eventually
from tests.real.certificates import Authority
from tests.sinks.receivers import Scripted

INSTRUMENTS = instruments(
    "gpustream_test_requests_total", "gpustream_test_request_seconds", "gpustream_test_receiver_failing"
)
REQUEST = Request(b"body", {"A": "b"})
MEANINGS = {
    "accepted": [200, 201, 202, 204, 299],
    "again": [0, 408, 425, 429, 500, 501, 502, 503, 504, 599],
    "misconfigured": [100, 199, 300, 301, 302, 304, 307, 308, 401, 403, 404, 405, 407, 410],
    "refused": [
        400,
        402,
        406,
        409,
        411,
        412,
        413,
        414,
        415,
        417,
        418,
        421,
        422,
        423,
        424,
        426,
        428,
        431,
        451,
        499,
    ],
}


def receiver(scripted: Scripted, url: str = "http://me:secret@host:1/hidden/path") -> Receiver:
    return Receiver(url, scripted.post, "test", Instruments(INSTRUMENTS), first_s=0.0)


async def send(to: Receiver, abandon: asyncio.Event | None = None) -> str | None:
    return await asyncio.wait_for(to.send(lambda: REQUEST, abandon or asyncio.Event()), 10)


async def attempts(scripted: Scripted, number: int, sending: "asyncio.Future[str | None]") -> None:
    """Wait until so many more attempts were made, or ``sending`` has ended."""
    upto = len(scripted.requests) + number
    await eventually(lambda: sending.done() or len(scripted.requests) >= upto)


@pytest.mark.parametrize(
    ("expected", "status"), [(expected, status) for expected, statuses in MEANINGS.items() for status in statuses]
)
def test_each_status_has_a_meaning(expected: str, status: int) -> None:
    assert meaning(status) == expected


@pytest.mark.parametrize("status", MEANINGS["again"] + MEANINGS["misconfigured"])
async def test_what_is_no_refusal_is_tried_again_for_as_long_as_it_takes(status: int) -> None:
    scripted = Scripted(*[status] * 20)
    assert await send(receiver(scripted)) is None
    assert [request.status for request in scripted.requests] == [*[status] * 20, 200]
    assert {request.body for request in scripted.requests} == {b"body"}


@pytest.mark.parametrize("status", MEANINGS["refused"])
async def test_a_refusal_is_reported_and_not_sent_again(status: int) -> None:
    scripted = Scripted(503, status)
    assert await send(receiver(scripted)) == f"HTTP {status}: said"
    assert [request.status for request in scripted.requests] == [503, status]


async def test_a_receiver_that_refuses_everything_is_tried_again_until_it_accepts_something() -> None:
    instruments = Instruments(INSTRUMENTS)
    scripted = Scripted(default_status=lambda _: 422)
    to = Receiver("http://h:1", scripted.post, "test", instruments, most_refused=3, first_s=0.0)
    assert [await send(to) for _ in range(3)] == ["HTTP 422: said"] * 3
    assert to.failing is None
    sending = asyncio.ensure_future(send(to))
    await eventually(lambda: to.failing is not None)
    assert to.failing == "it refuses everything: HTTP 422: said"
    scripted.default_status = lambda _: 200
    assert await sending is None
    assert to.failing is None
    scripted.script = [422]
    assert await send(to) == "HTTP 422: said"


async def test_one_request_that_is_tried_again_is_logged_once_while_others_are_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scripted = Scripted(default_status=lambda body: 503 if body == b"bad" else 200)
    instruments = Instruments(INSTRUMENTS)
    to = Receiver("http://h:1", scripted.post, "test", instruments, first_s=0.0)
    stuck = asyncio.ensure_future(to.send(lambda: Request(b"bad", {}), asyncio.Event()))
    await eventually(lambda: to.failing is not None)
    for _ in range(5):
        await send(to)
        assert to.failing == "HTTP 503: said"
    scripted.default_status = lambda _: 200
    assert await asyncio.wait_for(stuck, 10) is None
    assert to.failing is None
    assert [line.message for line in caplog.records] == [
        "h:1 does not accept, trying again: HTTP 503: said",
        "h:1 answers again",
    ]


async def test_a_request_that_is_not_allowed_five_times_while_others_are_accepted_is_refused() -> None:
    scripted = Scripted(default_status=lambda body: 403 if body == b"bad" else 200)
    to = receiver(scripted)
    stuck = asyncio.ensure_future(to.send(lambda: Request(b"bad", {}), asyncio.Event()))
    for _ in range(5):
        assert not stuck.done()
        await send(to)
        await attempts(scripted, 3, stuck)
    assert await asyncio.wait_for(stuck, 10) == "HTTP 403: said"
    assert to.failing is None


async def test_what_was_accepted_before_the_first_attempt_or_after_another_answer_says_nothing_of_a_request() -> None:
    scripted = Scripted(default_status=lambda body: 200 if body == b"good" else 401)
    to = receiver(scripted)
    for _ in range(10):
        await to.send(lambda: Request(b"good", {}), asyncio.Event())
    stuck = asyncio.ensure_future(send(to))
    for status in (401, 503) * 4:
        scripted.default_status = lambda body, status=status: 200 if body == b"good" else status  # type: ignore[misc]
        await to.send(lambda: Request(b"good", {}), asyncio.Event())
        await attempts(scripted, 3, stuck)
    assert not stuck.done()
    scripted.default_status = lambda _: 200
    assert await stuck is None


async def test_an_abandoned_send_is_no_failure_any_more_and_does_not_report_that_the_receiver_answers_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scripted, stop, instruments = Scripted(default_status=lambda _: 503), asyncio.Event(), Instruments(INSTRUMENTS)
    to = Receiver("http://host:1", scripted.post, "test", instruments, first_s=0.0)

    def gauge() -> float | None:
        return instruments.registry.get_sample_value("gpustream_test_receiver_failing", {"receiver": "host:1"})

    sending = asyncio.ensure_future(send(to, stop))
    await eventually(lambda: to.failing is not None)
    assert gauge() == 1
    stop.set()
    with pytest.raises(Abandoned):
        await sending
    assert (to.failing, gauge()) == (None, 0)
    assert "answers again" not in caplog.text
    scripted.default_status = lambda _: 200
    await send(to)
    assert caplog.text.count("answers again") == 1


@pytest.mark.slow
async def test_retry_after_is_waited_for() -> None:
    async def post(_: str, body: bytes, __: Mapping[str, str]) -> Reply:
        statuses.append(asyncio.get_running_loop().time())
        return Reply(429, "", {"Retry-After": "1"}) if len(statuses) == 1 else Reply(200)

    statuses: list[float] = []
    to = Receiver("http://host:1", post, "test", Instruments(INSTRUMENTS), first_s=0.0)
    assert await send(to) is None
    assert statuses[1] - statuses[0] >= 1


async def test_a_request_is_made_again_for_each_attempt() -> None:
    scripted, bodies = Scripted(503, 503), iter([b"1", b"2", b"3"])
    to = receiver(scripted)
    await asyncio.wait_for(to.send(lambda: Request(next(bodies), {}), asyncio.Event()), 10)
    assert [request.body for request in scripted.requests] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("error", [OSError("no such file"), ValueError("it is empty")])
async def test_a_request_that_can_t_be_made_now_is_made_later(error: Exception) -> None:
    def make() -> Request:
        if errors:
            raise errors.pop()
        return REQUEST

    scripted, errors = Scripted(), [error] * 3
    assert await asyncio.wait_for(receiver(scripted).send(make, asyncio.Event()), 10) is None
    assert len(scripted.requests) == 1


async def test_an_abandoned_send_ends_after_the_attempt_in_flight() -> None:
    scripted, stop = Scripted(default_status=lambda _: 503), asyncio.Event()
    scripted.hold.clear()
    sending = asyncio.ensure_future(receiver(scripted).send(lambda: REQUEST, stop))
    await asyncio.wait_for(scripted.asked.wait(), 10)
    stop.set()
    await asyncio.sleep(0.01)
    assert not sending.done()
    scripted.hold.set()
    with pytest.raises(Abandoned):
        await asyncio.wait_for(sending, 10)
    assert len(scripted.requests) == 1


async def test_nothing_is_sent_after_the_send_was_abandoned() -> None:
    scripted, stop = Scripted(), asyncio.Event()
    stop.set()
    with pytest.raises(Abandoned):
        await send(receiver(scripted), stop)
    assert scripted.requests == []


async def test_a_change_is_logged_once_without_the_path_and_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scripted = Scripted(0, 0, 0)
    to = receiver(scripted)
    sending = asyncio.ensure_future(send(to))
    await asyncio.wait_for(scripted.asked.wait(), 10)
    await asyncio.wait_for(sending, 10)
    assert [record.message for record in caplog.records] == [
        "host:1 does not accept, trying again: away",
        "host:1 answers again",
    ]


async def test_while_it_fails_it_says_why_and_what_waits_for_its_return_is_reported() -> None:
    reported: list[str | None] = []
    scripted = Scripted(503, 401)
    instruments = Instruments(INSTRUMENTS)
    to = Receiver(
        "http://h:1", scripted.post, "test", instruments, first_s=0.0, on_recovery=lambda: reported.append(to.failing)
    )
    reasons: list[str | None] = []

    def make() -> Request:
        reasons.append(to.failing)
        return REQUEST

    await asyncio.wait_for(to.send(make, asyncio.Event()), 10)
    assert reasons == [None, "HTTP 503: said", "misconfigured: HTTP 401: said"]
    assert reported == [None]
    attempts = {
        result: instruments.registry.get_sample_value(
            "gpustream_test_requests_total", {"receiver": "h:1", "result": result}
        )
        for result in ("accepted", "again", "misconfigured")
    }
    assert attempts == {"accepted": 1, "again": 1, "misconfigured": 1}


async def test_attempts_in_flight_are_limited_and_one_that_waits_takes_no_slot() -> None:
    scripted = Scripted(default_status=lambda body: 503 if body == b"bad" and len(scripted.requests) < 30 else 200)
    instruments = Instruments(INSTRUMENTS)
    to = Receiver("http://h:1", scripted.post, "test", instruments, at_once=2, first_s=0.0)
    bodies = [b"bad", b"bad", *[b"good"] * 10]
    await asyncio.wait_for(
        asyncio.gather(*(to.send(lambda body=body: Request(body, {}), asyncio.Event()) for body in bodies)),  # type: ignore[misc]
        10,
    )
    assert scripted.most == 2
    assert [request.body for request in scripted.accepted()][:10] == [b"good"] * 10


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("", None),
        ("-5", None),
        ("soon", None),
        ("²", None),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 +99999999999999", None),
        ("Wed, 21 Oct 2015 07:28:00 -0000", None),
    ],
)
def test_whatever_retry_after_says_it_is_a_time_or_nothing(header: str, seconds: float | None) -> None:
    assert Reply(503, "", {"Retry-After": header}).retry_after_s == seconds


def test_an_encrypted_key_is_an_error_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).sign("client")
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "pkey", "-in", certificate.key, "-aes256", "-passout", "pass:abcd", "-out", encrypted], check=True
    )
    credentials = Credentials(HttpSettings(tls_cert=certificate.certificate, tls_key=encrypted))
    with pytest.raises(ValueError, match=r"--tls-key: they must be .* and the key not encrypted"):
        credentials.current()
    encrypted.write_bytes(certificate.key.read_bytes())
    assert credentials.current()[1] is not None


def test_a_byte_order_mark_is_not_part_of_a_token_or_a_password(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("\ufeffs3cret\r\n", encoding="utf-8")
    assert Credentials(HttpSettings(bearer_token_file=secret)).current()[0] == {"Authorization": "Bearer s3cret"}
    basic = HttpSettings(basic_auth_user="me", basic_auth_password_file=secret)
    assert Credentials(basic).current()[0] == {"Authorization": "Basic bWU6czNjcmV0"}


async def test_a_receiver_that_answers_with_what_it_was_sent_shows_no_credentials_to_others(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cretT0ken")

    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=401, text=f"not with {dict(request.headers)}")

    async with listening([web.post("/", echo)], ("127.0.0.1", 0), option="--listen") as (_, port):
        http = Http(HttpSettings(bearer_token_file=tmp_path / "token", headers=(("X-API-Key", "s3cret"),)))
        reply = await http.post(f"http://127.0.0.1:{port}/", b"body", {})
        await http.close()

    assert (reply.status, "s3cret" in reply.text, reply.text.count("***")) == (401, False, 2)


async def test_each_header_is_sent_also_if_its_name_comes_twice_or_has_a_default() -> None:
    headers = (("X-Team", "a"), ("X-Team", "b"), ("user-agent", "mine"))
    received: list[tuple[str, str]] = []

    async def receive(request: web.Request) -> web.Response:
        received.extend((name.lower(), value) for name, value in request.headers.items())
        return web.Response()

    async with listening([web.post("/", receive)], ("127.0.0.1", 0), option="--listen") as (_, port):
        http = Http(HttpSettings(headers=headers))
        await http.post(f"http://127.0.0.1:{port}/", b"body", {})
        await http.close()

    assert [value for name, value in received if name == "x-team"] == ["a", "b"]
    assert [value for name, value in received if name == "user-agent"] == ["mine"]


@pytest.mark.parametrize("times", [1, 300])
async def test_an_answer_that_is_no_http_is_named_in_one_short_line_without_the_path(times: int) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2 " * times + b"\r\n")
        writer.close()

    server, http = await asyncio.start_server(talk, "127.0.0.1", 0), Http(HttpSettings())
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/secret?token=secret"
        reply = await http.post(url, b"body", {})
    await http.close()
    assert reply.status == 0
    assert "Bad status line" in reply.text
    assert "secret" not in reply.text
    assert "\n" not in reply.text
    assert len(reply.text) <= 300


async def test_a_receiver_that_closes_after_its_answer_is_named_without_the_path_of_the_url() -> None:
    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server, http = await asyncio.start_server(answer_and_close, "127.0.0.1", 0), Http(HttpSettings())
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/services/hidden?token=hidden"
        replies = [await http.post(url, b"body", {}) for _ in range(2)]  # the second one on the closed connection
    await http.close()
    assert [reply.status for reply in replies] == [200, 0]
    assert "hidden" not in replies[1].text


@pytest.mark.parametrize(
    "proxy", ["http://user:secret@proxy:port", "http://user:secret@[::1", "socks5://user:secret@proxy:1080"]
)
async def test_a_proxy_that_can_not_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    http = Http(HttpSettings())
    reply = await http.post("https://receiver.example/", b"body", {})
    await http.close()
    assert reply.status == 0
    assert "HTTPS_PROXY" in reply.text
    assert "secret" not in reply.text
