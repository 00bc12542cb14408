"""The settings of sinks that write series: what series are called, and how ticks become series."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import click

from delivery import values
from delivery.settings import DURATION, READABLE_FILE, Option, Text
from sinks.series.labels import MAX_LABELS
from sinks.series.relabel import Relabelling
from sinks.series.relabel_presets import PRESETS
from sinks.series.windows import Aggregate, Resolution, aggregates
from sinks.settings import SinkSettings
from topics.profiles import LABELS, PROFILES, LabelNames, LabelSet, Profile, ProfileName, profile_names

_LONGEST_WINDOW_S = 120
RELABEL = Text("FILE|preset:NAME", str, "preset:exported", lines=True)
EXTERNAL_LABEL = Text("NAME=VALUE", values.label, "region=eu", show="=".join, lines=True)
AGGREGATES = Text("NAME[,...]", aggregates, "min,mean,max", show=",".join)
NAMINGS = Text("NAME[,...]", profile_names, "otel,dcgm", show=",".join)


@dataclass(frozen=True, kw_only=True)
class NamingSettings:
    """What metrics and labels are called. ``labels`` None is the label set of each of ``names``."""

    names: Annotated[
        tuple[ProfileName, ...] | None,
        Option(
            "--names",
            NAMINGS,
            f"Metric names, units and labels: {', '.join(PROFILES)}. Several, after commas, are written beside each"
            " other, what two of them call alike once: so the new names can fill while the old ones still answer.",
            shown="otel; with --counters, its file alone",
        ),
    ] = None
    labels: Annotated[
        LabelSet | None,
        Option("--labels", click.Choice(["otel", "dcgm", "pod-devices"]), "The label names.", shown="those of --names"),
    ] = None

    counters: Annotated[
        Path | None,
        Option(
            "--counters",
            READABLE_FILE,
            "A file of dcgm-exporter, CSV or YAML: just its metrics are written, with its types and help. It stands for"
            " the dcgm profiles of --names; others are written beside it. A change of it is in force in seconds.",
        ),
    ] = None

    relabel: Annotated[
        tuple[str, ...],
        Option(
            "--relabel",
            RELABEL,
            "Other labels for all series: a file of Prometheus's metric_relabel_configs, or preset:NAME, of"
            f" {', '.join(preset.name for preset in PRESETS)}. Repeatable; in the variable, one a line.",
            repeatable=True,
        ),
    ] = ()
    external_labels: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "--external-label",
            EXTERNAL_LABEL,
            "A label for all series, after --relabel, if a series has none of its name. Repeatable; in the variable,"
            " one a line.",
            repeatable=True,
        ),
    ] = ()
    parts_by_pod: Annotated[
        bool,
        Option(
            "--parts-by-pod",
            None,
            "A device that several pods share is written for each pod with its part of utilization, memory and power,"
            " and the device keeps the rest: sums stay right, and queries by pod see every pod. MIG devices get a"
            " utilization.",
        ),
    ] = False

    def relabelling(self) -> Relabelling:
        """What is done to the labels of every series. Raises BadRules."""
        from sinks.series.relabel_file import read

        return Relabelling([read(source) for source in self.relabel], tuple(sorted(self.external_labels)))

    def profiles(self, picked: Profile | None = None) -> tuple[Profile, ...]:
        """What a device is written in; ``picked``: what --counters picks, if not as its file is now.

        Raises CountersError: that file can't be used.
        """
        from sinks.series.counters import OF_DCGM, load  # it reads YAML, which help has no use for

        if self.counters is None:
            names: Iterable[ProfileName] = self.names or ("otel",)
            file: tuple[Profile, ...] = ()
        else:
            names = [name for name in self.names or () if name not in OF_DCGM]
            file = (picked or load(self.counters, self.label_names()).profile,)
        profiles = [PROFILES[name] for name in names]
        labels = self.label_names()
        return (*file, *[replace(profile, labels=labels) if labels else profile for profile in profiles])

    def label_names(self) -> LabelNames | None:
        """The labels that were chosen; None: those of the names."""
        return LABELS[self.labels] if self.labels else None

    def naming_errors(self) -> list[str]:
        """What is wrong with how series are to be called."""
        errors = [
            f"--names: {name!r} is not one of {', '.join(PROFILES)}"
            for name in self.names or ()
            if name not in PROFILES
        ]
        label_counts = Counter(name for name, _ in self.external_labels)
        errors += [
            f"--external-label: {name} is given twice" for name in sorted(label_counts) if label_counts[name] > 1
        ]
        if self.counters is not None:
            from sinks.series.counters import load
            from sinks.series.counters_file import CountersError

            try:
                load(self.counters)
            except CountersError as error:
                errors += [
                    f"--counters: {self.counters}{f':{line}' if line else ''}: {text}" for line, text in error.errors
                ]
        if self.relabel:
            from sinks.series.relabel_file import BadRules, read

            for source in self.relabel:
                try:
                    read(source)
                except BadRules as error:
                    errors += [f"--relabel: {text}" for text in error.errors]
        return errors


@dataclass(frozen=True, kw_only=True)
class SeriesSettings(SinkSettings, NamingSettings):
    """How a sink turns ticks into series. Tenants' labels never make more than ``max_labels`` on a series."""

    max_labels: Annotated[
        int,
        Option(
            "--max-labels",
            click.IntRange(min=1),
            "A series has labels of pods and namespaces as long as it has no more labels than this; gpu_pod_info has"
            " the rest.",
        ),
    ] = MAX_LABELS
    stale_after_s: Annotated[
        float,
        Option(
            "--stale-after",
            DURATION,
            "The series of a node end when it has been silent for this long, and for three of its intervals.",
        ),
    ] = 60.0
    resolution_s: Annotated[
        float | None,
        Option(
            "--resolution",
            DURATION,
            "Write each series once in so long, with the last value that it had then; alerts and usage see every tick"
            " all the same. A window is written with the node's first tick past it, so that it is late by one.",
            shown="every tick",
        ),
    ] = None
    aggregate: Annotated[
        tuple[Aggregate, ...],
        Option(
            "--aggregate",
            AGGREGATES,
            "With --resolution: what is written of a window of each gauge beside its last value, of min, mean, max:"
            " under its name with _min, _mean or _max, before the unit that a name may end in.",
            shown="only the last value",
        ),
    ] = ()

    def resolution(self) -> Resolution | None:
        """The windows in which ticks are written; None: each for itself."""
        return Resolution(round(self.resolution_s * 1000), self.aggregate) if self.resolution_s else None

    def errors(self) -> list[str]:
        errors = super().errors()
        if self.stale_after_s <= 0:
            errors.append("--stale-after: must be above zero")
        if self.resolution_s is not None and not 1 <= self.resolution_s <= _LONGEST_WINDOW_S:
            errors.append("--resolution: must be at least 1s and at most 2m: Prometheus forgets a series after 5m")
        if self.resolution_s is None and self.aggregate:
            errors.append("--aggregate: it is of no use without --resolution")
        return [*errors, *self.naming_errors()]
