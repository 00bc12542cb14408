"""What the webhook sink says of itself."""

from sinks import outcomes, receiver
from topics.instruments import Instrument

COMPONENT = "webhook"

INSTRUMENTS: tuple[Instrument, ...] = (*outcomes.instruments(COMPONENT), *receiver.instruments(COMPONENT))
