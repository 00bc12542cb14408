-- gpu.attributed into ClickHouse: one row for each device and tick, however often a record comes.
-- Set the brokers, and if there is a --topic-prefix, put it before the topic and the group. Then run it once:
-- clickhouse-client --multiquery < clickhouse.sql

CREATE TABLE gpu_attributed_queue (record String)
ENGINE = Kafka
SETTINGS kafka_broker_list = 'kafka-0:9092',
         kafka_topic_list = 'gpu.attributed',
         kafka_group_name = 'clickhouse',
         kafka_format = 'JSONAsString',
         kafka_handle_error_mode = 'stream';

CREATE TABLE gpu_ticks
(
    cluster LowCardinality(String),
    node LowCardinality(String),
    run_id UInt64,
    seq UInt64,
    ts DateTime64(3, 'UTC'),
    attribution LowCardinality(String),
    uuid String,
    model LowCardinality(String),
    mig_parent String,                -- of a MIG device: the GPU that it is cut from
    mig_profile LowCardinality(String),
    in_mig_mode Bool,                 -- a GPU whose MIG devices have rows of their own
    state LowCardinality(String),
    utilization Nullable(Float64),    -- 0-1; null: not known, as of MIG devices
    memory_used_bytes Nullable(UInt64),
    power_watts Nullable(Float64),
    pods Array(Tuple(namespace String, pod String, workload String))
)
ENGINE = ReplacingMergeTree
PARTITION BY toDate(ts)
ORDER BY (cluster, node, uuid, ts, run_id, seq)  -- a tick's identity and the device: a replay replaces its own rows
TTL toDateTime(ts) + INTERVAL 90 DAY;

CREATE MATERIALIZED VIEW gpu_ticks_from_kafka TO gpu_ticks AS
WITH
    JSONExtractArrayRaw(record, 'devices') AS devices,
    arrayMap(device -> JSONExtractString(device, 'mig', 'parent_uuid'), devices) AS mig_parents,
    arrayJoin(devices) AS device
SELECT
    JSONExtractString(record, 'cluster') AS cluster,
    JSONExtractString(record, 'node') AS node,
    JSONExtractUInt(record, 'run_id') AS run_id,
    JSONExtractUInt(record, 'seq') AS seq,
    fromUnixTimestamp64Milli(JSONExtractInt(record, 'ts_ms'), 'UTC') AS ts,
    coalesce(nullIf(JSONExtractString(device, 'attribution'), ''), JSONExtractString(record, 'attribution')) AS attribution,
    JSONExtractString(device, 'uuid') AS uuid,
    JSONExtractString(device, 'model') AS model,
    JSONExtractString(device, 'mig', 'parent_uuid') AS mig_parent,
    JSONExtractString(device, 'mig', 'profile') AS mig_profile,
    has(mig_parents, uuid) AS in_mig_mode,
    coalesce(nullIf(JSONExtractString(device, 'state'), ''), 'ok') AS state,
    JSONExtract(device, 'metrics', 'gpu_utilization_ratio', 'Nullable(Float64)') AS utilization,
    JSONExtract(device, 'metrics', 'memory_used_bytes', 'Nullable(UInt64)') AS memory_used_bytes,
    JSONExtract(device, 'metrics', 'power_watts', 'Nullable(Float64)') AS power_watts,
    arrayDistinct(arrayMap(holder -> (
        JSONExtractString(holder, 'namespace'),
        JSONExtractString(holder, 'pod'),
        if(JSONHas(holder, 'workload', 'kind'),
           concat(JSONExtractString(holder, 'workload', 'kind'), '/', JSONExtractString(holder, 'workload', 'name')),
           concat('Pod/', JSONExtractString(holder, 'pod')))
    ), JSONExtractArrayRaw(device, 'holders'))) AS pods
FROM gpu_attributed_queue
WHERE isValidJSON(record);
