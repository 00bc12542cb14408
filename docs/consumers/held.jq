# The holders: the last tick of each node, one line for each device and pod. "-": nobody holds it; "?": not known.
# kcat ... | jq -rn -f held.jq
def is_replay($last; $tick):
    if $last == null then false
    elif $tick.run_id == $last.run_id then $tick.seq <= $last.seq
    else $tick.offset <= $last.offset and $tick.ts_ms <= $last.newest_ts_ms end;
def after($last; $tick): {newest_ts_ms: ([$last.newest_ts_ms, $tick.ts_ms] | max)};
reduce inputs as $tick ({};
    "\($tick.cluster)/\($tick.node)" as $node
    | if is_replay(.[$node]; $tick) then . else .[$node] = $tick + after(.[$node]; $tick) end)
| to_entries[]
| .key as $node | .value as $tick
| [$tick.devices[]?.mig.parent_uuid // empty] as $in_mig_mode
| $tick.devices[]?
| select(.uuid | IN($in_mig_mode[]) | not)
| . as $device
| ([.holders[]? | "\(.namespace)/\(.pod)"] | unique) as $pods
| (if (.attribution // $tick.attribution) == "none" then "?" elif $pods == [] then "-" else $pods[] end) as $pod
| [$node, .uuid, .mig.profile // "GPU", $pod, .metrics.gpu_utilization_ratio // "?"]
| @tsv
