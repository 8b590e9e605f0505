#!/usr/bin/env bash
# Makes the environment when there is none, then runs the notebooks in order (or the tests, JupyterLab, an HTML export).
# The work itself is in rapo_lib/runs.py; here stand only the arguments and the environment.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
PROFILES="smoke pocket study qwen paper"
COMMANDS="test browser lab html slides bare docs"

usage() {
  cat <<USAGE
usage: ./run_all.sh [--profile NAME] [--only LIST] [--jobs N] [--fresh] [--dry-run]
       ./run_all.sh test [pytest options] | browser [--all | 03 05 ..] | lab [JupyterLab options]
       ./run_all.sh html [--profile NAME] | slides [--profile NAME] | bare | docs

  (nothing)        run all notebooks with the profile pocket; finished work is kept, interrupted work goes on
  --profile NAME   one of: ${PROFILES// /, }; or your own: settings in results/NAME/profile.json
  --only LIST      only these notebooks, by number: 05,06
  --jobs N         training runs at once, one thread each (default: the profile's)
  --fresh          do finished notebooks and their runs again
  --dry-run        print what would be done (runs, steps, tokens, hours), and run nothing
  test             run the tests
  browser          run notebooks in JupyterLab in headless Chromium and use their controls; leaves screenshots
  lab              open JupyterLab in notebooks/
  html, slides     write the executed notebooks of a profile (or of the reference) as pages or slides that need no network
  bare             write the notebooks without prose and answers, to work alone
  docs             write the API pages from the docstrings
The environment is made on the first call, whatever it is (--dry-run, too): with conda, mamba or micromamba when there is one, else in .venv with pip.
RAPO_ENV=venv or RAPO_ENV=conda chooses one of them.
USAGE
}

refuse() { printf 'run_all.sh: %s\n' "$*" >&2; exit 2; }
say() { printf '%s\n' "$*" >&2; }
own_profile() { [[ $1 =~ ^[0-9A-Za-z_-]+$ ]] && [ -f "${RAPO_RESULTS:-$ROOT/results}/$1/profile.json" ]; }
one_of() { case " $2 " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

# ------------------------------------------------------------------------------------------- arguments
command=notebooks profile=pocket only="" jobs="" fresh="" dry="" extra=()
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  one_of "$1" "$COMMANDS" || refuse "unknown command '$1'; valid: ${COMMANDS// /, }, or options only (see --help)"
  command=$1; shift
fi
while [ $# -gt 0 ]; do
  option=$1 value=""
  case $option in -h|--help) usage; exit 0 ;; esac
  case $command in test|browser|lab) extra+=("$option"); shift; continue ;; esac
  case $option in
    --fresh) fresh=--fresh; shift; continue ;;
    --dry-run) dry=--dry-run; shift; continue ;;
    --profile=*|--only=*|--jobs=*) value=${option#*=} option=${option%%=*}; shift ;;
    --profile|--only|--jobs) [ $# -gt 1 ] || refuse "$option needs a value"; value=$2; shift 2 ;;
    *) refuse "unknown option '$option'; valid: --profile, --only, --jobs, --fresh, --dry-run, --help" ;;
  esac
  case $option in
    --profile) case $command in html|slides) PROFILES="$PROFILES reference" ;; esac
      one_of "$value" "$PROFILES" || own_profile "$value" || refuse "unknown profile '$value'; valid: ${PROFILES// /, }"; profile=$value ;;
    --only) [[ $value =~ ^[0-9A-Za-z_]+(,[0-9A-Za-z_]+)*$ ]] || refuse "--only is '$value'; expected numbers such as 05,06"; only=$value ;;
    --jobs) [[ $value =~ ^[1-9][0-9]*$ ]] || refuse "--jobs is '$value'; expected a whole number from 1 up"; jobs=$value ;;
  esac
done
case $command in html|slides|bare|docs) [ -z "$only$jobs$fresh$dry" ] || refuse "$command takes only --profile" ;; esac

# ----------------------------------------------------------------------------------------- environment
export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false PYTHONUTF8=1 JUPYTER_PREFER_ENV_PATH=1
unset PYTHONHOME PYTHONPATH
cd "$ROOT" # the file names inside environment.yml and pytest's settings are relative to it
# An environment is up to date when this stamp, written last, stands in it.
STAMP=$(cat "$ROOT/requirements-lock.txt" "$ROOT/pyproject.toml" "$ROOT/environment.yml" <(printf '%s' "$ROOT") | cksum)

find_python() {
  local p
  for p in python3.11 python3 python3.12 python3.13 python; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11, 5))' >/dev/null 2>&1; then printf '%s' "$p"; return; fi
  done
  say "run_all.sh: no Python 3.11.5 or newer with the venv module was found (its re has faults before that); install one (3.11 is the tested one) or conda"
  return 1
}

find_conda() {
  local c
  for c in "${MAMBA_EXE:-}" "${CONDA_EXE:-}" mamba conda micromamba; do
    if [ -n "$c" ] && command -v "$c" >/dev/null 2>&1; then printf '%s' "$c"; return; fi
  done
  return 1
}

