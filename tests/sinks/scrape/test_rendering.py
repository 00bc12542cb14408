"""What is rendered beside the event loop, for which requests, and how often."""

import asyncio
import gzip
import random
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from sinks.scrape import exposition
from sinks.scrape.exposition import PIECE_BYTES, GivenUp, Renderings, pieces
from sinks.series.model import SampleGroup
from tests.sinks.scrape.fleet import BERT, EVERY_KEY, exposed, full_node, node
from tests.sinks.scrape.handler import groups_of

DEVICES = groups_of(full_node())
RENDER = exposition.exposition


@dataclass
class HeldEncoder:
    """An encoder that waits for ``go``, and remembers its threads and how many renderings ran at once."""

    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    threads: list[int] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def encode(self, groups: Iterable[SampleGroup], *args: Any, **kwargs: Any) -> Iterator[bytes]:
        """Waits for ``go``, then renders."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.threads.append(threading.get_ident())
        self.began.set()
        assert self.go.wait(30)
        text = RENDER(groups, *args, **kwargs)
        self.at_once -= 1
        return text

    async def under_way(self) -> None:
        """Wait until a rendering has begun."""
        await asyncio.to_thread(self.began.wait, 30)


@contextmanager
def rendering(devices: list[SampleGroup]) -> Iterator[Renderings]:
    """Renderings of these devices, closed after."""
    renderings = Renderings(lambda: devices)
    try:
        yield renderings
    finally:
        renderings.close()


@pytest.fixture
def held_encoder(monkeypatch: pytest.MonkeyPatch) -> HeldEncoder:
    encoder = HeldEncoder()
    monkeypatch.setattr(exposition, "exposition", encoder.encode)
    return encoder


async def test_a_scrape_gets_what_is_shown_now() -> None:
    devices = list(DEVICES)
    with rendering(devices) as renderings:
        assert gzip.decompress(await renderings.compressed()).decode() == exposed(DEVICES)
        devices.clear()
        assert gzip.decompress(await renderings.compressed()).decode() == exposed([])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_a_rendering_is_written_in_pieces(size: int, packed: bool) -> None:
    text = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
    compressed = gzip.compress(text)
    written = list(pieces(compressed, packed=packed))

    assert b"".join(written) == (compressed if packed else text)
    assert max(map(len, written)) <= PIECE_BYTES


async def test_a_rendering_takes_less_memory_than_its_text() -> None:
    devices = [{"uuid": f"GPU-{n}", "index": n, "minor": n, "metrics": EVERY_KEY, "holders": [BERT]} for n in range(8)]
    groups = [group for n in range(30) for group in groups_of(node(*devices, name=f"gpu-node-{n}"))]
    with rendering(groups) as renderings:
        await renderings.compressed()  # from then on the sets keep the texts of their labels
        tracemalloc.start()
        try:
            compressed = await renderings.compressed()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes < len(gzip.decompress(compressed))


async def test_scrapes_at_the_same_time_share_a_rendering_which_leaves_the_event_loop_free(
    held_encoder: HeldEncoder,
) -> None:
    with rendering(DEVICES) as renderings:
        scrapes = [asyncio.create_task(renderings.compressed()) for _ in range(5)]
        await held_encoder.under_way()
        assert not any(scrape.done() for scrape in scrapes)
        held_encoder.go.set()
        texts = await asyncio.gather(*scrapes)

    assert len(held_encoder.threads) == 1
    assert held_encoder.threads != [threading.get_ident()]
    assert len({id(text) for text in texts}) == 1
    assert gzip.decompress(texts[0]) == exposed(DEVICES).encode()


async def test_what_is_asked_for_is_rendered_one_after_the_other(held_encoder: HeldEncoder) -> None:
    with rendering(DEVICES) as renderings:
        scrapes = [asyncio.create_task(renderings.compressed(frozenset({f"gpu_{n}"}))) for n in range(3)]
        await held_encoder.under_way()
        held_encoder.go.set()
        await asyncio.gather(*scrapes)

    assert (len(held_encoder.threads), held_encoder.most_at_once) == (3, 1)


async def test_a_scraper_that_goes_away_takes_nothing_from_the_others(held_encoder: HeldEncoder) -> None:
    with rendering(DEVICES) as renderings:
        leaving, stays = [asyncio.create_task(renderings.compressed()) for _ in range(2)]
        await held_encoder.under_way()
        leaving.cancel()
        await asyncio.wait([leaving])
        held_encoder.go.set()
        assert gzip.decompress(await stays) == exposed(DEVICES).encode()
    assert leaving.cancelled()


async def test_a_rendering_that_nobody_waits_for_any_more_keeps_no_other_waiting(held_encoder: HeldEncoder) -> None:
    with rendering(DEVICES) as renderings:
        leaving = [asyncio.create_task(renderings.compressed(frozenset({f"gpu_{n}"}))) for n in range(50)]
        await held_encoder.under_way()
        for scrape in leaving:
            scrape.cancel()
        await asyncio.wait(leaving)
        stays = asyncio.create_task(renderings.compressed())
        await asyncio.sleep(0)
        held_encoder.go.set()
        assert gzip.decompress(await stays) == exposed(DEVICES).encode()

    assert len(held_encoder.threads) == 2  # of those who left, only the one that was under way


async def test_what_comes_during_a_rendering_is_not_in_it_but_in_the_next(held_encoder: HeldEncoder) -> None:
    devices = list(DEVICES)
    with rendering(devices) as renderings:
        first = asyncio.create_task(renderings.compressed())
        await held_encoder.under_way()
        devices[:] = groups_of(node({"uuid": "GPU-new", "metrics": {"fan_speed_ratio": 1.0}}))
        held_encoder.go.set()
        assert b"GPU-new" not in gzip.decompress(await first)
        assert b"GPU-new" in gzip.decompress(await renderings.compressed())


async def test_a_rendering_that_fails_is_reported_and_the_next_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "exposition", lambda *_, **__: bytes(1 // 0))
    with rendering(DEVICES) as renderings:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await renderings.compressed()
        monkeypatch.undo()
        assert await renderings.compressed()


async def test_closing_gives_up_what_is_under_way_and_refuses_what_comes(held_encoder: HeldEncoder) -> None:
    with rendering(DEVICES) as renderings:
        scrape = asyncio.create_task(renderings.compressed())
        await held_encoder.under_way()
        renderings.close()
        held_encoder.go.set()
        with pytest.raises(GivenUp):
            await scrape
        with pytest.raises(GivenUp):
            await renderings.compressed()
