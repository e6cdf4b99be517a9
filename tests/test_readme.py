"""The README's code runs, its commands exist, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_blocks_run(number):
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_steps_of_both_frameworks():
    assert ["tk_torch" in block for block in BLOCKS] == [True, False, True, True, False]


def test_named_files_and_make_targets_exist():
    for name in re.findall(r"`((?:docs|examples)/[\w./]+|CHANGELOG\.md)`", TEXT):
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([\w-]+)", TEXT, flags=re.M):
        assert f"\n{target}:" in makefile, target
