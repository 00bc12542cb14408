# The image of every component: docker build -t gpustream . && docker run --rm gpustream --help

ARG BASE=python:3.11-slim-trixie

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY requirements.lock .
# Every wheel of the lock file, its hash checked; those for development stay in this stage.
RUN pip wheel --quiet --require-hashes --no-deps --wheel-dir /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gpustream gpustream
COPY topics topics
COPY delivery delivery
COPY producers producers
COPY streams streams
COPY sinks sinks
# Of these wheels what pyproject.toml needs to run, and nothing from elsewhere: no pip, no compiler.
# With --build-arg EXTRAS='[parquet]' pyarrow, too, for the Parquet sink.
ARG EXTRAS=
RUN python -m venv --without-pip /opt/gpustream \
 && pip --python /opt/gpustream/bin/python install --quiet --no-index --find-links /wheels ".${EXTRAS}"

FROM ${BASE}
LABEL org.opencontainers.image.title="gpustream" \
      org.opencontainers.image.description="GPU telemetry as a stream: which pod, Job or team uses which GPU" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/gpustream /opt/gpustream
ENV PATH=/opt/gpustream/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 9400 9401
# No HEALTHCHECK: commands that end have nothing to ask, and the others serve /healthz where --listen says.
ENTRYPOINT ["gpustream"]
