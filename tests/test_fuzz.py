"""Damaged files are used or refused in one line: a sample of the campaign of 10,000 (fuzz.py)."""

import random
from pathlib import Path

import pytest
from fuzz import DAMAGES, TARGETS, campaign, table


def test_damaged_files_are_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """In a second each, without another exception, and in memory that does not depend on what they say."""
    monkeypatch.chdir(tmp_path)
    tallies = campaign(200, seed=1)
    assert not [failure for tally in tallies.values() for failure in tally.failures]
    assert set(tallies) == set(TARGETS) and all(tally.refused for tally in tallies.values())
    assert sum(tally.used for tally in tallies.values()) > 5
    with capsys.disabled():
        print(f"\n{table(tallies).splitlines()[-2]}")


@pytest.mark.parametrize("damage", [*dict.fromkeys(DAMAGES)][:-1], ids=lambda damage: damage.__name__)
def test_a_file_is_damaged_and_the_same_way_again(damage) -> None:
    text = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"config": "{\\"b\\": 1}"}}'
    for data in (text, len(text).to_bytes(8, "little") + text + bytes(8)):
        made = []
        for seed in range(200):
            new = bytearray(data)
            damage(new, random.Random(seed % 100))
            made.append(bytes(new))
        assert made[:100] == made[100:] and len(set(made) - {data}) > 5
