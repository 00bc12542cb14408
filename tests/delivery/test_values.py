"""The values that options accept and refuse."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery import values
from delivery.values import Address
from topics import TOPICS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30.0),
        ("15m", 900.0),
        ("2h", 7200.0),
        ("1.5s", 1.5),
        ("10", 10.0),
        ("7d", 604_800.0),
        (" 3 s ", 3.0),
    ],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert values.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1S", "1 0s", "nan", "inf", "1e3", "0x10"])
def test_a_malformed_duration_is_refused_with_the_right_spelling(text: str) -> None:
    with pytest.raises(ValueError, match="500ms, 30s, 15m, 2h, 7d or 1h30m"):
        values.duration(text)


@pytest.mark.parametrize(
    ("text", "count"), [("512B", 512), ("64KiB", 65536), ("4MiB", 4194304), ("1GiB", 2**30), ("7", 7)]
)
def test_a_size_is_bytes(text: str, count: int) -> None:
    assert values.size(text) == count


@pytest.mark.parametrize("text", ["64kb", "64KB", "-1", "KiB", ""])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64KiB"):
        values.size(text)


def test_a_fleet_is_nodes_times_gpus() -> None:
    assert values.fleet_size(" 100x8 ") == "100x8"


@pytest.mark.parametrize("text", ["", "4", "4x", "x8", "0x8", "4x0", "4X8", "-4x8", "4x8x2"])
def test_a_malformed_fleet_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="4x8"):
        values.fleet_size(text)


@pytest.mark.parametrize("text", ["kafka:9092", "a:1,b:2", "10.0.0.1:65535", "[::1]:9092", "a:1, b:2"])
def test_brokers_are_hosts_and_ports(text: str) -> None:
    assert values.host_ports(text) == text.replace(" ", "")


@pytest.mark.parametrize(
    "text",
    ["", "kafka", "kafka:", ":9092", "kafka:0", "kafka:65536", "a:1,,b:2", "a b:1", "http://a:1", "a:" + "9" * 5000],
    ids=lambda text: text[:20],
)
def test_a_malformed_broker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        values.host_ports(text)


def test_listening_is_an_address_or_off() -> None:
    assert values.listen("off") is None
    assert values.listen("127.0.0.1:9401") == Address("127.0.0.1", 9401)
    assert values.listen("[::]:0") == Address("::", 0)
    assert str(values.listen("[::]:0")) == "[::]:0"


@pytest.mark.parametrize(
    "text", ["", ":9401", "9401", "on", "127.0.0.1:x", "a:" + "9" * 5000], ids=lambda text: text[:20]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="or off"):
        values.listen(text)


@pytest.mark.parametrize("text", ["http://p:9090/api/v1/write", "https://u:s3cret@mimir/api?x=1", "http://[::1]:9090/"])
def test_a_url_is_taken_as_given(text: str) -> None:
    assert values.url(text) == text


@pytest.mark.parametrize(
    "text", ["", "p:9090", "ftp://p/", "http://", "http:///x", "http://p:99999/", "http://p/a b", "http://[::1/"]
)
def test_a_malformed_url_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a URL that begins with http:// or https://"):
        values.url(text)


def test_a_header_is_a_name_and_a_value() -> None:
    assert values.header("X-Scope-OrgID:  team-a ") == ("X-Scope-OrgID", "team-a")


@pytest.mark.parametrize("text", ["", "s3cret", ": s3cret", "A B: s3cret", "A:", "A: s3cret\nB: c", "A: s3cret\rB: c"])
def test_a_refused_header_is_not_repeated_as_it_may_hold_a_secret(text: str) -> None:
    with pytest.raises(ValueError, match="not a header") as refused:
        values.header(text)

    assert "s3cret" not in str(refused.value)


def test_a_label_is_a_name_and_a_value() -> None:
    assert values.label("region=eu=west") == ("region", "eu=west")


@pytest.mark.parametrize("text", ["", "region", "region=", "=eu", "a-b=c", "1a=b", "__name__=up", "__x=y"])
def test_a_malformed_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a label such as region=eu"):
        values.label(text)


def test_a_new_group_starts_at_an_end_or_some_time_ago() -> None:
    assert values.start_from("earliest") == "earliest"
    assert values.start_from("latest") == "latest"
    assert values.start_from("1h") == pytest.approx(3600.0)
    with pytest.raises(ValueError, match="earliest, latest"):
        values.start_from("yesterday")


@given(st.text())
def test_names_are_letters_digits_dots_underscores_and_dashes(text: str) -> None:
    allowed = 0 < len(text) < 254 and all(c.isascii() and (c.isalnum() or c in "._-") for c in text)
    if allowed:
        assert values.name(text) == text
    else:
        with pytest.raises(ValueError, match="A-Z a-z 0-9"):
            values.name(text)


def test_a_topic_prefix_leaves_room_for_the_name_of_every_topic() -> None:
    longest = 249 - max(map(len, TOPICS))
    for prefix in ("", "team-a.", "Team_b-", "p" * longest):
        assert values.topic_prefix(prefix) == prefix
    for prefix in ("p" * (longest + 1), "team a.", "team/a", "t\u00e4m-"):
        with pytest.raises(ValueError, match=f"at most {longest} of A-Z a-z 0-9"):
            values.topic_prefix(prefix)


@given(st.text())
def test_no_text_makes_a_parser_fail_otherwise_than_with_a_value_error(text: str) -> None:
    parsers = (values.duration, values.size, values.fleet_size, values.host_ports, values.listen, values.url)

    assert {_outcome(parse, text) for parse in parsers} <= {"parsed", "refused"}


def _outcome(parse: Callable[[str], object], text: str) -> str:
    try:
        parse(text)
    except ValueError:
        return "refused"
    return "parsed"


def test_a_socket_is_an_absolute_path_or_off() -> None:
    assert values.socket_path(" /run/kubelet.sock ") == Path("/run/kubelet.sock")
    assert values.socket_path("OFF") is None


@pytest.mark.parametrize("text", ["", "kubelet.sock", "./kubelet.sock", "unix:///run/kubelet.sock", "/" + 107 * "x"])
def test_a_malformed_socket_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="absolute path"):
        values.socket_path(text)


def test_prefixes_are_separated_by_commas() -> None:
    assert values.prefixes("nvidia.com/, k8s.amazonaws.com/vgpu") == ("nvidia.com/", "k8s.amazonaws.com/vgpu")


@pytest.mark.parametrize("text", ["", "nvidia.com", "/", "nvidia.com/,", "nvidia .com/", "cpu"])
def test_a_prefix_of_no_extended_resource_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nvidia\.com/"):
        values.prefixes(text)


def test_names_are_separated_by_commas() -> None:
    assert values.names("app, app.kubernetes.io/*,") == ("app", "app.kubernetes.io/*")
    assert values.names("") == ()


def test_a_malformed_list_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match="list of names"):
        values.names("app team")


def test_a_lease_has_a_namespace_and_a_name_or_is_off() -> None:
    assert values.lease(" gpustream/one ") == "gpustream/one"
    assert values.lease("off") is None


@pytest.mark.parametrize("text", ["", "one", "/one", "gpustream/", "a/b/c"])
def test_a_malformed_lease_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAMESPACE/NAME"):
        values.lease(text)


@given(st.integers(0, 10**10).map(lambda ms: ms / 1000))
def test_a_duration_is_written_as_it_is_read(seconds: float) -> None:
    assert values.duration(values.duration_text(seconds)) == pytest.approx(seconds)


def test_a_duration_of_more_than_ten_years_is_refused() -> None:
    with pytest.raises(ValueError, match="ten years"):
        values.duration("4000d")


@given(st.integers(0, 2**40))
def test_a_size_is_written_as_it_is_read(count: int) -> None:
    assert values.size(values.size_text(count)) == count


@pytest.mark.parametrize(("seconds", "text"), [(60, "1m"), (90, "90s"), (900, "15m"), (0.5, "500ms"), (86_400, "1d")])
def test_a_duration_is_written_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert values.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("30s", 30_000), (" 15 m ", 900_000), ("2h", 7_200_000), ("7d", 604_800_000),
                     ("90", 90_000), ("1.5h", 5_400_000), ("0", 0), ("1h30m", 5_400_000), ("1d2h3m4s5ms", 93_784_005)]
)  # fmt: skip
def test_a_duration_is_read_in_whole_milliseconds(text: str, ms: int) -> None:
    assert values.milliseconds(text) == ms


@pytest.mark.parametrize(
    "text", ["", " ", "h", "1w", "-1s", "1e3", "30m1h", "١s", "1.s", ".5s", "nan", "1" * 13, "4000d"]
)
def test_a_malformed_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|ten years"):
        values.milliseconds(text)


@given(st.text(max_size=8))
def test_any_text_is_a_duration_of_at_most_ten_years_or_an_error(text: str) -> None:
    try:
        ms = values.milliseconds(text)
    except ValueError:
        return
    assert 0 <= ms <= 3650 * 86_400_000


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0s"), (499, "0s"), (1_000, "1s"), (61_000, "1m 1s"), (900_000, "15m"), (5_400_000, "1h 30m"),
                     (90_061_000, "1d 1h"), (86_401_000, "1d 1s")]
)  # fmt: skip
def test_a_duration_reads_as_its_two_largest_units(ms: int, text: str) -> None:
    assert values.duration_words(ms) == text
