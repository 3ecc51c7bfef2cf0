"""What `%sql` and `%pip` cells do."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import InvalidRequirement, Requirement

from notebooks.runner.source import NotebookError

# Quoted text, names in backticks and comments may hold semicolons that end no statement.
_SQL_PART = re.compile(
    r"""
    '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | `[^`]*` | --[^\n]* | /\*.*?\*/
    | ; | [^;'"`/-]+ | .
    """,
    re.VERBOSE | re.DOTALL,
)
_LOCAL = re.compile(r"(?P<path>\.{1,2}(?:/[^\[]*)?|/[^\[]*)(?:\[(?P<extras>[^\]]*)\])?")


def statements(text: str) -> list[str]:
    """Cut SQL at the semicolons that end statements."""
    found = [""]
    for part in _SQL_PART.findall(text):
        if part == ";":
            found.append("")
        else:
            found[-1] += part
    return [one.strip() for one in found if _without_comments(one).strip()]


def _without_comments(text: str) -> str:
    return "".join(part for part in _SQL_PART.findall(text) if not part.startswith(("--", "/*")))


def pip(text: str, *, directory: Path, target: Path, constraints: Path | None) -> str:
    """Make sure that packages are there, for this run only; return what was done.

    What the environment has already is not touched. What it lacks goes to `target`, which is put
    on the path: as on Databricks, a notebook's packages are its own.

    Args:
        directory: what local paths are relative to.
    """
    words = shlex.split(text, comments=True)
    if words[:1] != ["install"]:
        raise NotebookError(f"%pip {text}: only '%pip install PACKAGE...' is known here")
    lines, missing = [], []
    for word in words[1:]:
        if word in ("-q", "--quiet", "-U", "--upgrade"):
            continue
        if word.startswith("-"):
            raise NotebookError(f"%pip {text}: option {word} is not known here")
        present = _present(word, directory)
        if present is None:
            missing.append(word)
        else:
            lines.append(f"{present} is installed")
    if missing:
        _install(missing, directory, target, constraints)
        lines.append(f"installed {' '.join(missing)} for this run")
    return "\n".join(lines)


def _present(word: str, directory: Path) -> str | None:
    """Return the name and version of the package if the environment has it, or None."""
    local = _LOCAL.fullmatch(word)
    if local is not None:
        found = _installed_from((directory / local["path"]).resolve())
        extras = local["extras"]
    else:
        try:
            wanted = Requirement(word)
        except InvalidRequirement as error:
            raise NotebookError(f"%pip install {word}: {str(error).splitlines()[0]}") from None
        found = _installed(wanted)
        extras = ",".join(wanted.extras)
    if found is None or not _has_extras(found, extras):
        return None
    return f"{found.name} {found.version}"


def _installed(wanted: Requirement) -> metadata.Distribution | None:
    try:
        found = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return None
    return found if wanted.specifier.contains(found.version, prereleases=True) else None


def _installed_from(directory: Path) -> metadata.Distribution | None:
    """Return the package that was installed from this directory."""
    for found in metadata.distributions():
        origin = found.read_text("direct_url.json")
        if origin is None:
            continue
        address = urlparse(json.loads(origin)["url"])
        if address.scheme == "file" and Path(unquote(address.path)) == directory:
            return found
    return None


def _has_extras(found: metadata.Distribution, extras: str | None) -> bool:
    names = [name.strip() for name in (extras or "").split(",") if name.strip()]
    for line in found.requires or []:
        needed = Requirement(line)
        if needed.marker is None:
            continue
        is_needed = any(needed.marker.evaluate({"extra": name}) for name in names)
        if is_needed and _installed(needed) is None:
            return False
    return True


def _install(words: list[str], directory: Path, target: Path, constraints: Path | None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    command += ["--target", str(target), *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotebookError(f"%pip install {' '.join(words)}: {lines[-1]}")
    if str(target) not in sys.path:
        sys.path.insert(0, str(target))
