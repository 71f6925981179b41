# Shared by the scripts here; sourced, not run. Moves to the root of the tree and sets where things are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CACHE="${LOCKSTEP_CACHE:-$HOME/.cache/lockstep}"
TORCH_VERSION=2.11.0
TORCH_VENV="$CACHE/torch-$TORCH_VERSION"
GOLDEN_VENV="$CACHE/golden-venv"
PRESET="${LOCKSTEP_PRESET:-release}"
BUILD="build/$PRESET"
JOBS="${LOCKSTEP_JOBS:-$(nproc)}"

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Objects are shared between checkouts: paths inside the tree are relative in the cache.
use_ccache() {
  command -v ccache >/dev/null || return 0
  export CCACHE_DIR="${CCACHE_DIR:-$CACHE/ccache}" CCACHE_BASEDIR="${CCACHE_BASEDIR:-$PWD}" CCACHE_NOHASHDIR=1
  export CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
  export LOCKSTEP_COMPILER_LAUNCHER=ccache
  mkdir -p "$CCACHE_DIR" || die "cannot write to $CCACHE_DIR; set LOCKSTEP_CACHE to a folder you may write to"
}

configure() {
  use_ccache
  say "configuring $BUILD"
  local log
  log="$(mktemp)"
  if ! cmake --preset "$PRESET" "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    die "cmake --preset $PRESET failed; the lines above say why"
  fi
  rm -f "$log"
}

build() {
  say "building $* with $JOBS jobs"
  cmake --build "$BUILD" -j "$JOBS" --target "$@" || die "the build of $* failed; the first error above says why"
}
