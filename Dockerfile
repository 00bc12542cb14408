# The image of every component: docker build -t gpustream . && docker run gpustream --help

FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements.lock .
RUN pip wheel --quiet --require-hashes --no-deps --wheel-dir /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gpustream gpustream
COPY topics topics
COPY producers producers
COPY streams streams
COPY sinks sinks
# Only what pyproject.toml needs to run, from the wheels whose hashes were checked.
RUN python -m venv /opt/gpustream \
 && /opt/gpustream/bin/pip install --quiet --no-index --find-links /wheels .

FROM python:3.11-slim
COPY --from=build /opt/gpustream /opt/gpustream
ENV PATH=/opt/gpustream/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 65532:65532
EXPOSE 9400 9401
ENTRYPOINT ["gpustream"]
