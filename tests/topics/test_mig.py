"""The compute slices of MIG devices and of GPUs."""

import pytest

from topics.mig import model_slices, profile_slices


@pytest.mark.parametrize(
    ("model", "slices"),
    [
        ("NVIDIA A30", 4),
        ("NVIDIA A30X", 4),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 4),
        ("NVIDIA RTX PRO 5000 Blackwell", 2),
        ("NVIDIA RTX PRO 4500 Blackwell", 2),
        ("NVIDIA A300", 7),
        ("NVIDIA H100 80GB HBM3", 7),
        ("NVIDIA B200", 7),
        (None, 7),
    ],
)
def test_a_model_has_the_slices_of_nvidias_table(model: str | None, slices: int) -> None:
    assert model_slices(model) == slices


@pytest.mark.parametrize(
    ("profile", "slices"),
    [("3g.40gb", 3), ("1c.3g.40gb", 1), ("1g.10gb+me", 1), ("0g.5gb", None), ("g", None), ("", None), (None, None)],
)
def test_a_profile_has_the_slices_that_it_names(profile: str | None, slices: int | None) -> None:
    assert profile_slices(profile) == slices
