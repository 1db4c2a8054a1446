"""What readers type: the commands and the code of every page, and the commands in comments of shipped files.

tests/test_pages.py compares them with the code, tests/test_page_commands.py runs them, and
tests/pages_not_run.md lists what is not run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_RUN = ROOT / "tests" / "pages_not_run.md"


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or would add, in the order of their names."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(ROOT / name for name in set(done.stdout.split()) if (ROOT / name).is_file())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PAGES = [page for page in tracked("*.md") if page != NOT_RUN]
FILES = [
    file
    for file in tracked("*.yaml", "*.yml", "*crontab", "*Makefile", "*Dockerfile", "*.env")
    if not file.is_relative_to(ROOT / "tests")
]
"""Files whose comments say what to type."""
TARGETS = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
_PROGRAMS = {
    "cd", "crontab", "curl", "docker", "export", "git", "helm", "kubectl", "make", "mlflow", "pip",
    "polyrank", "python", "ray", "serve", "split",
}  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_IN_COMMENT = re.compile(
    r"(?<![\w`./-])("
    r"(?:python -m|polyrank \w+(?= --)|ray (?:up|down|dashboard|start|job|get-auth-token)"
    r"|serve (?:run|deploy)|mlflow server|kubectl|docker|helm|crontab(?= \S*/)|pip install|git archive"
    r"|export(?= [A-Z_]+=)"
    rf"|make (?:{'|'.join(TARGETS)})(?=\s))\b.*?)(?=\s\s|(?<=\w)[;,.:]\s|(?<=\w)[.;,]$|\s\(|$)"
)
"""A command in a comment ends at two spaces, at a parenthesis, or with the sentence or line."""


@dataclass(frozen=True)
class Block:
    """A command, a piece of Python, or another block of code."""

    page: str
    heading: str
    kind: str
    """command, python, doctest or text."""
    text: str


def blocks_of_page(page: Path) -> list[Block]:
    """The indented and the fenced blocks; each command of a shell's is one."""
    found: list[Block] = []
    heading, lines, fence, before = "", list[str](), "", ""

    def end(info: str = "") -> None:
        if lines:
            found.extend(_split(name_of(page), heading, lines, info))
        lines.clear()

    for line in page.read_text().splitlines():
        if fence:
            if line.strip() == "```":
                end(fence)
                fence = ""
            else:
                lines.append(line)
        elif line.lstrip().startswith("```"):
            end()
            fence = line.strip().removeprefix("```") or "text"
        elif line.startswith("    ") and (lines or not before.strip()):
            lines.append(line)
        else:
            end()
            if line.startswith("#"):
                heading = line.strip("# ")
        before = line
    assert not fence, f"{name_of(page)}: a fence does not end"
    end()
    return found


def _split(page: str, heading: str, lines: list[str], info: str) -> Iterator[Block]:
    text = "\n".join(lines)
    if info == "python" or lines[0].lstrip().startswith(">>> "):
        yield Block(page, heading, "python" if info else "doctest", text)
    elif program_of(lines[0].strip()) in _PROGRAMS or info in ("sh", "bash", "shell", "console"):
        for command in _commands(lines):
            yield Block(page, heading, "command", command)
    else:
        yield Block(page, heading, "text", text)


def _commands(lines: list[str]) -> Iterator[str]:
    """A command goes over several lines by a backslash or inside of quotes."""
    started = ""
    for line in lines:
        started = f"{started}\n{line.strip()}".strip()
        if started.endswith("\\"):
            started = started[:-1].rstrip() + " "
            continue
        try:
            words = shlex.split(started, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            yield re.sub(r" \n", " ", started)
        started = ""
    assert not started, f"{started[:60]} does not end"


def program_of(command: str) -> str:
    """The first word that sets no variable."""
    words = command.split()
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    return Path(words[0]).name if words else ""


def commands_in_comments(file: Path) -> list[Block]:
    found = []
    for line in re.sub(r"\s*\\\n\s*#\s*", " ", file.read_text()).splitlines():
        comment = re.search(r"(?:^|\s)#\s*(.*)$", line)
        for command in _IN_COMMENT.findall(comment[1]) if comment else []:
            if "(" not in command:
                command = command.partition(")")[0]
            if "…" not in command:
                found.append(Block(name_of(file), "", "command", command))
    return found


def spans(page: Path) -> list[str]:
    """The code inside of the page's sentences and tables."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    text = re.sub(r"(?m)^    .*$", "", text)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


BLOCKS = [
    *(block for page in PAGES for block in blocks_of_page(page)),
    *(block for file in FILES for block in commands_in_comments(file)),
]


@dataclass(frozen=True)
class NotRun:
    """A row of tests/pages_not_run.md."""

    page: str
    """A pattern of names, such as `*`."""
    start: str
    reason: str

    def covers(self, block: Block) -> bool:
        start = " ".join(block.text.split())
        return fnmatch(block.page, self.page) and start.startswith(self.start)


def not_run() -> list[NotRun]:
    rows = re.findall(r"(?m)^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", NOT_RUN.read_text())
    return [NotRun(*row) for row in rows]


def is_listed(block: Block) -> bool:
    return any(each.covers(block) for each in not_run())
