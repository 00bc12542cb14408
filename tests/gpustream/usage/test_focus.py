"""A bill divided by who had the GPUs, as a reader that is not ours reads it: duckdb."""

import csv
import gzip
import json
import tracemalloc
import zipfile
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpustream.usage.focus import (
    ALLOCATED_COLUMNS,
    COST_COLUMNS,
    EXTRA_COLUMNS,
    QUANTITY_COLUMNS,
    Bill,
    BillError,
    Nodes,
    id_forms,
    read_nodes,
)
from gpustream.usage.read import Range
from gpustream.usage.table import By
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS, Usage

NO_NODES = Nodes()
DAY = Range(START_MS, START_MS + 24 * HOUR_MS)
CHARGE = {
    "BilledCost": "98.32",
    "EffectiveCost": "70.0000000001",
    "ListCost": "120",
    "ContractedCost": "-5.01",
    "ConsumedQuantity": "24",
    "PricingQuantity": "",
    "ListUnitPrice": "5.00",
    "ResourceId": "n1",
    "ResourceName": "",
    "ChargePeriodStart": "2026-11-20T00:00:00Z",
    "ChargePeriodEnd": "2026-11-21T00:00:00Z",
    "Tags": '{"env": "prod"}',
    "x_Note": "a,b",
}
FLEET = [
    usage("ml", "bert-0", workload={"kind": "Job", "name": "bert"}, team="vision", labels={"app": "bert"}),
    usage("serving", gpu_uuid="GPU-2", of=7, uuid="MIG-1", slice_ms=3 * HOUR_MS),
    usage(gpu_uuid="GPU-2", of=7, slice_ms=4 * HOUR_MS),
    usage("ml", start_ms=START_MS + 5 * HOUR_MS, device_ms=HOUR_MS // 3),
    usage(start_ms=START_MS + 5 * HOUR_MS, device_ms=HOUR_MS // 3, category="unobserved"),
    usage(start_ms=START_MS + 5 * HOUR_MS, device_ms=HOUR_MS // 3, category="lost"),
    usage("other", node="n2", gpu_uuid="GPU-3"),
]


def bill(tmp_path: Path, *rows: Mapping[str, str], by: By = "namespace", nodes: Nodes = NO_NODES, **more: Any) -> Bill:
    """A bill with these rows, each as ``CHARGE``, except for what is given."""
    path = tmp_path / "bill.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, CHARGE)
        writer.writeheader()
        writer.writerows([{**CHARGE, **row} for row in rows])
    return Bill(path, by, nodes, **more)


def written(tmp_path: Path, focus: Bill, records: Sequence[Usage] = FLEET, time: Range = DAY) -> list[dict[str, Any]]:
    """The bill with its charges divided, as duckdb reads it."""
    for record in records:
        focus.add(record)
    out = tmp_path / "out.csv"
    with out.open("w", newline="") as file:
        csv.writer(file).writerows(focus.lines(time))
    table = duckdb.read_csv(str(out), all_varchar=True)
    return [dict(zip(table.columns, row, strict=True)) for row in table.fetchall()]


def summed(rows: Sequence[Mapping[str, Any]], column: str) -> Decimal:
    return sum((Decimal(row[column]) for row in rows if row[column]), Decimal(0))


def test_a_charge_becomes_one_for_each_holder_and_for_what_nobody_held(tmp_path: Path) -> None:
    rows = written(tmp_path, bill(tmp_path, {}))
    assert [(row["x_UsageCategory"], row["AllocatedResourceId"], row["BilledCost"]) for row in rows] == [
        ("held", "c1/ml", "43.70"),
        ("held", "c1/serving", "14.05"),
        ("free", None, "18.73"),
        ("unobserved", None, "10.92"),
        ("lost", None, "10.92"),
    ]
    assert {row["x_OriginRow"] for row in rows} == {"1"}


def test_what_has_energy_and_no_time_has_no_part_of_a_charge(tmp_path: Path) -> None:
    fleet = [record for record in FLEET if record.category != "lost"]
    expected = written(tmp_path, bill(tmp_path, {}), fleet)
    energy = usage(category="lost", device_ms=0, energy_mj=5)
    assert written(tmp_path, bill(tmp_path, {}), [*fleet, energy]) == expected


def test_costs_and_quantities_add_up_to_the_charge_exactly_and_all_else_is_copied(tmp_path: Path) -> None:
    rows = written(tmp_path, bill(tmp_path, {}))
    for column in (*COST_COLUMNS, *QUANTITY_COLUMNS):
        if column in CHARGE:
            assert summed(rows, column) == Decimal(CHARGE[column] or 0)
    for column in ("ListUnitPrice", "ResourceId", "ChargePeriodStart", "ChargePeriodEnd", "Tags", "x_Note"):
        assert {row[column] for row in rows} == {CHARGE[column]}
    assert {row["PricingQuantity"] for row in rows} == {None}


def test_the_columns_of_allocated_charges_are_what_focus_asks_for(tmp_path: Path) -> None:
    rows = written(tmp_path, bill(tmp_path, {}, by="pod"))
    assert list(rows[0]) == [
        *(name for name in CHARGE if name != "x_Note"),
        *ALLOCATED_COLUMNS,
        "x_Note",
        *EXTRA_COLUMNS,
    ]
    assert {row["AllocatedMethodId"] for row in rows} == {"gpustream-gpu-time"}
    ratios = [json.loads(row["AllocatedMethodDetails"], parse_float=Decimal)["Elements"][0] for row in rows]
    assert sum(row["AllocatedRatio"] for row in ratios) == 1
    assert sum(row["UsageQuantity"] for row in ratios) == 3
    assert {row["UsageUnit"] for row in ratios} == {"GPU-Hours"}
    for row in rows:
        named = [row[name] is not None for name in ("AllocatedResourceId", "AllocatedResourceName", "AllocatedTags")]
        assert named == [row["x_UsageCategory"] == "held"] * 3
    assert json.loads(rows[0]["AllocatedTags"]) == {
        "gpustream/pod": "ml/bert-0",
        "gpustream/namespace": "ml",
        "gpustream/team": "vision",
        "gpustream/workload": "Job/bert",
        "gpustream/label/app": "bert",
        "gpustream/cluster": "c1",
    }


def test_the_tags_of_a_holder_are_those_that_it_had_last_in_the_time_of_the_charge(tmp_path: Path) -> None:
    hourly = [
        {"ChargePeriodStart": f"2026-11-20T0{hour}:00:00Z", "ChargePeriodEnd": f"2026-11-20T0{hour + 1}:00:00Z"}
        for hour in (0, 5)
    ]
    log = [usage("ml", team="vision"), usage("ml", team="speech", start_ms=START_MS + 5 * HOUR_MS)]
    for records in (log, log[::-1]):
        rows = written(tmp_path, bill(tmp_path, *hourly, {}, by="pod"), records)
        teams = [json.loads(row["AllocatedTags"])["gpustream/team"] for row in rows]
        assert teams == ["vision", "speech", "speech"]


def test_other_charges_are_as_they_were_and_counted(tmp_path: Path) -> None:
    volume = {"ResourceId": "vol-1", "BilledCost": "not even a number"}
    before = {"ChargePeriodStart": "2026-11-19T00:00:00Z"}
    focus = bill(tmp_path, volume, {}, before, {"ChargePeriodEnd": ""})
    rows = written(tmp_path, focus)
    unchanged = [row for row in rows if row["AllocatedMethodId"] is None]
    assert [{name: row[name] or "" for name in CHARGE} for row in unchanged] == [
        CHARGE | volume,
        CHARGE | before,
        CHARGE | {"ChargePeriodEnd": ""},
    ]
    assert all(row[name] is None for row in unchanged for name in (*ALLOCATED_COLUMNS, *EXTRA_COLUMNS))
    assert (focus.divided, focus.partly) == (1, 1)
    assert dict(focus.unchanged) == {
        "of no node or GPU that has usage in their time": 1,
        "of a time that is not all counted": 1,
        "of no time, or divided before": 1,
    }


def test_a_bill_that_was_divided_is_not_divided_again(tmp_path: Path) -> None:
    once = written(tmp_path, bill(tmp_path, {}))
    again = Bill(tmp_path / "out.csv", "pod", Nodes())
    assert written(tmp_path, again) == once


@pytest.mark.parametrize("null", ["", "null", "NULL"])
def test_a_charge_whose_allocated_columns_are_null_is_divided(tmp_path: Path, null: str) -> None:
    (tmp_path / "bill.csv").write_text(
        "BilledCost,ResourceId,ChargePeriodStart,ChargePeriodEnd,AllocatedMethodId\n"
        f"98.32,n1,2026-11-20T00:00:00Z,2026-11-20T01:00:00Z,{null}\n"
    )
    rows = written(tmp_path, Bill(tmp_path / "bill.csv", "namespace", NO_NODES), [usage("ml")])
    assert [(row["BilledCost"], row["AllocatedResourceName"]) for row in rows] == [("98.32", "ml")]


def test_an_hourly_charge_has_its_own_hour_only(tmp_path: Path) -> None:
    hours = [
        {"ChargePeriodStart": f"2026-11-20T0{hour}:00:00Z", "ChargePeriodEnd": f"2026-11-20T0{hour + 1}:00:00Z"}
        for hour in (0, 5, 6)
    ]
    rows = written(tmp_path, bill(tmp_path, *hours))
    assert [(row["x_OriginRow"], row["AllocatedResourceName"]) for row in rows] == [
        ("1", "ml"), ("1", "serving"), ("1", None), ("2", "ml"), ("2", None), ("2", None), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("2026-11-20T00:00Z", "2026-11-20T01:00Z"),
        ("2026-11-20T00:00:00.0000000Z", "2026-11-20T01:00:00.0000000Z"),
        ("2026-11-20 00:00:00.000", "2026-11-20 01:00:00.000"),
        ("2026-11-20 00:00:00 UTC", "2026-11-20 01:00:00.000000 UTC"),
        ("2026-11-20T05:30:00+05:30", "2026-11-20T02:00:00+01:00"),
    ],
)
def test_a_time_is_read_in_each_form_in_which_clouds_and_their_databases_write_it(
    tmp_path: Path, start: str, end: str
) -> None:
    focus = bill(tmp_path, {"ChargePeriodStart": start, "ChargePeriodEnd": end})
    assert focus.range == Range(START_MS, START_MS + HOUR_MS)


@pytest.mark.parametrize(
    ("resource", "nodes", "name"),
    [
        ({"ResourceId": "N1"}, Nodes(), "n1"),
        ({"ResourceId": "other", "ResourceName": "n1"}, Nodes(), "n1"),
        ({"ResourceId": "GPU-1"}, Nodes(), "n1"),
        ({"ResourceId": "arn:aws:ec2:eu-west-1:1:instance/i-0ab"}, Nodes({"n1": ["aws:///eu-west-1a/i-0ab"]}), "n1"),
        ({"ResourceId": "i-0ab"}, Nodes({}, "example.com/instance"), "n1"),
        ({"ResourceId": "i-0ab"}, Nodes(), "i-0ab.eu-west-1.compute.internal"),
        ({"ResourceId": "/subscriptions/A/vms/0"}, Nodes({"n1": ["azure:///subscriptions/a/vms/0"]}), "n1"),
    ],
)
def test_a_charge_belongs_to_a_node_by_any_of_its_ids(
    tmp_path: Path, resource: dict[str, str], nodes: Nodes, name: str
) -> None:
    focus = bill(tmp_path, resource, nodes=nodes)
    record = usage("ml", node=name, node_labels={"example.com/instance": "i-0ab"})
    assert [row["AllocatedResourceName"] for row in written(tmp_path, focus, [record])] == ["ml"]


def test_a_number_alone_names_nothing() -> None:
    assert id_forms("azure:///subscriptions/a/vms/0") == {"/subscriptions/a/vms/0"}


def test_a_charge_for_several_nodes_is_divided_by_the_time_of_all(tmp_path: Path) -> None:
    nodes = Nodes({"n1": ["scale-set"], "n2": ["scale-set"]})
    rows = written(tmp_path, bill(tmp_path, {"ResourceId": "scale-set"}, nodes=nodes))
    assert {row["AllocatedResourceName"] for row in rows} == {"ml", "serving", "other", None}


@pytest.mark.parametrize(
    ("resource", "ids", "holders", "shared"),
    [
        ("n1", {}, {"c1/ml", "c2/other"}, ["n1"]),
        ("i-0ab", {"n1": ["i-0ab", "i-0cd"]}, {"c1/ml", "c2/other"}, ["n1"]),
        ("i-0ab", {"c1/n1": ["i-0ab"], "c2/n1": ["i-0cd"]}, {"c1/ml"}, []),
        ("i-0cd", {"c1/n1": ["i-0ab"], "c2/n1": ["i-0cd"]}, {"c2/other"}, []),
        ("scale-set", {"c1/n1": ["scale-set"], "n2": ["scale-set"]}, {"c1/ml", "c3/n2"}, []),
    ],
)
def test_nodes_of_one_name_in_several_clusters_share_a_charge_unless_the_file_tells_them_apart(
    tmp_path: Path, resource: str, ids: Mapping[str, Sequence[str]], holders: set[str], shared: list[str]
) -> None:
    focus = bill(tmp_path, {"ResourceId": resource}, nodes=Nodes(ids))
    records = [
        usage("ml"), usage("other", cluster="c2", gpu_uuid="GPU-2"), usage("n2", cluster="c3", node="n2"),
    ]  # fmt: skip
    rows = written(tmp_path, focus, records)
    assert ({row["AllocatedResourceId"] for row in rows}, focus.shared_nodes) == (holders, shared)


def test_what_else_can_be_summed_is_said_by_the_user(tmp_path: Path) -> None:
    rows = written(tmp_path, bill(tmp_path, {"x_Note": "10.00"}, summed=("x_Note",)))
    assert summed(rows, "x_Note") == 10
    assert len({row["x_Note"] for row in rows}) > 1


@settings(deadline=None, max_examples=20)
@given(
    cost=st.decimals(-10_000, 10_000, allow_nan=False, places=2),
    times=st.lists(st.integers(1, HOUR_MS - 1), min_size=1, max_size=12, unique=True),
)
def test_every_charge_is_divided_to_the_cent(
    tmp_path_factory: pytest.TempPathFactory, cost: Decimal, times: list[int]
) -> None:
    tmp_path = tmp_path_factory.mktemp("bill")
    records = [usage(f"ns-{number}", gpu_uuid=f"GPU-{number}", device_ms=ms) for number, ms in enumerate(times)]
    rows = written(tmp_path, bill(tmp_path, {"BilledCost": str(cost)}), records)
    query = "SELECT sum(BilledCost::DECIMAL(18, 2)), count(*) FROM read_csv(?) GROUP BY x_OriginRow"
    sums = duckdb.execute(query, [str(tmp_path / "out.csv")]).fetchall()
    assert sums == [(cost, len(times))]
    for row, ms in zip(sorted(rows, key=lambda row: int(row["AllocatedResourceName"][3:])), times, strict=True):
        assert abs(Decimal(row["BilledCost"]) - cost * ms / sum(times)) < Decimal("0.01")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it has no column ResourceId"),
        ("a,b\n1,2\n", "it has no column ResourceId"),
        ("ResourceId,ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\n", "it has two columns ResourceId"),
        ("ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\n1,2\n", "row 1 has 2 fields, and the first line 4"),
        ("\xff\xfe", "it can't be read as CSV in UTF-8"),
    ],
)
def test_a_bill_that_is_none_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "bill.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(BillError) as raised:
        Bill(tmp_path / "bill.csv", "namespace", Nodes())
    assert sentence in str(raised.value)


