"""Builds the container images of the Dockerfile for real, on a machine with Debian's buildah and no registry.

    python -m images build runtime optimizer      (make images builds all that the tests use)

`target` names what can be built, `content` the key that a result is kept under, `base` makes a Debian where none can be
pulled, `machine` collects this machine's settings for reaching packages, `buildah` drives the builder, `archive` reads
came out. Nothing of this is part of a Penstock installation.
"""
