"""The node producer's own metrics, beside those of every producer."""

from delivery.instruments import Instrument

MISSED = "gpustream_node_ticks_missed_total"
GPUS = "gpustream_node_gpus"
READ_SECONDS = "gpustream_node_gpu_read_seconds"
NVML_ERRORS = "gpustream_node_nvml_errors_total"
OPENED = "gpustream_node_nvml_opened_total"
KUBELET_CALLS = "gpustream_node_kubelet_calls_total"
KUBELET_AGE = "gpustream_node_kubelet_age_seconds"
PODS_WATCHED = "gpustream_node_pods_watched"
POD_EVENTS = "gpustream_node_pod_events_total"
POD_WATCHES = "gpustream_node_pod_watches_total"
PROCESSES = "gpustream_node_processes"
XIDS = "gpustream_node_xid_errors_total"
BUFFER_SECONDS = "gpustream_node_buffer_seconds"
JOB_FILE_ERRORS = "gpustream_node_job_file_errors_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(MISSED, "counter", "Ticks that were never read, because the process was late by a whole interval."),
    Instrument(GPUS, "gauge", "GPUs and MIG devices in the last tick, by state: ok, lost, timeout.", ("state",)),
    Instrument(READ_SECONDS, "histogram", "How long reading all of one GPU took, its MIG devices included; one that"
               " hangs is counted when it returns.", (),
               (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)),
    Instrument(NVML_ERRORS, "counter", "Values that were left out, by what was asked for and the error that NVML gave"
               " (without NVML_ERROR_), or IMPLAUSIBLE (the value can't be), NO_VALUE (the call succeeded, and filled"
               " nothing in) or TIMEOUT (the call is left out, since it did not return in time). What a device does"
               " not support is not counted.", ("call", "error")),
    Instrument(OPENED, "counter", "How often NVML was initialised: at the start, and when GPUs came, went or changed."),
    Instrument(KUBELET_CALLS, "counter", "Calls of the kubelet's List by result: ok, unavailable (nobody answers on"
               " the socket), deadline (no answer in time), rate_limited (the kubelet's own limit), too_large,"
               " undecodable, refused (any other error).", ("result",)),
    Instrument(KUBELET_AGE, "gauge", "Seconds since the kubelet last answered; 0 if it never did."),
    Instrument(PODS_WATCHED, "gauge", "1 while the kubelet's Pods API says when pods begin and end; 0 while only its"
               " pod resources are asked, at each tick."),
    Instrument(POD_EVENTS, "counter", "Events of the kubelet's Pods API by type: added, modified, deleted, synced (a"
               " list of all pods is complete).", ("type",)),
    Instrument(POD_WATCHES, "counter", "Streams of the kubelet's Pods API that ended, by why: ended and unavailable"
               " (the kubelet stops), too_slow (the kubelet closed it), refused (switched off, or not there),"
               " undecodable. Each is opened again.", ("result",)),
    Instrument(PROCESSES, "gauge", "Processes on GPUs in the last tick: those of a pod or a job, others on the host,"
               " and unseen (not in procfs: the host's PIDs are not visible).", ("kind",)),
    Instrument(XIDS, "counter", "XID errors that the driver reported, by whether the GPU is known: device,"
               " unknown_device (they are in the log, and in no record).", ("of",)),
    Instrument(BUFFER_SECONDS, "gauge", "How long Kafka may be away before ticks are dropped: --buffer, or less if"
               " --buffer-size holds fewer ticks as large as the last ones."),
    Instrument(JOB_FILE_ERRORS, "counter", "What was left out of the directory of job files at a tick, by reason:"
               " directory and file (can't be read), line (no job id, or too many in one file), timeout (not read in"
               " time: the last ones stay in force).", ("reason",)),
)  # fmt: skip
