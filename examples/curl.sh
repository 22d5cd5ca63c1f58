#!/usr/bin/env bash
# The API with curl: duo serve, then examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
json='Content-Type: application/json'

curl -sS "$url/health"; echo
curl -sS "$url/v1/models"; echo

# One answer
curl -sS "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 20}'; echo

# As it is written, each token with who guessed it
curl -sSN "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 20, "stream": true, "duo": {"tokens": true}}'

# The same prompt without speculation: the same text
curl -sS "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 20, "duo": {"mode": "off"}}'; echo
