"""A record of settings is the schema of its options."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest

from delivery.settings import (
    DATA_FILE,
    DURATION,
    NAME,
    READABLE_FILE,
    REQUIRED,
    KafkaSettings,
    MemberSettings,
    Option,
    fields,
)

Shared = Annotated[str, Option("--shared", NAME, "Shared by several.")]


@dataclass(frozen=True, kw_only=True)
class ThingSettings(MemberSettings):
    """The settings of a thing."""

    url: Annotated[str, Option("--url", NAME, "Where.")]
    form: Annotated[Literal["text", "json"] | None, Option("--form", None, "How.")] = None
    often_s: Annotated[float, Option("--often", DURATION, "How often.")] = 1.5
    plain: Annotated[bool, Option("--plain", None, "Whether.")] = False
    count: Annotated[int, Option("--count", None, "How many.")] = 3
    made: Annotated[str, Option("--made", NAME, "Made.")] = field(default_factory=lambda: "made")
    shared: Shared = "mine"
    group: str = "things"
    internal: int = 7


FIELDS = {field.name: field for field in fields(ThingSettings)}


def test_a_field_without_an_option_is_set_by_code_only() -> None:
    assert not {"internal", "group"} & FIELDS.keys()


def test_required_options_are_first_then_the_record_s_own_then_the_shared_ones() -> None:
    names = ["url", "form", "often_s", "plain", "count", "made", "shared"]

    member = ["instance_id", "session_timeout_s", "leave_on_stop", "cluster", "compression"]
    assert list(FIELDS)[:15] == [*names, *member, "kafka", "topic_prefix", "kafka_config"]


def test_the_default_is_the_field_s() -> None:
    assert FIELDS["url"].default is REQUIRED
    assert FIELDS["often_s"].default == pytest.approx(1.5)
    assert FIELDS["made"].default() == "made"
    assert FIELDS["shared"].default == "mine"


def test_the_type_is_found_from_the_annotation() -> None:
    choice = FIELDS["form"].type

    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == ["text", "json"]
    assert FIELDS["count"].type is click.INT
    assert [name for name, field in FIELDS.items() if field.is_flag] == ["plain", "leave_on_stop"]


def test_every_error_of_the_shared_settings_is_named() -> None:
    settings = ThingSettings(url="u", session_timeout_s=0.5)

    assert [error.partition(":")[0] for error in settings.errors()] == ["--kafka", "--session-timeout"]
    assert KafkaSettings(kafka="k:1").errors() == []


@pytest.mark.parametrize("type_", [READABLE_FILE, DATA_FILE])
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/full", "/dev/urandom"])
def test_a_device_that_never_ends_is_no_file(type_: click.ParamType, device: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^'{device}' is a device or a socket: write the path of a file$"):
        type_.convert(device, None, None)


@pytest.mark.parametrize("type_", [READABLE_FILE, DATA_FILE])
def test_a_pipe_of_a_shell_a_mounted_secret_and_what_is_empty_are_files(type_: click.ParamType, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "token").write_text("s3cret")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "token").symlink_to("..data/token")
    try:
        for path in (f"/dev/fd/{reading}", str(tmp_path / "token"), os.devnull):
            assert type_.convert(path, None, None) == Path(path)
    finally:
        os.close(reading)
        os.close(writing)


def test_only_a_file_of_data_may_be_large(tmp_path: Path) -> None:
    large = tmp_path / "image.iso"
    large.touch()
    os.truncate(large, (64 << 20) + 1)

    assert DATA_FILE.convert(str(large), None, None) == large
    with pytest.raises(click.BadParameter, match=f"^'{large}' has more than 64MiB: is it another file\\?$"):
        READABLE_FILE.convert(str(large), None, None)


def test_unused_settings_of_a_file_are_logged_once_without_their_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=kafka:9092\nlinger.ms=s3cret\n")
    settings = KafkaSettings(kafka_config=file)

    with caplog.at_level("INFO"):
        assert settings.errors() == []
        assert caplog.messages == []
        assert settings.connection() == settings.connection()

    assert caplog.messages == [f"{file}: not used here: line 2, linger.ms"]