@pytest.mark.parametrize("name", ["bill.csv.gz", "bill.parquet", "bill.xlsx"])
def test_a_bill_in_another_format_is_called_by_its_name(tmp_path: Path, name: str) -> None:
    path, csv_path = tmp_path / name, tmp_path / "bill.csv"
    csv_path.write_text(",".join(CHARGE))
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(csv_path.read_bytes()))
        case ".parquet":
            duckdb.read_csv(str(csv_path)).write_parquet(str(path))
        case _:
            with zipfile.ZipFile(path, "w") as archive:
                archive.write(csv_path)
    kind = {".gz": "a gzip file, which", ".parquet": "a Parquet file", ".xlsx": "a ZIP archive"}[path.suffix]
    with pytest.raises(BillError, match=f"^{path}: it looks like {kind}.*, and a bill must be CSV in UTF-8$"):
        Bill(path, "namespace", NO_NODES)


@pytest.mark.parametrize("cost", ["1,000.00", "EUR 5", "NaN", "Infinity", "1E+999999999"])
def test_a_cost_that_is_no_number_is_said_with_its_row(tmp_path: Path, cost: str) -> None:
    focus = bill(tmp_path, {"ResourceId": "vol-1"}, {"BilledCost": cost})
    with pytest.raises(BillError, match=r"row 2: BilledCost is .*, and must be a number such as 12\.34"):
        written(tmp_path, focus)


