"""A connection that a test leaves open is closed and reported at the test's end, and never fails a later test."""

import asyncio
import gc
import shutil
import socket
import ssl
import threading
import warnings
from pathlib import Path

import pytest

from tests.real.certificates import Authority

HOST = "127.0.0.1"


def test_a_connection_that_nobody_closes_is_closed_with_its_loop_with_a_warning() -> None:
    with socket.create_server((HOST, 0)) as server:

        async def forget() -> None:
            await asyncio.get_running_loop().create_connection(asyncio.Protocol, *server.getsockname())

        with pytest.warns(ResourceWarning, match="open when its loop was closed: .* of Protocol"):
            asyncio.run(forget())
        with server.accept()[0] as peer:
            peer.settimeout(30)
            assert peer.recv(1) == b""


def test_a_tls_connection_whose_other_side_does_not_close_it_is_closed_with_its_loop(
    tmp_path: Path,
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    signed = Authority(tmp_path).sign("server", f"IP:{HOST}")
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(signed.certificate, signed.key)
    finished = threading.Event()
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with server_context.wrap_socket(server.accept()[0], server_side=True):
                finished.wait(30)

        async def close() -> None:
            ours = ssl.create_default_context(cafile=signed.ca)
            _, writer = await asyncio.open_connection(*server.getsockname(), ssl=ours)
            writer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with warnings.catch_warnings(record=True, action="always") as warned:
            asyncio.run(close())
            gc.collect()
        finished.set()
        thread.join()
    assert [str(warning.message) for warning in warned] == []
