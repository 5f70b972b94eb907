"""The options: defaults, what is accepted and refused, and variables that nothing reads."""

from __future__ import annotations

import re

import pytest
from programs import run_python

from ourddp import _C


def test_options_have_defaults():
    values = _C.parse_options({})
    assert values == {row["name"]: row["default"] for row in _C.option_table()}
    assert values["OURS_YIELD_US"] == "500"
    assert values["OURS_SPIN"] == "auto"


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("OURS_YIELD_US", "0", "0"),
        ("OURS_SPIN", "1", "1"),
        ("OURS_CHUNK_BYTES", "4M", str(4 << 20)),
        ("OURS_COMM_THREAD_AFFINITY", "0-2,7", "0,1,2,7"),
        ("OURS_COMM_THREAD_AFFINITY", "", ""),
        ("OURS_COMM_NICE", "-20", "-20"),
        ("OURS_INLINE", "0", "0"),
        ("OURS_DIRECT", "0", "0"),
        ("OURS_BLOCKING_WAIT", "1", "1"),
        ("OURS_NODE_ID", "left rack", "left rack"),
        ("OURS_INTERFACE", "^docker0,10.0.0.0/8", "^docker0,10.0.0.0/8"),
        ("OURS_PORT_RANGE", "20000-20999", "20000-20999"),
        ("OURS_PORT_RANGE", "", ""),
        ("OURS_TCP_STREAMS", "4", "4"),
        ("OURS_TCP_CONGESTION", "reno", "reno"),
        ("OURS_INTERNODE", "gloo", "gloo"),
        ("OURS_INTERNODE", "My_Backend-2", "my_backend-2"),
    ],
)
def test_options_are_parsed(name, text, shown):
    assert _C.parse_options({name: text})[name] == shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OURS_YIELD_US", ""),
        ("OURS_YIELD_US", "50us"),
        ("OURS_INTERNODE", ""),
        ("OURS_INTERNODE", "gloo,tcp"),
        ("OURS_YIELD_US", "-1"),
        ("OURS_YIELD_US", "1000001"),
        ("OURS_SPIN", "yes"),
        ("OURS_CHUNK_BYTES", "4m"),
        ("OURS_CHUNK_BYTES", "M"),
        ("OURS_CHUNK_BYTES", "99999999999999G"),
        ("OURS_CHUNK_BYTES", "100G"),
        ("OURS_CHUNK_BYTES", "1025M"),
        ("OURS_COMM_THREAD_AFFINITY", "3-1"),
        ("OURS_COMM_THREAD_AFFINITY", "1,"),
        ("OURS_COMM_THREAD_AFFINITY", "all"),
        ("OURS_COMM_THREAD_AFFINITY", "0-65536,0-65536"),
        ("OURS_COMM_NICE", "20"),
        ("OURS_COMM_NICE", "-21"),
        ("OURS_INLINE", "true"),
        ("OURS_SPIN", "Auto"),
        ("OURS_PORT_RANGE", "20000"),
        ("OURS_PORT_RANGE", "0-9"),
        ("OURS_PORT_RANGE", "20999-20000"),
        ("OURS_PORT_RANGE", "20000-65536"),
        ("OURS_TCP_STREAMS", "17"),
    ],
)
def test_bad_options_are_refused(name, text):
    accepted = next(row["accepted"] for row in _C.option_table() if row["name"] == name)
    with pytest.raises(ValueError, match=f"{name}='{re.escape(text)}' is not understood") as error:
        _C.parse_options({name: text})
    assert accepted in str(error.value)


def test_a_group_warns_once_of_variables_that_nothing_reads(tmp_path):
    script = "import torch.distributed as dist, ourddp\nourddp.init()\ndist.new_group()\n"
    read = {"OURS_SPIN": "0", "OURS_WITH_MPI": "0", "OURS_WERROR": "1", "MY_OURS_SPIN": "1"}
    result = run_python(script, tmp_path, OURS_SPINN="1", OURS_CHUNKBYTES="1", **read)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("is set, but nothing reads it") == 2
    assert "OURS_SPINN is set, but nothing reads it. Did you mean OURS_SPIN?" in result.stderr
    assert "OURS_CHUNKBYTES is set, but nothing reads it. Did you mean OURS_CHUNK_BYTES?" in result.stderr


def test_options_come_from_the_environment(tmp_path):
    result = run_python(
        "from ourddp import _C; print(_C.option_values()['OURS_YIELD_US'])", tmp_path, OURS_YIELD_US="7"
    )
    assert result.stdout.strip() == "7", result.stderr
