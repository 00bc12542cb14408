-- GPU-hours of yesterday (UTC), at one tick a second: a shared device is divided evenly, MIG devices are apart.
SELECT
    pod.namespace AS namespace,
    pod.workload AS workload,
    if(mig_parent = '', 'GPU', mig_profile) AS device,
    sum(1 / length(pods)) / 3600 AS hours,
    avg(utilization) AS mean_utilization
FROM gpu_ticks FINAL
ARRAY JOIN pods AS pod
WHERE ts >= toStartOfDay(now('UTC')) - INTERVAL 1 DAY AND ts < toStartOfDay(now('UTC'))
GROUP BY namespace, workload, device
ORDER BY hours DESC;

-- GPUs that a pod has held for the last half hour and that were idle all the time.
SELECT
    cluster, node, uuid,
    pod.namespace AS namespace,
    pod.pod AS pod_name,
    pod.workload AS workload,
    max(utilization) AS busiest
FROM gpu_ticks FINAL
ARRAY JOIN pods AS pod
WHERE ts > now() - INTERVAL 30 MINUTE
GROUP BY cluster, node, uuid, namespace, pod_name, workload
HAVING busiest < 0.05 AND min(ts) < now() - INTERVAL 29 MINUTE AND max(ts) > now() - INTERVAL 1 MINUTE
ORDER BY namespace, pod_name, uuid;

-- GPU-hours of yesterday (UTC) that nobody held, by model. Ticks whose holders are not known are left out.
SELECT
    model,
    if(mig_parent = '', 'GPU', mig_profile) AS device,
    count() / 3600 AS hours
FROM gpu_ticks FINAL
WHERE ts >= toStartOfDay(now('UTC')) - INTERVAL 1 DAY AND ts < toStartOfDay(now('UTC'))
    AND empty(pods) AND NOT in_mig_mode AND attribution != 'none'
GROUP BY model, device
ORDER BY hours DESC;
