# GPU-seconds per namespace, workload and kind of device, at one tick a second: a shared device is divided evenly.
# kcat ... | jq -rn -f gpu_seconds.jq
reduce inputs as $tick ({last: {}, seconds: {}};
    "\($tick.cluster)/\($tick.node)" as $node
    | if $tick.offset <= (.last[$node] // -1) then . else  # else it is a replay
        .last[$node] = $tick.offset
        | reduce ($tick.devices[]?
            | (.mig.profile // "GPU") as $kind
            | ([.holders[]? | {namespace, pod, workload}] | unique_by([.namespace, .pod])) as $pods
            | $pods[]
            | (.workload // {kind: "Pod", name: .pod}) as $workload
            | {key: "\(.namespace)\t\($workload.kind)/\($workload.name)\t\($kind)", part: (1 / ($pods | length))})
          as $share (.; .seconds[$share.key] += $share.part)
      end)
| .seconds | to_entries | sort_by(-.value)[]
| "\(.key)\t\(.value * 10 | round / 10)"
