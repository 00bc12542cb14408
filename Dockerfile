# The image of every component: docker build -t gpustream . && docker run --rm gpustream --help
#
# For amd64 and arm64: docker buildx build --platform linux/amd64,linux/arm64 .
# Nothing in it needs a shell: it runs as `gpustream` and its arguments, as nobody, on a root file system that may be
# read-only. `make image` runs the stages without a container engine, and says how large they are.

# The digest is that of the tag's index, for all platforms. To renew it: docker buildx imagetools inspect python:3.11-slim-trixie
ARG BASE=python:3.11.17-slim-trixie@sha256:45037981b62b34b44602584fccbc4d884d5f7dc92c7ee86bb38a698a79fe1e51

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# Another index of packages: --build-arg PIP_INDEX_URL=URL. It may be any, since the hashes are checked.
ARG PIP_INDEX_URL
WORKDIR /src
COPY requirements.lock .
# Every wheel of the lock file, its hash checked; those for development stay in this stage. There is no wheel of
# faust-streaming for arm64: pip makes one of its source, which needs no compiler.
RUN pip wheel --quiet --require-hashes --no-deps --wheel-dir /wheels -r requirements.lock
COPY pyproject.toml setup.py README.md LICENSE ./
COPY gpustream gpustream
COPY topics topics
COPY delivery delivery
COPY producers producers
COPY streams streams
COPY sinks sinks
# Of these wheels what pyproject.toml needs to run, and nothing from elsewhere: no pip, no compiler.
# With --build-arg EXTRAS='[parquet]' pyarrow, too, for the Parquet sink.
ARG EXTRAS=
# hadolint wants a version; this folder has none to name, and those of its dependencies are in /wheels.
# hadolint ignore=DL3013
RUN python -m venv --without-pip /opt/gpustream \
 && pip --python /opt/gpustream/bin/python install --quiet --no-index --find-links /wheels ".${EXTRAS}"

FROM ${BASE}
ARG VERSION=0.1.0
# Where it was built from: --build-arg SOURCE=URL --build-arg REVISION=COMMIT
ARG SOURCE=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gpustream" \
      org.opencontainers.image.description="GPU telemetry as a stream: which pod, Job or team uses which GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/gpustream /opt/gpustream
ENV PATH=/opt/gpustream/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 9400 9401
# No HEALTHCHECK: commands that end have nothing to ask, and the others serve /healthz where --listen says.
ENTRYPOINT ["gpustream"]
