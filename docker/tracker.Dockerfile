# A tracker with its witness and the public page: no torch. Build from the repository's root:
#
#     docker build -f docker/tracker.Dockerfile -t p2pdiloco-tracker .
#     docker run -p 7474:7474 -v ./RUNFOLDER:/run-folder p2pdiloco-tracker
#
# RUNFOLDER is what `p2pdiloco run new --out RUNFOLDER` made.
FROM python:3.12-slim

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY p2pdiloco p2pdiloco
COPY node node
RUN pip install --no-cache-dir . && rm -rf /src/*

RUN useradd --create-home --uid 10001 p2pdiloco \
    && install -d -o p2pdiloco -g p2pdiloco -m 0700 /run-folder
USER p2pdiloco
WORKDIR /run-folder
VOLUME /run-folder
EXPOSE 7474

STOPSIGNAL SIGTERM
ENTRYPOINT ["p2pdiloco"]
CMD ["tracker", "--run", "/run-folder", "--listen", "0.0.0.0:7474"]
