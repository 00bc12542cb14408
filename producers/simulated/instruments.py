"""What a simulated fleet counts about itself, beside what every producer does."""

from delivery.instruments import Instrument

MISSED = "gpustream_simulated_ticks_missed_total"
TRUTHS = "gpustream_simulated_truth_lines_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(MISSED, "counter", "Ticks that were never sampled, because the process was late by a whole interval."),
    Instrument(TRUTHS, "counter", "Lines written to the truth file, one per device and tick."),
)
