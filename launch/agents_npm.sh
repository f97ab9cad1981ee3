#!/usr/bin/env bash
# Makes .npm-agents, an environment with the stock npm packages of launch/npm, among them Claude Code and Codex, and with
# the Node.js that runs them, whose tests speak to the endpoint for agents: `bash launch/test.sh -m agents`.  With
# --newest: .npm-agents-newest, with the newest versions of the same packages, for the same tests:
#
#   MEGARL_NPM_AGENTS=$PWD/.npm-agents-newest bash launch/test.sh -n 0 -m agents tests/agents/test_npm_clients.py
#
# Both are links into the user's cache, where another checkout finds what is installed.  Safe to run again, to interrupt,
# and several times at once.  Other pins: edit launch/npm/package.json; (cd launch/npm && npm install --package-lock-only)
set -euo pipefail
. "$(dirname "$0")/environment.sh"

QUIET=(--no-audit --no-fund --no-progress --loglevel=error)

# The packages of the lock in this folder.  The system's Node.js may be older than what they want: it runs npm alone.  Of
# their scripts one is wanted: it puts Claude Code, which npm has brought, into its place.
install_packages() {
    npm ci --ignore-scripts "${QUIET[@]}" &&
        ln -sf "$(echo "$PWD"/node_modules/node-linux-*)/bin/node" node_modules/.bin/node &&
        node_modules/.bin/node node_modules/@anthropic-ai/claude-code/install.cjs
}

if ! command -v npm >/dev/null; then
    echo "launch: npm is not here; install Node.js with npm (on Debian as root: apt-get install nodejs npm)" >&2
    exit 2
fi
link=.npm-agents wanted=launch/npm
if [ "${1:-}" = --newest ]; then
    link=.npm-agents-newest wanted=$(mktemp -d)
    trap 'rm -rf "$wanted"' EXIT
    sed -E 's/: "[0-9.]+"/: "latest"/' launch/npm/package.json >"$wanted/package.json"
    npm install --package-lock-only --prefix "$wanted" "${QUIET[@]}" >/dev/null
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/megarl/environments
folder=$cache/npm-$({ cat "$wanted/package-lock.json" && uname -sm; } | sha256sum | cut -c -16)
mkdir -p "$cache"
exec 9>"$folder.lock"
flock 9 # until this script ends
if [ -e "$folder/.complete" ]; then
    say "environment: $link is ready"
else
    say "environment: installing into $folder with npm $(npm --version) (half a minute, 1.1 GB, once)"
    rm -rf "$folder"
    mkdir "$folder"
    cp "$wanted/package.json" "$wanted/package-lock.json" "$folder"
    if ! (cd "$folder" && install_packages >install.log 2>&1); then
        tail -n 20 "$folder/install.log" >&2
        echo "launch: npm ci failed; all that it said is in $folder/install.log" >&2
        exit 1
    fi
    touch "$folder/.complete"
fi
ln -sfn "$folder" "$link"
say "check"
for program in node claude codex; do
    echo "$program $("$link/node_modules/.bin/$program" --version)"
done
say "done: $link is $folder"
