#!/bin/sh
# Copies the images of the chart penstock into a registry of your own, also across a network that has no way out.
#
#   mirror-images.sh list  CHART                    print the images, one on a line
#   mirror-images.sh save  CHART FOLDER             copy them from their registry into FOLDER: needs a network
#   mirror-images.sh push  CHART FOLDER REGISTRY    copy them from FOLDER to REGISTRY, such as registry.example:5000/penstock
#   mirror-images.sh copy  CHART REGISTRY           both at once
#
# CHART is the folder or the package (.tgz) of the chart. skopeo does the copying; its options, such as
# --tls-verify=false, can be in SKOPEO_FLAGS. All platforms of an image are copied, and digests stay the same. FOLDER may
# also have archives of `make images`: penstock-NAME-*.oci.tar.
set -eu

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set/d' >&2
  exit 2
}

images() {
  if [ -d "$1" ]; then cat "$1/images.txt"; else tar -xzOf "$1" penstock/images.txt; fi
}

# registry/path/penstock-operator:0.2.0 -> penstock-operator:0.2.0
last() {
  printf '%s\n' "${1##*/}"
}

# Where the image is in the folder, for skopeo.
saved() {
  name=$(last "$2")
  if [ -d "$1/${name%%:*}" ]; then
    printf 'oci:%s/%s:%s\n' "$1" "${name%%:*}" "${name#*:}"
    return
  fi
  newest=$(ls -t "$1/${name%%:*}"-[0-9a-f]*.oci.tar 2>/dev/null | head -n 1)
  if [ -z "$newest" ]; then
    echo "error: $1 has no image $name: copy it there with \`$0 save\` where there is a network" >&2
    exit 1
  fi
  printf 'oci-archive:%s\n' "$newest"
}

copy() {
  echo "$1 -> $2"
  # shellcheck disable=SC2086 # words
  skopeo copy --quiet --all --preserve-digests ${SKOPEO_FLAGS:-} "$1" "$2"
}

[ $# -ge 2 ] || usage
command=$1 chart=$2
if [ "$command" != list ] && ! command -v skopeo >/dev/null; then
  echo "error: there is no skopeo: install the package skopeo" >&2
  exit 1
fi
listed=$(images "$chart") || { echo "error: $chart has no images.txt: it is not the chart penstock" >&2; exit 1; }
case "$command $#" in
  "list 2") printf '%s\n' "$listed" ;;
  "save 3")
    mkdir -p "$3"
    for image in $listed; do
      name=$(last "$image")
      copy "docker://$image" "oci:$3/${name%%:*}:${name#*:}"
    done
    ;;
  "push 4")
    for image in $listed; do
      from=$(saved "$3" "$image")
      copy "$from" "docker://${4%/}/$(last "$image")"
    done
    ;;
  "copy 3")
    for image in $listed; do copy "docker://$image" "docker://${3%/}/$(last "$image")"; done
    ;;
  *) usage ;;
esac
