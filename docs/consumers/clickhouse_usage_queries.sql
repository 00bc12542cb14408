-- GPU-hours of whole GPUs of last month (UTC) by team, and how many were used. FINAL: only the row that counts of each key.
SELECT
    team,
    sum(slice_ms / of) / 3600000 AS gpu_hours,
    sum(used_us * if(device_ms = 0, 1, slice_ms / device_ms / of)) / 3600000000 AS used_hours,
    sum(energy_mj) / 3600000000 AS kwh
FROM gpu_usage FINAL
WHERE category = 'held' AND start >= toStartOfMonth(now('UTC')) - INTERVAL 1 MONTH AND start < toStartOfMonth(now('UTC'))
GROUP BY team
ORDER BY gpu_hours DESC;

-- Final hours whose parts do not add up to the GPU: the result must be empty.
SELECT cluster, node, gpu_uuid, start, sum(slice_ms) AS slices, max(of) * 3600000 AS whole
FROM gpu_usage FINAL
GROUP BY cluster, node, gpu_uuid, start
HAVING min(final) AND slices != whole;
