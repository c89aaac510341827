# What the scripts share; sourced, with $root set to the repository's root.
# shellcheck shell=bash

# shellcheck disable=SC2154 # root is set by the script that sources this
venv=${MJOLNIR_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "${0##*/}: $*"
  exit 1
}

# The virtual environment's interpreter where there is one, else the system's.
python_of_tree() {
  if [[ -x $venv/bin/python ]]; then
    printf '%s\n' "$venv/bin/python"
  else
    command -v python3 || die "python3 is missing"
  fi
}
