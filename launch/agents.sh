#!/usr/bin/env bash
# Makes .venv-agents, an environment with the stock packages openai, openai-agents and anthropic, whose tests speak to the
# endpoint for agents: `bash launch/test.sh -m agents`.  Safe to run again and to interrupt.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

pins=launch/agents.txt

install_agents() {
    echo "-- openai, openai-agents, anthropic" &&
        pip_install "$1" --requirement "$pins"
}

once_in .venv-agents "$(cksum <"$pins")" "half a minute" install_agents
say "import check"
.venv-agents/bin/python -c '
import agents, anthropic, openai
print("openai", openai.__version__, "and anthropic", anthropic.__version__)'
say "done"
