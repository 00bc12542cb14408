"""The cluster producer's own metrics, beside those of every producer."""

from delivery.instruments import Instrument
from delivery.kubernetes.client import requests_instrument

EVENTS = "gpustream_cluster_watch_events_total"
RESTARTS = "gpustream_cluster_watch_restarts_total"
AGE = "gpustream_cluster_watch_age_seconds"
OBJECTS = "gpustream_cluster_objects"
OWNER_REQUESTS = "gpustream_cluster_owner_requests_total"
UNDECODABLE = "gpustream_cluster_undecodable_total"
CUT = "gpustream_cluster_labels_cut_total"
SHED = "gpustream_cluster_pods_shed_total"
LEADING = "gpustream_cluster_leading"
TRANSITIONS = "gpustream_cluster_lease_transitions_total"
POLICY_EVENTS = "gpustream_cluster_policy_events_total"
API_REQUESTS = "gpustream_cluster_api_requests_total"

EVENT_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "listed", "other", "too_long")

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(EVENTS, "counter", "What the API server said on a watch, by the event's type; listed is an object of a"
               " paged list, other a type that is not known and was ignored, too_long a line of more than 32 MiB:"
               " its object is read in a page.", ("resource", "type")),
    Instrument(RESTARTS, "counter", "How often a watch or list was begun again, by why the last one ended: ended (in"
               " good order, as every few minutes), empty (at once, without a word), cut (in the middle of a line),"
               " connection, tls, timeout, slow (a list that never ended), expired (410: listed again), unauthorized,"
               " forbidden, absent (404), throttled (429), server_error, refused (another status), unsupported (no"
               " streaming lists: pages instead), garbage, too_long.", ("resource", "reason")),
    Instrument(AGE, "gauge", "Seconds since the API server last said anything on this watch; it does every minute.",
               ("resource",)),
    Instrument(OBJECTS, "gauge", "Objects that are kept, of those that are watched.", ("resource",)),
    Instrument(OWNER_REQUESTS, "counter", "Owners that were asked for, by their kind (other: one that the API server"
               " is not known to have): ok, gone, forbidden, refused (another status), unknown_kind, malformed (no"
               " name or version of an API's), undecodable: the chain ends there; too_long: a chain of more than 8"
               " links, or a ring; away: asked for again soon.", ("kind", "result")),
    Instrument(UNDECODABLE, "counter", "Objects that could not be read, and were left out.", ("resource",)),
    Instrument(CUT, "counter", "Labels and annotations of pods on an allow-list that were cut, or left out because"
               " the pod has too many."),
    Instrument(SHED, "counter", "Pods that a record had no room for, or none for their labels and annotations;"
               " counted for each record."),
    Instrument(LEADING, "gauge", "1 while this process leads and publishes, 0 while it stands by."),
    Instrument(TRANSITIONS, "counter", "How often this process began to lead, or to stand by.", ("to",)),
    Instrument(POLICY_EVENTS, "counter", "Events about what is wrong with annotations of pods and namespaces: written,"
               " there (it was written before), refused, again (the API server can't take it now: tried again).",
               ("result",)),
    requests_instrument(API_REQUESTS),
)  # fmt: skip
