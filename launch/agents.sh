#!/usr/bin/env bash
# Makes the environments of the stock agents that tests/agents/ drives: .venv-agents, .venv-agents-instructor, whose
# package wants older ones, and by agents_npm.sh .npm-agents.  All are links into the user's cache, where further clones
# find them.  Safe to run again and to interrupt.
#   bash launch/agents.sh               the pinned versions; then `bash launch/test.sh -m agents` tests them
#   bash launch/agents.sh --newest      the newest versions of today, in environments of their own (.venv-agents-newest, ...);
#                                       the tests run with them and leave a page in benchmarks/results/
set -euo pipefail
. "$(dirname "$0")/environment.sh"

install_pins() {
    echo "-- the packages of $pins" &&
        pip_install "$1" --requirement "$pins"
}

folder_of_pins=launch newest=
if [ "${1:-}" = --newest ]; then
    make_environment
    folder_of_pins=runs/newest_agents newest=-newest
    python launch/agent_pins.py "$folder_of_pins"
elif [ $# -gt 0 ]; then
    echo "launch: $*: expected --newest, or no word" >&2
    exit 2
fi
for name in agents agents-instructor; do
    pins=$folder_of_pins/${name/-/_}.txt
    once_for_all ".venv-$name$newest" "$name" "$(grep -v '^#' "$pins" | cksum)" "a few minutes" install_pins
done
bash launch/agents_npm.sh "$@"
say "import check"
".venv-agents$newest/bin/python" -c '
import agents, anthropic, openai
print("openai", openai.__version__, "and anthropic", anthropic.__version__)'
if [ -n "$newest" ]; then
    export MEGARL_AGENTS_PYTHON=$PWD/.venv-agents-newest/bin/python
    export MEGARL_NPM_AGENTS=$PWD/.npm-agents-newest
    export MEGARL_INSTRUCTOR_PYTHON=$PWD/.venv-agents-instructor-newest/bin/python
    python benchmarks/test_pages/agents_page.py
fi
say "done"
