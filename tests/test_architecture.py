"""What the page "Architecture" shows of the code."""

import torch

from docs.architecture import Call, as_text, call_paths, decisions, folders, import_graph, recorded
from shippo_ssm.scan import BACKENDS, Affine, compose


def test_the_recorded_path_is_the_whole_way():
    """From the layer to the threads that run machine code, and back; its length is on the page and not tested."""
    forward, backward = call_paths()
    assert forward[0] == Call(0, "layers/mixer.py", "Mixer.forward")
    assert {call.name for call in forward} >= {"Shippo.run", "Exponential.dense", "launch", "scan"}
    assert {call.file for call in backward} >= {"scan/fused.py", "engine/run.py", "layers/rows.py"}
    assert as_text(forward).endswith(f"{len(forward)} functions in {len({call.file for call in forward})} files")


def test_a_function_stands_once_below_its_first_caller():
    once = Affine(torch.ones(2), torch.eye(2), torch.ones(2, 2))
    path = recorded(lambda: [compose(once, once), compose(once, once)])
    assert path[0] == Call(0, "scan/algebra.py", "compose")
    assert len(path) == len(set(path))
    assert all(call.depth for call in path[1:])
    assert recorded(lambda: None) == []


def test_tables_of_the_packages():
    graph = import_graph()
    assert graph["shippo_ssm.dispatch"] == set()
    for package in ("shippo_ssm", "shippo_lab"):
        lines = folders(package).splitlines()[2:]
        assert len(lines) == sum(name.startswith(f"{package}.") for name in graph)
        assert all(len(cell.strip()) > 3 for line in lines for cell in line.strip("|").split("|"))


def test_the_decision_table_names_every_backend():
    assert all(f"`{name}`" in decisions() for name in BACKENDS)
