#!/usr/bin/env bash
# Installs the Debian packages that the tests use, where they are missing and we may; says what is missing elsewhere.
set -euo pipefail

packages=()
command -v chromium >/dev/null || packages+=(chromium)
[ ${#packages[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "note: ${packages[*]} missing and not installable here (Debian and root are needed):" \
    "the tests that use them are skipped and say so" >&2
  exit 0
fi
echo "installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
