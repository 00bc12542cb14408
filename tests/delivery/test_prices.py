"""The file of prices: the entry that is a window's price, and one sentence for each error of a file."""

from decimal import Decimal
from pathlib import Path

import pytest

from delivery.prices import Prices, PricesError, load
from tests.usage_records import START_MS

YAML = """
currency: EUR
prices:
  - model: NVIDIA H100*
    per_gpu_hour: 1.10
    node_labels: {karpenter.sh/capacity-type: spot, paid: true}
  - {model: NVIDIA H100*, per_gpu_hour: 2.95, from: 2026-11-20, to: 2026-11-21T00:00:00+01:00}
  - {model: tesla t4, per_gpu_hour: 1}
"""

TOML = """
currency = "EUR"

[[prices]]
model = "NVIDIA H100*"
per_gpu_hour = 1.10
node_labels = {"karpenter.sh/capacity-type" = "spot", paid = "true"}

[[prices]]
model = "NVIDIA H100*"
per_gpu_hour = 2.95
from = 2026-11-20
to = 2026-11-21T00:00:00+01:00

[[prices]]
model = "tesla t4"
per_gpu_hour = 1
"""

SPOT = {"karpenter.sh/capacity-type": "spot", "paid": "true", "zone": "a"}


def loaded(tmp_path: Path, text: str, name: str = "prices.yaml") -> Prices:
    (tmp_path / name).write_text(text)
    return load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "name"), [(YAML, "prices.yaml"), (TOML, "prices.toml"), (f"\ufeff{TOML}", "prices.toml")]
)
def test_the_first_entry_that_matches_is_the_price(tmp_path: Path, text: str, name: str) -> None:
    prices = loaded(tmp_path, text, name)
    h100, hour = "NVIDIA H100 80GB HBM3", 3_600_000
    assert prices.currency == "EUR"
    assert prices.price_of(h100, START_MS, SPOT) == Decimal("1.10")
    assert prices.price_of(h100, START_MS, {**SPOT, "paid": "false"}) == Decimal("2.95")
    assert prices.price_of(h100, START_MS - hour, {}) is None
    assert prices.price_of(h100, START_MS + 22 * hour, {}) == Decimal("2.95")
    assert prices.price_of(h100, START_MS + 23 * hour, {}) is None
    assert prices.price_of("Tesla T4", START_MS, {}) == 1
    assert prices.price_of("Tesla T4 more", START_MS, {}) is None


def test_a_price_is_the_exact_decimal_of_the_file(tmp_path: Path) -> None:
    text = "currency: EUR\nprices: [{model: a, per_gpu_hour: 0.1234567890123456789}]"
    assert loaded(tmp_path, text).price_of("a", 0, {}) == Decimal("0.1234567890123456789")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "prices.yaml:1: expected the node content"),
        pytest.param("prices: " + "[" * 1000, "it is nested too deeply", id="nested"),
        pytest.param("#" * (1 << 20) + "\n", "it is larger than 1 MiB", id="large"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1, from: !!timestamp soon}]", "prices.yaml: "),
        ("currency: EUR", "it needs a list `prices`"),
        ("currency: EUR\nprices: []", "it needs a list `prices`"),
        ("prices: [{model: a, per_gpu_hour: 1}]", "`currency` must name the currency"),
        ("currency: EUR\nmore: 1\nprices: [{model: a, per_gpu_hour: 1}]", "`more` is not known"),
        ("currency: EUR\nprices: [a]", "price 1: it must have `model` and `per_gpu_hour`"),
        ("currency: EUR\nprices: [{per_gpu_hour: 1}]", "price 1: `model` must be"),
        ("currency: EUR\nprices: [{model: a}]", "price 1: `per_gpu_hour` must be a number"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: -1}]", "price 1: `per_gpu_hour` must be a number"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: .nan}]", "price 1: `per_gpu_hour` must be a number"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1e999999999}]", "price 1: `per_gpu_hour` must be a number"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: true}]", "price 1: `per_gpu_hour` must be a number"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1, form: x}]", "price 1: `form` is not known"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1, from: soon}]", "price 1: `from` must be a date"),
        (
            "currency: EUR\nprices: [{model: a, per_gpu_hour: 1, from: 2026-02-01, to: 2026-01-01}]",
            "price 1: `from` must be before `to`",
        ),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1, node_labels: [a]}]", "price 1: `node_labels` must be"),
        ("currency: EUR\nprices: [{model: a, per_gpu_hour: 1, model: b}]", "prices.yaml:2: model stands twice"),
        (
            "currency: EUR\nprices: [{model: a, per_gpu_hour: 1, to: 2026-02-01},"
            " {model: A, per_gpu_hour: 2, from: 2026-01-01}]",
            "price 2: price 1 has the same model and node labels, and some of the same time",
        ),
        (
            "currency: EUR\nprices: [{model: a, per_gpu_hour: 1}, {model: a, per_gpu_hour: 2, from: 2026-01-01}]",
            "price 2: price 1 has the same model",
        ),
    ],
)
def test_an_error_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(PricesError, match=r"prices\.yaml:(\d+:)? ") as raised:
        loaded(tmp_path, text)
    assert sentence in str(raised.value)


def test_a_number_without_end_in_toml_is_no_price(tmp_path: Path) -> None:
    number = "0x" + "f" * 4000
    (tmp_path / "prices.toml").write_text(f'currency = "EUR"\n[[prices]]\nmodel = "a"\nper_gpu_hour = {number}\n')
    with pytest.raises(PricesError, match="price 1: `per_gpu_hour` must be a number"):
        load(tmp_path / "prices.toml")


def test_a_price_for_more_time_than_an_earlier_one_is_for_the_rest(tmp_path: Path) -> None:
    rows = "[{model: a, per_gpu_hour: 1, from: 1970-01-02, to: 1970-01-03}, {model: a, per_gpu_hour: 2}]"
    prices = loaded(tmp_path, f"currency: EUR\nprices: {rows}")
    assert [prices.price_of("a", day * 86_400_000, {}) for day in range(3)] == [2, 1, 2]


def test_a_file_that_is_not_utf_8_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_bytes("currency: EUR\n# f\u00fcr alle\n".encode("latin-1"))
    with pytest.raises(PricesError, match=r"prices\.yaml:2: it is not UTF-8"):
        load(tmp_path / "prices.yaml")


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(PricesError) as raised:
        loaded(tmp_path, "prices: [{model: a}, {per_gpu_hour: 1}]")
    assert len(str(raised.value).splitlines()) == 3
