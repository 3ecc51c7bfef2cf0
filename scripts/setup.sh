#!/usr/bin/env bash
# Set up this project on a fresh machine: `setup.sh packages` makes .venv, `setup.sh java` finds Java.
#
# .venv/stamp is written last: a key (the pins and this directory) and the name of every installed
# file. Where the key differs or a file is gone, .venv is made again from nothing; so an interrupted,
# damaged, outdated or moved environment needs no other care.
# .venv/java_home holds the home of the Java to use; it is written anew on every run.
#
# Settings, all optional:
#   PYTHON       the Python to make .venv with
#   JAVA_HOME    the Java to try first
#   JAVA_PLACES  directories that hold Java homes, separated by colons

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly LOCK_WAIT_SECONDS=900
readonly JAVA_PLACES="${JAVA_PLACES-/usr/lib/jvm:/usr/java:/opt/java:/Library/Java/JavaVirtualMachines}"
readonly JAVA_PACKAGES="openjdk-17-jre-headless openjdk-21-jre-headless openjdk-25-jre-headless"

# What another environment left behind must not decide what is installed, or where.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX
# Our own environment, if it is activated, may be the broken one: do not start from it.
PATH=":$PATH:" PATH="${PATH//":$PWD/.venv/bin:"/:}" PATH="${PATH#:}" PATH="${PATH%:}"

main() {
    case "${1-}" in
        packages) set_up_packages ;;
        java) set_up_java ;;
        *) fail "usage: setup.sh packages | java" ;;
    esac
}

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

set_up_packages() {
    local key python
    key="$(cat setup.py constraints.txt | cksum) $PWD"
    if is_complete "$key"; then return; fi
    python="$(find_python)" || exit 1
    take_lock "$python"
    # Another run may have made it while this one waited.
    if is_complete "$key"; then return; fi
    make_environment "$python"
    write_stamp "$key"
}

is_complete() {
    [[ -f .venv/stamp && -x .venv/bin/python ]] && .venv/bin/python -I -c '
import os, sys
with open(".venv/stamp") as stamp:
    key, *files = stamp.read().splitlines()
sys.exit(key != sys.argv[1] or not all(map(os.path.exists, files)))
' "$1" 2>/dev/null
}

find_python() {
    local candidate python
    for candidate in "${PYTHON:-python3.11}" python3.12 python3.13 python3; do
        # A launcher may exist for a version that does not, so ask the interpreter itself.
        if python="$("$candidate" -I -c '
import sys
sys.version_info >= (3, 11) or sys.exit(1)
print(sys.executable)' 2>/dev/null)"; then
            printf '%s\n' "$python"
            return
        fi
        if [[ -n "${PYTHON-}" ]]; then fail "PYTHON=$PYTHON is not a Python 3.11 or newer."; fi
    done
    fail "No Python 3.11 or newer found. Install one (Debian: apt-get install python3 python3-venv), or set PYTHON."
}

make_environment() {
    local python="$1"
    ensure_venv_module "$python"
    say "Installing the pinned packages into .venv (a few minutes) …"
    rm -rf .venv
    "$python" -m venv .venv || fail "$python could not create .venv."
    install_pinned pip setuptools
    install_pinned --no-build-isolation --editable '.[spark,connect,table,delta,hdfs,s3,notebooks,test,bench,dev]'
}

install_pinned() {
    # Every editable installation warns that it is one.
    PYTHONWARNINGS=ignore .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$@" ||
        fail "pip could not install the packages: its message is above. The next run starts afresh."
}

# Debian packages this part of Python's standard library separately.
ensure_venv_module() {
    local package
    if "$1" -I -c 'import ensurepip, venv' 2>/dev/null; then return; fi
    package="$("$1" -I -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"
    apt_install "$package" || fail "$1 lacks the venv module. Install the package $package, then try again."
}

write_stamp() {
    # Compiled files come and go, and are no part of what was installed.
    { printf '%s\n' "$1"; find .venv/pyvenv.cfg .venv/bin .venv/lib ! -type d ! -name '*.pyc'; } >.venv/stamp.new
    mv .venv/stamp.new .venv/stamp
}

# The lock belongs to the open file 9, so it lasts until this script and what it started have ended.
take_lock() {
    exec 9>.venv.lock
    "$1" -I -c '
import fcntl, sys, time
end = time.monotonic() + float(sys.argv[1])
is_waiting = False
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sys.exit(0)
    except BlockingIOError:
        if time.monotonic() > end:
            sys.exit(1)
    if not is_waiting:
        print("setup: Waiting for another set-up of this directory to end …", flush=True)
        is_waiting = True
    time.sleep(0.2)
' "$LOCK_WAIT_SECONDS" || fail "Another set-up of this directory has run for $LOCK_WAIT_SECONDS s. End it, then try again."
}

set_up_java() {
    local home
    if ! home="$(find_java)"; then
        take_lock .venv/bin/python
        # Another run may have installed it while this one waited.
        home="$(find_java)" || { install_java; home="$(find_java)"; } ||
            fail "Java was installed, but is still not found. Set JAVA_HOME to it."
    fi
    printf '%s\n' "$home" >".venv/java_home.$$"
    mv ".venv/java_home.$$" .venv/java_home
    say "Java: $home"
}

# Print the home of the first Java that Spark can use: JAVA_HOME, then PATH, then the usual places.
find_java() {
    local candidate
    while IFS= read -r candidate; do
        if usable_java_home "$candidate"; then return; fi
    done < <(java_candidates)
    return 1
}

java_candidates() {
    local place places
    if [[ -n "${JAVA_HOME-}" ]]; then printf '%s\n' "$JAVA_HOME/bin/java"; fi
    type -ap java || true
    IFS=: read -ra places <<<"$JAVA_PLACES"
    for place in ${places[@]+"${places[@]}"}; do
        # A pattern that matches nothing stays as it is and is no Java.
        printf '%s\n' "$place"/*/bin/java "$place"/*/Contents/Home/bin/java
    done
}

# Slim runtimes lack the module; versions before 9 do not know the option.
usable_java_home() {
    [[ -x "$1" ]] || return 1
    "$1" --add-modules jdk.incubator.vector -XshowSettings:properties -version 2>&1 </dev/null | awk -F ' = ' '
        $1 ~ /^ *java\.home$/ { home = $2 }
        $1 ~ /^ *java\.specification\.version$/ { version = $2 }
        END { if (home == "" || version + 0 < 17) exit 1; print home }'
}

install_java() {
    local package
    for package in $JAVA_PACKAGES; do
        if apt_install "$package"; then return; fi
    done
    fail "Spark needs a full Java 17 or newer, and none was found. Install one (Debian: apt-get install ${JAVA_PACKAGES%% *}), or set JAVA_HOME."
}

apt_install() {
    [[ "$(id -u)" == 0 ]] && type -p apt-get >/dev/null || return 1
    say "Installing $1 with apt-get …"
    # What apt-get starts may outlive it, and must not keep the lock.
    {
        apt-get update -qq &&
            apt-cache show "$1" 2>&1 &&
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$1"
    } >/dev/null 9>&-
}

main "$@"
