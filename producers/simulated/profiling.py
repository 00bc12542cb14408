"""What GPM and the driver's own samples say of a simulated device: how busy its parts were, and how that went up and
down within a second.

In: the utilization and power of a second, and chances in [0, 1). Out: metrics.
"""


def active(utilization: float, chance: float) -> dict[str, float]:
    """How busy the parts of a GPU, or of a GPU instance, were; the more of it tensors, the greater the chance."""
    sm = utilization * (0.75 + 0.2 * chance)
    shares = {
        "graphics_engine_active_ratio": utilization,
        "sm_active_ratio": sm,
        "sm_occupancy_ratio": sm * (0.3 + 0.3 * chance),
        "tensor_active_ratio": sm * (0.1 + 0.5 * chance),
        "dram_active_ratio": utilization * (0.2 + 0.4 * chance),
        "fp64_active_ratio": 0.0,
        "fp32_active_ratio": sm * 0.3 * (1.0 - chance),
        "fp16_active_ratio": sm * 0.2 * chance,
    }
    return {key: round(share, 4) for key, share in shares.items()}


def links(bytes_per_second: float, utilization: float, chance: float) -> dict[str, float]:
    """What went over the NVLinks of a GPU, of the most that can."""
    sent = int(bytes_per_second * 0.3 * utilization * chance)
    return {"nvlink_tx_bytes_per_second": sent, "nvlink_rx_bytes_per_second": int(sent * (0.95 + 0.05 * chance))}


def spread(stem: str, unit: str, mean: float, *, least: float, most: float, chance: float) -> dict[str, float]:
    """Mean, minimum and maximum of a second, further apart the greater the chance; up to its ``least`` it is steady."""
    low = high = mean
    if least < mean < most:
        low, high = mean - 0.3 * chance * (mean - least), mean + 0.5 * chance * (most - mean)
    found = {"mean": mean, "min": low, "max": high}
    return {f"{stem}_{part}_{unit}": round(value, 3) for part, value in found.items()}
