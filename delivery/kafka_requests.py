"""Requests of Kafka's protocol that aiokafka lacks, for :mod:`delivery.kafka_admin`.

Source: Kafka's protocol, for Metadata 8, for IncrementalAlterConfigs and for DescribeLogDirs.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

_SET_OPERATION = 0
_STRING = String("utf-8")
_COMPACT_STRING = CompactString("utf-8")


class _AlterConfigsResponse(Response):  # type: ignore[misc] # aiokafka has no types
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("resources", Array(("error_code", Int16), ("error_message", _STRING), ("type", Int8), ("name", _STRING))),
    )


class _AlterConfigsRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = _AlterConfigsResponse
    CONFIGS = Array(("name", _STRING), ("config_operation", Int8), ("value", _STRING))
    SCHEMA = Schema(
        ("resources", Array(("type", Int8), ("name", _STRING), ("configs", CONFIGS))), ("validate_only", Boolean)
    )


class IncrementalAlterConfigs(Request[_AlterConfigsRequest]):  # type: ignore[misc]
    """Sets some settings of a topic and keeps the others: aiokafka has only the request that resets those."""

    API_KEY = 44

    def __init__(self, topic: str, settings: Mapping[str, str]) -> None:
        self.topic, self.settings = topic, dict(settings)

    def build(self, request_struct_class: Any) -> Any:
        configs = [(name, _SET_OPERATION, value) for name, value in self.settings.items()]
        return request_struct_class([(int(ConfigResourceType.TOPIC), self.topic, configs)], False)


class _MetadataResponse(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    BROKERS = Array(("node_id", Int32), ("host", _STRING), ("port", Int32), ("rack", _STRING))
    PARTITIONS = Array(
        ("error_code", Int16), ("partition", Int32), ("leader", Int32), ("leader_epoch", Int32),
        ("replicas", Array(Int32)), ("isr", Array(Int32)), ("offline", Array(Int32)),
    )  # fmt: skip
    TOPICS = Array(
        ("error_code", Int16),
        ("name", _STRING),
        ("is_internal", Boolean),
        ("partitions", PARTITIONS),
        ("allowed", Int32),
    )
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("brokers", BROKERS), ("cluster_id", _STRING), ("controller_id", Int32),
        ("topics", TOPICS), ("allowed", Int32),
    )  # fmt: skip


class _MetadataRequestV8(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", Array(_STRING)), ("allow_auto_topic_creation", Boolean), ("include_cluster_allowed", Boolean),
        ("include_topic_allowed", Boolean),
    )  # fmt: skip


class DescribeTopics(Request[_MetadataRequestV8]):  # type: ignore[misc]
    """Requests the metadata of topics with this client's rights on them, which aiokafka's own request leaves out."""

    API_KEY = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = list(topics)

    def build(self, request_struct_class: Any) -> Any:
        """The request, as it is sent. It creates no topic."""
        return request_struct_class(self.topics, False, False, True)


class _LogDirsResponse(Response):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 4
    PARTITION = (("partition", Int32), ("size", Int64), ("lag", Int64), ("future", Boolean), ("tags", TaggedFields))
    TOPIC = (("name", _COMPACT_STRING), ("partitions", CompactArray(*PARTITION)), ("tags", TaggedFields))
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("results", CompactArray(
            ("error_code", Int16), ("path", _COMPACT_STRING), ("topics", CompactArray(*TOPIC)), ("total", Int64),
            ("usable", Int64), ("tags", TaggedFields),
        )),
        ("tags", TaggedFields),
    )  # fmt: skip


class _LogDirsRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 4
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _LogDirsResponse
    PARTITIONS = CompactArray(("name", _COMPACT_STRING), ("tags", TaggedFields))
    SCHEMA = Schema(("topics", PARTITIONS), ("tags", TaggedFields))


class DescribeLogDirs(Request[_LogDirsRequest]):  # type: ignore[misc]
    """Requests a broker's log directories and their sizes, without the partitions that are in them."""

    API_KEY = 35

    def build(self, request_struct_class: Any) -> Any:
        return request_struct_class([], {})
