"""Fixtures of the tests of delivery."""

import asyncio

import pytest


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, without waiting for them."""
    pauses_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        pauses_s.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses_s
