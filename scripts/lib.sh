# What the scripts share; sourced, with $root set to the repository's root.
# shellcheck shell=bash

venv=${MJOLNIR_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$(basename "$0"): $*"
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
