"""What is said at the end of a run to have been seen."""

import msgspec

from gpustream.sightings import Sightings
from tests.gpustream.test_fleet import gpu, tick
from tests.sinks.alerts import START_MS, alert


def test_what_was_seen_is_said_in_the_end() -> None:
    sightings = Sightings()
    mig = {"uuid": "m", "parent_uuid": "b", "profile": "1g.10gb"}
    xid = {"events": [{"kind": "xid", "code": 31, "ts_ms": 900}]}
    begin = START_MS - 21_000
    sightings.tick(tick(gpu("a", 0.5, "ml/x", "ml/y", "ml/z"), gpu("m", None, "ml/x", mig=mig), ts_ms=begin))
    sightings.tick(tick(gpu("a", 0.5, "ml/x", "ml/new") | xid, seq=2, ts_ms=begin + 1000))
    sightings.tick(tick(gpu("a", 0.5, "ml/x", "ml/new", state="lost"), seq=3, ts_ms=begin + 2000))
    sightings.tick(tick(gpu("a", 0.5, "ml/x", "ml/new"), seq=4, ts_ms=begin + 3000))
    for pod in ("x", "new"):
        sightings.alert(alert(pod))
    sightings.alert(msgspec.structs.replace(alert("x"), revision=1))

    assert sightings.lines() == [
        "up to 3 pods at a time; 1 came, 2 went",
        "3 pods that share GPU 0 of n",
        "1 MIG devices that pods held",
        "XID 31 on GPU 0 of n, held by x",
        "GPU 0 of n lost, and back",
        "GPUHeldIdle: 2 alerts, the first 21 s after the start",
    ]


def test_an_alert_of_before_the_run_was_not_seen_in_it() -> None:
    sightings = Sightings()
    sightings.tick(tick(gpu("a"), ts_ms=START_MS + 60_000))
    sightings.alert(alert("x"))

    assert sightings.lines() == []


def test_a_gpu_that_is_cut_is_lost_once() -> None:
    migs = [{"uuid": f"m{number}", "parent_uuid": "a", "profile": "1g.10gb"} for number in range(7)]
    sightings = Sightings()
    sightings.tick(tick(gpu("a", None, state="lost"), *(gpu(mig["uuid"], None, mig=mig, state="lost") for mig in migs)))

    assert sightings.lines() == ["GPU 0 of n lost"]

    sightings.tick(tick(gpu("a", 0.0), seq=2))

    assert sightings.lines() == ["GPU 0 of n lost, and back"]


def test_long_runs_with_many_errors_stay_small() -> None:
    sightings = Sightings()
    for number in range(1, 100):
        event = {"events": [{"kind": "xid", "code": number}]}
        sightings.tick(tick(gpu("a", 0.5, f"ml/p{number}", state="lost") | event, seq=number))

    assert sightings.lines()[0] == "up to 1 pods at a time; 98 came, 98 went"
    assert len(sightings.lines()) == 6
