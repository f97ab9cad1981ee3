#!/usr/bin/env bash
# Makes .npm-agents, an environment with the stock npm packages of launch/npm, among them Claude Code and Codex, and with
# the Node.js that runs them, whose tests speak to the endpoint for agents: `bash launch/test.sh -m agents`.  With
# --newest: .npm-agents-newest, with the newest versions of the same packages, for the same tests:
#
#   MEGARL_NPM_AGENTS=$PWD/.npm-agents-newest bash launch/test.sh -n 0 -m agents tests/agents/test_npm_clients.py
#
# Both are links into the cache of the user, where another checkout finds what is installed.  Safe to run again, to
# interrupt, and several times at once.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/megarl/environments
CALM=(--no-audit --no-fund --no-progress --loglevel=error)

# npm_installed WANTED: the folder in which the packages of WANTED/package-lock.json are.
npm_installed() (
    wanted=$1
    folder=$CACHE/npm-$({ cat "$wanted/package-lock.json" && uname -sm; } | sha256sum | cut -c -16)
    mkdir -p "$CACHE"
    exec 9>"$folder.lock"
    flock 9
    if [ ! -e "$folder/.complete" ]; then
        say "environment: installing into $folder (half a minute, 1.1 GB, once)" >&2
        rm -rf "$folder"
        mkdir "$folder"
        cp "$wanted/package.json" "$wanted/package-lock.json" "$folder"
        cd "$folder"
        # The system's Node.js may be older than what the packages want: it runs npm alone.  Of their scripts one is
        # wanted: it puts Claude Code, which npm has brought, into its place.
        if ! {
            npm ci --ignore-scripts "${CALM[@]}" &&
                node_modules/.bin/node node_modules/@anthropic-ai/claude-code/install.cjs
        } >install.log 2>&1; then
            tail -n 20 install.log >&2
            echo "launch: npm ci failed; all that it said is in $folder/install.log" >&2
            exit 1
        fi
        touch .complete
    fi
    echo "$folder"
)

if ! command -v npm >/dev/null; then
    echo "launch: npm is not here; install Node.js with npm (on Debian as root: apt-get install nodejs npm)" >&2
    exit 2
fi
link=.npm-agents wanted=launch/npm
if [ "${1:-}" = --newest ]; then
    link=.npm-agents-newest
    wanted=$(mktemp -d)
    trap 'rm -rf "$wanted"' EXIT
    sed -E 's/: "[0-9.]+"/: "latest"/' launch/npm/package.json >"$wanted/package.json"
    npm install --package-lock-only --prefix "$wanted" "${CALM[@]}"
fi
folder=$(npm_installed "$wanted")
ln -sfn "$folder" "$link"
say "check"
bin=$link/node_modules/.bin
for program in node claude codex; do
    echo "$program $("$bin/$program" --version)"
done
for package in openai @anthropic-ai/sdk ai; do
    echo "$package $("$bin/node" -p "require('./$link/node_modules/$package/package.json').version")"
done
say "done: $link is $folder"
