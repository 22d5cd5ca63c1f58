#!/usr/bin/env bash
# For a GPU machine with Python, torch and transformers that reaches nothing: takes along what else the benchmarks need.
#
#   benchmarks/offline.sh pack DIR [PYTHON]   here: DIR/part-*, of 50 MB each: llama.cpp's source, wheels for that Python (3.12), the
#                                             model; where that Python is here, too, our own modules as C
#   benchmarks/offline.sh unpack DIR          there, beside the parts: builds llama.cpp (half a minute), writes DIR/env
#   . DIR/env; python3 benchmarks/h200.py --target "$MODEL" --draft "$DRAFT" --tasks TASKS ...
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PY=$ROOT/.venv/bin/python
WHEELS=(msgspec gguf diskcache) # what duodecoding imports and transformers does not bring

pack() {
  local to source python=${2:-3.12}
  mkdir -p "$1"
  to=$(cd "$1" && pwd)
  kit=$(mktemp -d) # not local: the trap wants it
  trap 'rm -rf "$kit"' EXIT
  mkdir "$kit/fetched" "$kit/all" "$kit/all/site" "$kit/all/llama.cpp"
  "$PY" -m pip download -q -c "$ROOT/constraints.txt" --no-deps --no-binary :all: -d "$kit/fetched" llama-cpp-python
  "$PY" -m pip download -q -c "$ROOT/constraints.txt" --no-deps --only-binary :all: --python-version "$python" \
    -d "$kit/fetched" "${WHEELS[@]}"
  tar xf "$kit"/fetched/llama_cpp_python-*.tar.gz -C "$kit"
  source=$(echo "$kit"/llama_cpp_python-*)
  cp -r "$source/llama_cpp" "$kit/all/site/"
  (cd "$source/vendor/llama.cpp" && cp -r CMakeLists.txt cmake ggml src include common vendor licenses "$kit/all/llama.cpp/")
  for wheel in "$kit"/fetched/*.whl; do "$PY" -m zipfile -e "$wheel" "$kit/all/site"; done
  cp "$("$PY" -c 'from duodecoding.models import resolve; print(resolve("smollm2-135m").path)')" "$kit/all/model.gguf"
  if "python$python" -c "" 2>/dev/null; then
    "python$python" -m venv "$kit/venv"
    "$kit/venv/bin/pip" install -q --disable-pip-version-check -c "$ROOT/constraints.txt" mypy setuptools numpy msgspec
    "$kit/venv/bin/python" "$ROOT/scripts/compile.py" "$kit/all/compiled"
  else
    echo "python$python does not run here, so our own modules go as Python, not compiled" >&2
  fi
  git -C "$ROOT" describe --always --dirty=+ '--exclude=*' >"$kit/all/commit"
  rm -f "$to"/part-*
  tar c -C "$kit/all" . | xz -T0 -1 | split -b 50000000 - "$to/part-"
  ls -l "$to"/part-*
}

unpack() {
  local at
  at=$(cd "$1" && pwd)
  mkdir -p "$at/kit"
  cat "$at"/part-* | tar xJ -C "$at/kit"
  cmake -S "$at/kit/llama.cpp" -B "$at/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_{APP,COMMON,TESTS,EXAMPLES,TOOLS,SERVER}=OFF >"$at/build.log"
  cmake --build "$at/build" >>"$at/build.log"
  local src=$ROOT/src
  if [ -d "$at/kit/compiled" ]; then src=$at/kit/compiled; fi
  # Without the system's C++ library in front, a Python that brings its own crashes when llama.cpp reads a vocabulary.
  cat >"$at/env" <<END
export PYTHONPATH="$src:$at/kit/site" LLAMA_CPP_LIB_PATH="$at/build/bin"
export LD_PRELOAD=$(/sbin/ldconfig -p | awk '/libstdc\+\+\.so\.6 .*x86-64/ {print $NF; exit}')
export BENCHMARK_COMMIT="$(<"$at/kit/commit")"
export MODEL="$at/kit/model.gguf" DRAFT="$src/duodecoding/drafts/smollm2-draft.gguf"
END
  echo "ready: . $at/env"
}

case $#:${1:-} in
[23]:pack | 2:unpack) "$@" ;;
*) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
