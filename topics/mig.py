"""The compute slices of MIG devices, and of the GPUs that are cut into them. Pure.

Source: NVIDIA's MIG user guide, "Supported GPUs" (how many instances each can have) and "Supported MIG Profiles".
"""

import re
from functools import lru_cache

SLICES = 7
FEWER_SLICES = {
    slices: f"(.*[^A-Za-z0-9])?({words})([^A-Za-z0-9].*)?"
    for slices, words in {4: "A30X?|RTX PRO 6000", 2: "RTX PRO (4500|5000)"}.items()
}
"""By how many slices they have: a pattern for the names of the models that have fewer than the others with MIG."""

_PROFILE = re.compile(r"(?:([1-8])c\.)?([1-8])g\.", re.ASCII)


@lru_cache(maxsize=256)
def model_slices(model: str | None) -> int:
    """The slices of a GPU that can be cut, by its model: for GPUs whose records do not have them."""
    return next((slices for slices, names in FEWER_SLICES.items() if re.fullmatch(names, model or "")), SLICES)


@lru_cache(maxsize=256)
def profile_slices(profile: str | None) -> int | None:
    """The slices of a MIG device by its profile: 3 of ``3g.40gb``, 1 of ``1c.3g.40gb``. None: it does not say."""
    match = _PROFILE.match(profile or "")
    return int(match[1] or match[2]) if match else None
