#!/usr/bin/env bash
# Installs the Debian packages that the tests use, where they are missing and may be installed; elsewhere prints which are missing.
# One call of apt for all of them, and none when nothing is missing. No daemon is started.
set -euo pipefail

# What there must be (a command or a file), the package that brings it, and what for.
needs="
chromium                 chromium                   pages in a real browser
containerd               containerd                 nodes: runs pods
runc                     runc                       nodes: runs containers
/usr/lib/cni/bridge      containernetworking-plugins nodes: the pods' network
ip                       iproute2                   nodes: bridges and addresses
nft                      nftables                   nodes: Services
iptables                 iptables                   nodes: host ports
conntrack                conntrack                  nodes: Services' connections
busybox                  busybox-static             nodes: a small image for tests
haproxy                  haproxy                    gateway: holds and distributes requests
buildah                  buildah                    images: builds the Dockerfile
fuse-overlayfs           fuse-overlayfs             images: layers without privilege
mmdebstrap               mmdebstrap                 images: a Debian base without a registry
/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring images: what that base's packages are verified by
arch-test                arch-test                  images: a Debian base for another processor
qemu-aarch64-static      qemu-user-static           images: programs of those for arm64
skopeo                   skopeo                     images: copies them between registries
docker-registry          docker-registry            images: a registry for tests
qemu-x86_64              qemu-user                  serving on processors of other kinds
gcc                      gcc                        the native engine: its compiler
/usr/include/stdio.h     libc6-dev                  the native engine: what that compiles against
"

packages=() reasons=""
while read -r there package reason; do
  [ -n "$there" ] || continue
  if [ "${there#/}" = "$there" ]; then command -v "$there" >/dev/null && continue; else [ -e "$there" ] && continue; fi
  packages+=("$package")
  reasons+="  $package: $reason"$'\n'
done <<<"$needs"
[ ${#packages[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  printf 'note: missing, and not installable here (that takes root on Debian or Ubuntu):\n%s' "$reasons" >&2
  echo "The tests that use them say so. Those of a cluster take yours: PENSTOCK_TEST_KUBECONFIG=/path/to/kubeconfig" >&2
  exit 0
fi

printf 'installing, once (some 70 MB to download, chromium 120 MB):\n%s' "$reasons"
# The packages' daemons stay off, also where there is a systemd that would start them: the tests run their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
