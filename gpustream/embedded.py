"""A Kafka broker for trying things out: librdkafka's mock cluster, in a child process, on a port of 127.0.0.1.

In: the topics to have, with their partition counts. Out: an address for any Kafka client.
State: memory only; it ends with the broker, and the broker with the process that started it.
On failure: the child ends (librdkafka aborts if one consumer group mixes assignors), and ``running`` says so.

What it does not do, as Apache Kafka would:

- no CreateTopics or other administration: a topic is there from the start, or made with 4 partitions on first use;
- no topic settings: no compaction, no retention by time, no LogAppendTime (timestamps are the producer's, and every
  acknowledgement has the same one), no largest message but 100 MB a request;
- **retention by size, not adjustable**: 5 MiB or 100,000 batches of a partition, as stored (so compressed ones count
  compressed), the oldest batch first and at once. A consumer further behind than that has its offset reset;
- no offsets by time: a request for them returns none;
- offsets and groups outlive their consumers but not the broker; a member that joins a running group is let in only
  after the session timeout less a second, so short session timeouts are better.

Source: rdkafka_mock.h of librdkafka for the calls, rdkafka_mock.c for the limits.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

from confluent_kafka import cimpl

PARTITIONS = 4
"""How many partitions ``gpustream run`` gives each topic."""

STOP_TIMEOUT_S = 5.0
REBALANCE_DELAY_MS = 100

_RD_KAFKA_PRODUCER = 0
_BROKER_ID = 1
_ERROR_BYTES = 512

_POINTER, _TEXT, _NUMBER = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "rd_kafka_conf_new": (_POINTER, []),
    "rd_kafka_conf_set": (_NUMBER, [_POINTER, _TEXT, _TEXT, _TEXT, ctypes.c_size_t]),
    "rd_kafka_new": (_POINTER, [_NUMBER, _POINTER, _TEXT, ctypes.c_size_t]),
    "rd_kafka_handle_mock_cluster": (_POINTER, [_POINTER]),
    "rd_kafka_mock_set_controller_id": (_NUMBER, [_POINTER, ctypes.c_int32]),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [_POINTER, ctypes.c_int32]),
    "rd_kafka_mock_topic_create": (_NUMBER, [_POINTER, _TEXT, _NUMBER, _NUMBER]),
    "rd_kafka_mock_cluster_bootstraps": (_TEXT, [_POINTER]),
    "rd_kafka_err2str": (_TEXT, [_NUMBER]),
}
"""The type of the result and of each argument of the functions of librdkafka that are called."""


class EmbeddedBrokerError(Exception):
    """The embedded broker did not start; the message says why."""


class EmbeddedBroker:
    """The broker's child process; a context manager that stops it. ``address``: ``HOST:PORT`` for clients, once it has
    started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, topics: Mapping[str, int]) -> None:
        """Starts the broker with these topics and their partition counts, and returns when it serves (about 0.3 s).

        Raises :class:`EmbeddedBrokerError` when it does not come up; nothing is left running then.
        """
        # -P: modules are never taken from the working directory, whatever the files in it are called
        command = [sys.executable, "-P", "-m", "gpustream.embedded", json.dumps(dict(topics))]
        self._process = subprocess.Popen(  # noqa: S603 - this very module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.address = self._process.stdout.readline().strip() if self._process.stdout else ""
        if not self.address:
            code = self._process.wait(STOP_TIMEOUT_S)
            self.stop()
            raise EmbeddedBrokerError(f"the embedded broker did not start: its process ended with {code}")

    def stop(self) -> None:
        """Ends the broker; its records are lost. Does nothing if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(topics: Mapping[str, int]) -> str:
    """Starts the broker's threads in this process, for as long as it lives, and returns their address.

    Raises :class:`EmbeddedBrokerError` when librdkafka refuses.
    """
    library = ctypes.CDLL(cimpl.__file__)  # the extension module is linked with librdkafka
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    conf = library.rd_kafka_conf_new()
    for name, value in {"test.mock.num.brokers": "1", "log_level": "2"}.items():
        if library.rd_kafka_conf_set(conf, name.encode(), value.encode(), error, _ERROR_BYTES):
            raise EmbeddedBrokerError(error.value.decode())
    client: int | None = library.rd_kafka_new(_RD_KAFKA_PRODUCER, conf, error, _ERROR_BYTES)
    if client is None:
        raise EmbeddedBrokerError(error.value.decode())
    cluster = library.rd_kafka_handle_mock_cluster(client)
    library.rd_kafka_mock_set_controller_id(cluster, _BROKER_ID)
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, REBALANCE_DELAY_MS)
    for name, partitions in topics.items():
        if refusal := library.rd_kafka_mock_topic_create(cluster, name.encode(), partitions, 1):
            raise EmbeddedBrokerError(f"topic {name}: {library.rd_kafka_err2str(refusal).decode()}")
    address: bytes = library.rd_kafka_mock_cluster_bootstraps(cluster)
    return address.decode()


if __name__ == "__main__":  # the child process: writes its address, and ends when its parent does
    served_at = serve(json.loads(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):  # the parent has ended meanwhile
        os.write(1, f"{served_at}\n".encode())
        sys.stdin.read()
