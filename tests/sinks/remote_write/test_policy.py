"""The meaning of a receiver's answers."""

from pathlib import Path

import pytest

from sinks.remote_write import policy
from sinks.remote_write.policy import Answer, Meaning, Protocol, meaning, refusal

NOW_MS = 1_795_219_152_000

MIMIR_BURST = (
    "the request has been rejected because the tenant exceeded the ingestion burst size limit, set to 6, with {} "
    "items. This limit is applied on the total number of samples, exemplars and metadata received across all "
    "distributors "
    "(err-mimir-tenant-max-ingestion-rate)"
)
MIMIR_RATE = (
    "the request has been rejected because the tenant exceeded the ingestion rate limit, set to 50 items/s with a "
    "maximum allowed burst of {}. This limit is applied on the total number of samples, exemplars and metadata "
    "received across all distributors (err-mimir-tenant-max-ingestion-rate)"
)
MIMIR_REQUESTS = (
    "the request has been rejected because the tenant exceeded the request rate limit, set to 2 requests/s across all "
    "distributors with a maximum allowed burst of 2 (err-mimir-tenant-max-request-rate)"
)


@pytest.mark.parametrize(
    ("answer", "protocol", "expected"),
    [
        (Answer(200), "1.0", "accepted"),
        (Answer(204), "1.0", "accepted"),
        (Answer(204, written=7), "2.0", "accepted"),
        (Answer(204, written=6), "2.0", "refused"),
        (Answer(204), "2.0", "not-2.0"),
        (Answer(415), "2.0", "not-2.0"),
        (Answer(400, "cannot parse"), "2.0", "not-2.0"),
        (Answer(400, written=3), "2.0", "refused"),
        (Answer(400), "1.0", "refused"),
        (Answer(409), "1.0", "refused"),
        (Answer(413), "1.0", "too-large"),
        (Answer(413), "2.0", "too-large"),
        (Answer(429, "per-user series limit of 150000 exceeded"), "1.0", "refused"),
        (Answer(429, "ingestion rate limit (25000) exceeded"), "1.0", "again"),
        (Answer(429, MIMIR_BURST.format(7)), "1.0", "too-large"),
        (Answer(429, MIMIR_BURST.format(14), written=7), "2.0", "too-large"),
        (Answer(429, MIMIR_RATE.format(6)), "1.0", "too-large"),
        (Answer(429, MIMIR_RATE.format(7)), "1.0", "again"),
        (Answer(429, MIMIR_RATE.format(13), written=7), "2.0", "too-large"),  # a sample may bring its metadata
        (Answer(429, MIMIR_RATE.format(14), written=7), "2.0", "again"),
        (Answer(429, MIMIR_REQUESTS), "1.0", "again"),
        (Answer(410), "1.0", "misconfigured"),
        (Answer(422), "1.0", "refused"),
        (Answer(415), "1.0", "misconfigured"),
        (Answer(401), "1.0", "misconfigured"),
        (Answer(403), "1.0", "misconfigured"),
        (Answer(405), "1.0", "misconfigured"),
        (Answer(407), "1.0", "misconfigured"),
        (Answer(404), "2.0", "misconfigured"),
        (Answer(300), "1.0", "misconfigured"),
        (Answer(302), "1.0", "misconfigured"),
        (Answer(0, "refused"), "1.0", "again"),
        (Answer(408), "1.0", "again"),
        (Answer(425), "1.0", "again"),
        (Answer(429, retry_after_s=3), "2.0", "again"),
        (Answer(500), "1.0", "server-error"),
        (Answer(502), "1.0", "again"),
        (Answer(503), "2.0", "again"),
        (Answer(504), "1.0", "again"),
        (Answer(507), "1.0", "again"),
    ],
)
def test_each_status_has_its_policy(answer: Answer, protocol: Protocol, expected: Meaning) -> None:
    assert meaning(answer, protocol, 7) == expected


def test_the_policy_in_the_docs_is_the_one_in_the_code() -> None:
    page = Path("docs/how-to/prometheus.md").read_text()
    documented = page.partition("## What becomes of an answer\n\n")[2].partition("\n\n## ")[0]
    assert documented in (policy.__doc__ or "")


def test_a_refusal_without_a_count_is_no_sign_of_1_0_once_the_receiver_counted() -> None:
    assert meaning(Answer(400), "2.0", 7, speaks_2_0=True) == "refused"
    assert meaning(Answer(415), "2.0", 7, speaks_2_0=True) == "not-2.0"
    assert meaning(Answer(204), "2.0", 7, speaks_2_0=True) == "not-2.0"


@pytest.mark.parametrize(
    ("text", "ts_ms", "reason"),
    [
        ("out of order sample", NOW_MS, "out_of_order"),
        ("the sample has been rejected (err-mimir-sample-out-of-order)", NOW_MS, "out_of_order"),
        ("too old sample", NOW_MS, "too_old"),
        ("rejected (err-mimir-sample-timestamp-too-old). out of order window 5m", NOW_MS, "too_old"),
        ("out of bounds", NOW_MS - 7_200_000, "too_old"),
        ("out of bounds", NOW_MS + 1_800_000, "too_far_ahead"),
        ("timestamp is too far in the future", NOW_MS, "too_far_ahead"),
        ("err-mimir-too-far-in-future", NOW_MS, "too_far_ahead"),
        ("duplicate sample for timestamp", NOW_MS, "duplicate"),
        ("err-mimir-sample-duplicate-timestamp", NOW_MS, "duplicate"),
        ("per-user series limit of 150000 exceeded (err-mimir-max-series-per-user)", NOW_MS, "series_limit"),
        ("per-metric series limit of 20000 exceeded (err-mimir-max-series-per-metric)", NOW_MS, "series_limit"),
        ("the tenant exceeded the limit of 10000 active series", NOW_MS, "series_limit"),
        ("err-mimir-max-active-series", NOW_MS, "series_limit"),
        ("sample with repeated timestamp but different value", NOW_MS, "duplicate"),
        ("timestamp too new: 1795219999000", NOW_MS, "too_far_ahead"),
        ("label value too long", NOW_MS, "rejected"),
        ("received a series whose number of labels exceeds the limit", NOW_MS, "rejected"),
        ("", NOW_MS, "rejected"),
    ],
)
def test_a_refusal_is_counted_by_its_reason(text: str, ts_ms: int, reason: str) -> None:
    assert refusal(Answer(400, text), ts_ms, NOW_MS).reason == reason


def test_a_refusal_is_reported_in_one_line() -> None:
    assert refusal(Answer(400, "a\n b\n" + "x" * 999), NOW_MS, NOW_MS).text.startswith("a b xxx")
    assert "\n" not in refusal(Answer(400, "a\nb"), NOW_MS, NOW_MS).text
    assert refusal(Answer(422), NOW_MS, NOW_MS).text == "HTTP 422"
    assert refusal(Answer(204, written=0), NOW_MS, NOW_MS).reason == "not_written"
    assert refusal(Answer(500, "boom"), NOW_MS, NOW_MS).reason == "server_error"
    assert refusal(Answer(409, "store locally for endpoint: conflict"), NOW_MS, NOW_MS).reason == "conflict"
    assert refusal(Answer(413, "out of order"), NOW_MS, NOW_MS).reason == "too_large"
    assert refusal(Answer(429, MIMIR_BURST.format(7)), NOW_MS, NOW_MS).reason == "too_large"
    assert refusal(Answer(429, MIMIR_RATE.format(6)), NOW_MS, NOW_MS).reason == "too_large"