def test_the_time_of_a_bill_is_that_of_its_charges(tmp_path: Path) -> None:
    assert bill(tmp_path, {}, {"ChargePeriodEnd": "2026-11-20T00:30:00Z"}).range == DAY
    assert bill(tmp_path, {"ChargePeriodStart": "x"}).range is None


def test_what_many_rows_of_a_bill_have_in_common_is_in_memory_once(tmp_path: Path) -> None:
    columns = [f"x_{number}" for number in range(50)]
    row = {**CHARGE, **dict.fromkeys(columns, "a text that each row has")}
    with (tmp_path / "large.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows(row for _ in range(1000))
    tracemalloc.start()
    large = Bill(tmp_path / "large.csv", "namespace", NO_NODES)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert large.range == DAY
    assert held_bytes < 1000 * 2000


def test_a_file_of_nodes_has_an_id_and_a_name_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("# from kubectl\naws:///a/i-0ab  n1\n\ni-0cd,n1\n")
    assert read_nodes(file) == {"n1": ["aws:///a/i-0ab", "i-0cd"]}
    file.write_text("i-0cd n1\n", encoding="utf-8-sig")
    assert read_nodes(file) == {"n1": ["i-0cd"]}
    file.write_text('"ID","NODE"\r\n"i-0cd","n1"\r\n')
    assert read_nodes(file)["n1"] == ["i-0cd"]
    file.write_text("n1\n")
    with pytest.raises(BillError, match="nodes:1: it must be"):
        read_nodes(file)
    file.write_bytes(b"i-0cd \xff\n")
    with pytest.raises(BillError, match="can't be read as text in UTF-8"):
        read_nodes(file)


def test_no_holder_of_a_bill_is_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    rows = written(tmp_path, bill(tmp_path, {}), [usage("=HYPERLINK(1)")])

    assert {row["AllocatedResourceName"] for row in rows} == {"'=HYPERLINK(1)"}


def test_a_category_of_a_later_version_is_neither_a_formula_nor_steers_a_terminal(tmp_path: Path) -> None:
    row, *_ = written(tmp_path, bill(tmp_path, {}), [usage(category="=lent\x1b[31m")])
    assert row["x_UsageCategory"] == "'=lent?[31m"


def test_no_name_of_a_bill_steers_a_terminal_and_the_tags_have_it_whole(tmp_path: Path) -> None:
    name = "vision\x9b31m\u202e\U000e0001é"
    row, *_ = written(tmp_path, bill(tmp_path, {}, by="team"), [usage("ml", team=name)])
    assert all(field.isprintable() for field in row.values() if field)
    assert row["AllocatedResourceName"] == "vision?31m??é"
    assert json.loads(row["AllocatedTags"]) == {"gpustream/team": name}
