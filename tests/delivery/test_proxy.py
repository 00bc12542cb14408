"""Which proxy the environment names for a URL."""

import pytest

from delivery.proxy import ProxyError, proxy_of

NO_PROXY = "localhost, .svc,cluster.local ,10.0.0.0/8,192.0.2.7,fd00::/8,registry.example:5000,not/a/network,"
PROXY = "http://user:pass@proxy.example:3128"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_proxies_in_the_environment_there_is_none() -> None:
    assert proxy_of("https://mimir.example/api/v1/push") is None


@pytest.mark.parametrize(
    ("url", "is_proxied"),
    [
        ("https://mimir.example/api/v1/push", True),
        ("https://MIMIR.example:8443/", True),
        ("https://11.0.0.1/", True),
        ("https://192.0.2.8/", True),
        ("https://[2001:db8::1]:9090/", True),
        ("https://registry.example/", True),
        ("https://localhosts/", True),
        ("http://mimir.example/", False),  # that is HTTP_PROXY's
        ("https://localhost:9090/", False),
        ("https://127.0.0.1:9090/", False),
        ("https://127.8.9.10/", False),
        ("https://[::1]:9090/", False),
        ("https://prometheus.monitoring.svc:9090/", False),
        ("https://prometheus.monitoring.svc.cluster.local/", False),
        ("https://user:pass@a.cluster.local/", False),
        ("https://10.1.2.3:9090/", False),
        ("https://192.0.2.7/", False),
        ("https://[fd00::1]/", False),
        ("https://registry.example:5000/", False),
    ],
)
def test_what_no_proxy_has_and_this_machine_itself_are_reached_directly(
    url: str, is_proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", NO_PROXY)
    assert proxy_of(url) == (PROXY if is_proxied else None)


@pytest.mark.parametrize("excepted", ["*", "10.0.0.0/8, *"])
def test_a_star_means_everything(monkeypatch: pytest.MonkeyPatch, excepted: str) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", excepted)
    assert proxy_of("https://mimir.example/") is None


@pytest.mark.parametrize(
    ("url", "is_proxied"),
    [
        ("https://prometheus.monitoring.svc:9090/", False),
        ("https://PROMETHEUS.monitoring.svc/", False),
        ("https://svc/", True),
        ("https://notsvc/", True),
    ],
)
def test_a_star_before_a_name_means_all_names_below_it(
    monkeypatch: pytest.MonkeyPatch, url: str, is_proxied: bool
) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", "localhost, *.svc")
    assert proxy_of(url) == (PROXY if is_proxied else None)


@pytest.mark.parametrize(
    "url", ["https://prometheus.monitoring.svc.:9090/", "https://a.svc./", "https://localhost.:1/"]
)
def test_a_whole_name_may_end_with_a_dot(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", ".svc")
    assert proxy_of(url) is None


def test_a_proxy_without_a_scheme_speaks_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    assert proxy_of("http://mimir.example/") == "http://proxy.example:3128"


@pytest.mark.parametrize("proxy", ["socks5://user:pass@proxy.example:1080", "http://[::1:3128", "http://"])
def test_a_proxy_that_can_not_be_used_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(ProxyError, match=r"^HTTP_PROXY ") as raised:
        proxy_of("http://mimir.example/")
    assert "pass" not in str(raised.value)
    assert proxy_of("http://127.0.0.1/") is None