install_with_pip() { # $1: the environment's python
  # torch comes first and alone: pip then keeps a CPU build where one is offered.
  say "  1 of 2: torch (minutes; pip is silent meanwhile) ..."
  "$1" -m pip install --quiet "$(grep '^torch==' "$ROOT/requirements-lock.txt")"
  say "  2 of 2: $(grep -c == "$ROOT/requirements-lock.txt") packages of requirements-lock.txt (a minute or two) ..."
  "$1" -m pip install --quiet -r "$ROOT/requirements-lock.txt"
  "$1" -m pip install --quiet --no-deps -e "$ROOT"
}

make_environment() { # $1: folder, $2: venv or conda
  local marker="$1.installing" python="$1/bin/python"
  if [ -e "$marker" ]; then say "The last installation was interrupted; starting it again."; rm -rf "$1"; fi
  say "Making the environment in $1 (once; some minutes and about 2 GB, more where torch brings CUDA) ..."
  : >"$marker"
  if [ -x "$python" ]; then
    install_with_pip "$python"
  elif [ "$2" = conda ]; then
    create_conda "$1"
  else
    local base; base=$(find_python)
    "$base" -m venv "$1"
    install_with_pip "$python"
  fi
  mkdir -p "$1/etc/ipython" # ipykernel's note on unencrypted TCP is noise on one's own machine
  printf "c = get_config()\nc.IPKernelApp.log_level = 'ERROR'\n" >"$1/etc/ipython/ipython_kernel_config.py"
  local lab="$1/share/jupyter/lab/settings" # its first start would ask, in a box over the notebook, whether to fetch news
  mkdir -p "$lab"
  printf '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}\n' >"$lab/overrides.json"
  printf '%s\n' "$STAMP" >"$1/.rapo-stamp"
  rm -f "$marker"
  say "The environment is complete after $SECONDS s."
}

explain_failure() { # $1: folder
  [ -e "$1.installing" ] || return 0
  say "run_all.sh: the environment is not complete; mend the cause above and call again"
  say "  (no network, or a proxy that pip does not know, reads as \"No matching distribution\" there; docs/troubleshooting.md has more)"
}

create_conda() { # $1: folder
  local tool; tool=$(find_conda) || { say "run_all.sh: RAPO_ENV=conda, but no mamba, conda or micromamba was found"; return 1; }
  case $(basename "$tool") in
    micromamba*) "$tool" create --yes --prefix "$1" --file environment.yml ;;
    *) "$tool" env create --prefix "$1" --file environment.yml ;;
  esac
}

kind=${RAPO_ENV:-}
case $kind in ''|venv|conda) ;; *) refuse "RAPO_ENV is '$kind'; valid: venv, conda" ;; esac
if [ -z "$kind" ]; then
  kind=venv
  if [ ! -d "$ROOT/.venv" ] && find_conda >/dev/null; then kind=conda; fi
fi
if [ "$kind" = conda ]; then ENV="$ROOT/.conda"; else ENV="$ROOT/.venv"; fi
if [ -e "$ENV.installing" ] || [ "$(cat "$ENV/.rapo-stamp" 2>/dev/null)" != "$STAMP" ]; then
  # Not behind "||": bash would then go on after a failed command inside the function.
  trap 'explain_failure "$ENV"' EXIT
  make_environment "$ENV" "$kind"
fi
PATH="$ENV/bin:$PATH"
export PATH

# ------------------------------------------------------------------------------------------------ work
case $command in
  test) # two files at a time, one thread each; -n 0 takes them one after the other
    exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$ENV/bin/python" -m pytest -n 2 --dist loadfile "${extra[@]+"${extra[@]}"}" ;;
  browser)
    "$ENV/bin/python" -c 'import playwright' 2>/dev/null || "$ENV/bin/python" -m pip install --quiet "playwright>=1.55,<2"
    exec env PYTHONPATH="$ROOT" "$ENV/bin/python" "$ROOT/tests/browser/run.py" "${extra[@]+"${extra[@]}"}" ;;
  lab) exec "$ENV/bin/python" -m jupyterlab --notebook-dir "$ROOT" "${extra[@]+"${extra[@]}"}" ;;
  html|slides) exec "$ENV/bin/python" -m rapo_lib.runs "$command" --profile "$profile" ;;
  bare) exec "$ENV/bin/python" -m rapo_lib.runs bare ;;
  docs)
    "$ENV/bin/python" -c 'import pdoc' 2>/dev/null || "$ENV/bin/python" -m pip install --quiet "pdoc>=16,<17"
    exec "$ENV/bin/python" -m rapo_lib.docs ;;
  notebooks)
    exec "$ENV/bin/python" -m rapo_lib.runs notebooks --profile "$profile" \
      ${only:+--only "$only"} ${jobs:+--jobs "$jobs"} ${fresh:+"$fresh"} ${dry:+"$dry"} ;;
esac
