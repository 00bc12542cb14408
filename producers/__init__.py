"""Producers: the world -> Kafka. ``PRODUCERS`` names each one's component, to be imported when it is asked for."""

PRODUCERS: dict[str, str] = {
    "cluster": "producers.cluster.component:ClusterProducer",
    "node": "producers.node.component:NodeProducer",
    "simulated": "producers.simulated.component:SimulatedFleet",
}
