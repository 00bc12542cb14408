-- gpu.usage into ClickHouse: one row for each key, with the highest generation and, in that, the highest revision.
-- Set the brokers, and if there is a --topic-prefix, put it before the topic and the group. Then run it once:
-- clickhouse-client --multiquery < clickhouse_usage.sql

CREATE TABLE gpu_usage_queue (record String)
ENGINE = Kafka
SETTINGS kafka_broker_list = 'kafka-0:9092',
         kafka_topic_list = 'gpu.usage',
         kafka_group_name = 'clickhouse-usage',
         kafka_format = 'JSONAsString',
         kafka_handle_error_mode = 'stream';

CREATE TABLE gpu_usage
(
    cluster LowCardinality(String),
    node LowCardinality(String),
    gpu_uuid String,
    uuid String,
    start DateTime('UTC'),
    category LowCardinality(String),      -- held, free, unobserved, lost
    version UInt64,                       -- of one key the highest counts
    final Bool,
    namespace LowCardinality(String),
    pod String,
    pod_uid String,
    container LowCardinality(String),
    workload String,                      -- Kind/name
    team LowCardinality(String),
    model LowCardinality(String),
    device_ms UInt64,
    slice_ms UInt64,
    of UInt64,                            -- slice_ms / of is the time of a whole GPU
    used_us UInt64,
    idle_ms UInt64,
    energy_mj UInt64
)
ENGINE = ReplacingMergeTree(version)
PARTITION BY toYYYYMM(start)
ORDER BY (cluster, node, uuid, start, namespace, pod, pod_uid, container, category);  -- the key of a record

CREATE MATERIALIZED VIEW gpu_usage_from_kafka TO gpu_usage AS
SELECT
    JSONExtractString(record, 'cluster') AS cluster,
    JSONExtractString(record, 'node') AS node,
    JSONExtractString(record, 'gpu_uuid') AS gpu_uuid,
    JSONExtractString(record, 'uuid') AS uuid,
    toDateTime(intDiv(JSONExtractUInt(record, 'start_ms'), 1000), 'UTC') AS start,
    JSONExtractString(record, 'category') AS category,
    bitShiftLeft(JSONExtractUInt(record, 'generation'), 32) + JSONExtractUInt(record, 'revision') AS version,
    JSONExtractBool(record, 'final') AS final,
    JSONExtractString(record, 'namespace') AS namespace,
    JSONExtractString(record, 'pod') AS pod,
    JSONExtractString(record, 'pod_uid') AS pod_uid,
    JSONExtractString(record, 'container') AS container,
    if(JSONHas(record, 'workload', 'kind'),
       concat(JSONExtractString(record, 'workload', 'kind'), '/', JSONExtractString(record, 'workload', 'name')),
       if(JSONHas(record, 'pod'), concat('Pod/', JSONExtractString(record, 'pod')), '')) AS workload,
    JSONExtractString(record, 'team') AS team,
    JSONExtractString(record, 'model') AS model,
    JSONExtractUInt(record, 'device_ms') AS device_ms,
    JSONExtractUInt(record, 'slice_ms') AS slice_ms,
    JSONExtractUInt(record, 'of') AS of,
    JSONExtractUInt(record, 'used_us') AS used_us,
    JSONExtractUInt(record, 'idle_ms') AS idle_ms,
    JSONExtractUInt(record, 'energy_mj') AS energy_mj
FROM gpu_usage_queue
WHERE isValidJSON(record) AND JSONExtractUInt(record, 'of') > 0;
