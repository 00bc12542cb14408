"""Producers: the world -> Kafka. ``PRODUCERS`` names each one's component, to be imported when it is asked for."""

PRODUCERS: dict[str, str] = {
    "simulated": "producers.simulated.component:SimulatedFleet",
}
