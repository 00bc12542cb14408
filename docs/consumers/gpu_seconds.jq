# GPU-seconds per namespace, workload and kind of device: a tick stands for its node's interval, and a shared device is
# divided evenly.
# kcat ... | jq -rn -f gpu_seconds.jq
def is_replay($last; $tick):
    if $last == null then false
    elif $tick.run_id == $last.run_id then $tick.seq <= $last.seq
    else $tick.offset <= $last.offset and $tick.ts_ms <= $last.newest_ts_ms end;
def after($last; $tick):
    ($tick | {run_id, seq, offset}) + {newest_ts_ms: ([$last.newest_ts_ms, $tick.ts_ms] | max)};
reduce inputs as $tick ({last: {}, seconds: {}};
    "\($tick.cluster)/\($tick.node)" as $node
    | if is_replay(.last[$node]; $tick) then . else
        .last[$node] = after(.last[$node]; $tick)
        | reduce ($tick.devices[]?
            | (.mig.profile // "GPU") as $kind
            | ([.holders[]? | {namespace, pod, workload}] | unique_by([.namespace, .pod])) as $pods
            | $pods[]
            | (.workload // {kind: "Pod", name: .pod}) as $workload
            | {key: "\(.namespace)\t\($workload.kind)/\($workload.name)\t\($kind)", part: (($tick.interval_ms // 1000) / 1000 / ($pods | length))})
          as $share (.; .seconds[$share.key] += $share.part)
      end)
| .seconds | to_entries | sort_by(-.value)[]
| "\(.key)\t\(.value * 10 | round / 10)"
