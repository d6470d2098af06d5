"""Every block of docs/clients.md runs as it is written, in the environment that is named above it.

`<!-- openai-python -->` above a block: it is run there. `<!-- llm: PATH -->`: it is a file of that
path in the user's home folder. The port is the only thing that is changed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.clients.conftest import Servers
from tests.clients.environments import SETS, Environment, environment
from tests.clients.programs import run_program
from tests.clients.test_lm_eval import write_tasks
from tests.clients.tokenizer_files import write_tokenizer_files

DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
ADDRESS = "127.0.0.1:8000"
BLOCK = re.compile(r"(?:^<!-- ([\w-]+)(?:: (\S+))? -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Block:
    client: str
    path: str  # of a file; "" where it is run
    language: str
    text: str


BLOCKS = [Block(*match.groups(default="")) for match in BLOCK.finditer(DOCUMENT.read_text())]
RUNS = [block for block in BLOCKS if not block.path]


def test_every_block_names_its_client() -> None:
    assert {block.client for block in BLOCKS} == set(SETS)


@pytest.mark.parametrize("block", RUNS, ids=[f"{b.client}-{b.language}" for b in RUNS])
def test_block(
    block: Block,
    servers: Servers,
    variables: dict[str, str],
    default_model_path: Path,
    tmp_path: Path,
) -> None:
    made = environment(block.client)
    home, work = tmp_path / "home", tmp_path / "work"
    (work / "tokenizer").mkdir(parents=True)
    write_tokenizer_files(default_model_path, work / "tokenizer")
    write_tasks(work)
    for each in BLOCKS:
        if each.path and each.client == block.client:
            (home / each.path).parent.mkdir(parents=True)
            (home / each.path).write_text(here(each.text, servers))
    programs = f"{made.folder / 'bin'}:{made.folder / 'node_modules' / '.bin'}"
    own = {**variables, "HOME": str(home), "PATH": f"{programs}:{variables['PATH']}"}
    own["OPENAI_API_KEY"] = "none"  # lm-eval reads it
    if block.client == "aiperf":
        del own["HF_HUB_OFFLINE"]  # told to stay off the hub, it takes no folder either
    home.mkdir(exist_ok=True)
    command = command_of(block, made, here(block.text, servers), work)
    assert run_program(command, work, own).strip()


def here(text: str, servers: Servers) -> str:
    return text.replace(ADDRESS, f"127.0.0.1:{servers.open.port}")


def command_of(block: Block, made: Environment, text: str, work: Path) -> list[str | Path]:
    if block.language == "js":  # node looks for packages beside the script and above it
        (work / "block.mjs").write_text(text)
        shutil.copytree(made.folder / "node_modules", work / "node_modules", symlinks=True)
        return ["node", work / "block.mjs"]
    (work / "block").write_text(text)
    return (
        ["bash", "-e", work / "block"] if block.language == "sh" else [made.python, work / "block"]
    )


def test_versions_in_the_table_are_those_of_a_run() -> None:
    """The table names every set that is installed, with all of its packages."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", DOCUMENT.read_text(), re.M)
    named = json.dumps(rows)
    for each in SETS.values():
        for package in each.packages:
            assert package.partition("[")[0] in named, package
