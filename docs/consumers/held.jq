# Who holds what: the last tick of each node, one line for each device and pod. "-" is nobody, "?" is not known.
# kcat ... | jq -rn -f held.jq
reduce inputs as $tick ({};
    "\($tick.cluster)/\($tick.node)" as $node
    | if $tick.offset > (.[$node].offset // -1) then .[$node] = $tick else . end)
| to_entries[]
| .key as $node | .value as $tick
| [$tick.devices[]?.mig.parent_uuid // empty] as $in_mig_mode
| $tick.devices[]?
| select(.uuid | IN($in_mig_mode[]) | not)
| . as $device
| ([.holders[]? | "\(.namespace)/\(.pod)"] | unique) as $pods
| (if $tick.attribution == "none" then "?" elif $pods == [] then "-" else $pods[] end) as $pod
| [$node, .uuid, .mig.profile // "GPU", $pod, .metrics.gpu_utilization_ratio // "?"]
| @tsv
