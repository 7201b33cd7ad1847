#!/usr/bin/env bash
# Makes .venv-stores: .venv, with the file systems of other stores on top, and servers that stand in for those stores.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=.venv-stores
test -x $target/bin/pip || .venv/bin/python -m venv $target
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  > "$($target/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
# What .venv has is seen through the path file, and left alone.
$target/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
  --constraint infra/constraints.txt --requirement infra/stores/requirements.txt
if command -v npm > /dev/null; then
  npm install --prefix $target/node --no-audit --no-fund --ignore-scripts --loglevel=error azurite@3.37.0
else
  echo "npm is not here, so Azure's emulator is not installed and its tests are skipped"
fi
