# A volunteer's node: daemon and trainer. Build from the repository's root:
#
#     docker build -f docker/node.Dockerfile -t p2pdiloco-node .
#     docker run -v p2pdiloco-data:/data p2pdiloco-node node --join http://TRACKER:7474/#RUNID
#
# TORCH_SPEC: which torch. The default is a CPU build wherever the index in use offers one; for a GPU build
# with --build-arg TORCH_SPEC=torch and run with --gpus all.
FROM python:3.12-slim

ARG TORCH_SPEC=torch==2.13.0
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

WORKDIR /src
# What changes rarely comes first, so that a change of the code does not install torch again.
RUN pip install --no-cache-dir "$TORCH_SPEC"
COPY pyproject.toml README.md LICENSE ./
COPY p2pdiloco p2pdiloco
COPY node node
RUN pip install --no-cache-dir ".[node]" "$TORCH_SPEC" && rm -rf /src/*

RUN useradd --create-home --uid 10001 p2pdiloco \
    && install -d -o p2pdiloco -g p2pdiloco -m 0700 /data /run-folder
USER p2pdiloco
WORKDIR /data
VOLUME /data
ENV P2PDILOCO_DATA_DIR=/data

# SIGTERM says goodbye and hands over a seat; it takes five seconds at most.
STOPSIGNAL SIGTERM
ENTRYPOINT ["p2pdiloco"]
CMD ["node"]
