"""The settings of the webhook sink."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from delivery.settings import READABLE_FILE, URL, Option
from sinks.settings import From, Group, HttpSettings, url_mistakes


@dataclass(frozen=True, kw_only=True)
class WebhookSettings(HttpSettings):
    """Where to post, and with which signature: ``secret_file`` holds its key, ``unsigned`` says that there is none.

    ``max_in_flight`` bounds how many requests are under way.
    """

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset(
        {"content-type", "content-length", "idempotency-key", "x-gpustream-signature"}
    )

    url: Annotated[str, Option("--url", URL, "Where to post to, as given.")]
    secret_file: Annotated[
        Path | None,
        Option(
            "--secret-file",
            READABLE_FILE,
            "The file that holds the key with which X-Gpustream-Signature signs each body (HMAC-SHA256).",
        ),
    ] = None
    unsigned: Annotated[bool, Option("--unsigned", None, "Bodies are not signed.")] = False
    group: Group = "gpustream-sink-webhook"
    from_: From = 3600.0
    max_in_flight: int = 8

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        return [*url_mistakes(self.url), *self._secret_mistakes(), *super().mistakes()]

    def _secret_mistakes(self) -> list[str]:
        file = self.secret_file
        if file is None:
            return [] if self.unsigned else ["--secret-file: missing; or say --unsigned"]
        if self.unsigned:
            return ["--unsigned: not together with --secret-file"]
        if not file.is_file():
            return [f"--secret-file: no file {file}"]
        return [] if file.read_bytes().strip() else [f"--secret-file: {file} is empty"]
