"""The doctor: what it finds here, and which settings of the allocator it warns of."""

import pytest
import torch

import leanstep
from leanstep import checkup


def test_the_doctor_names_versions_devices_solvers_and_engines():
    found = leanstep.doctor()
    facts = {(one.area, one.name): one.value for one in found.findings}

    assert facts["versions", "torch"].startswith(torch.__version__.partition("+")[0])
    assert facts["devices", "cpu"].startswith("CPU")
    assert "optimal" in facts["planning", "solvers"]
    assert facts["engines", "replay"] == "ready"
    assert set(facts["models", "built in"].split(", ")) == set(leanstep.models.names())
    assert "h200" in facts["devices", "can be estimated"]


def test_without_a_compiler_the_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)

    assert list(checkup._missing_for_compiling(has_gpu=False)) == ["C++ compiler"]
    assert "C compiler" in list(checkup._missing_for_compiling(has_gpu=True))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "set it to True"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,>:4]"},
            "roundup_power2_divisions makes tensors larger",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
            "keeps large pieces whole",
        ),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "asks the driver for every tensor"),
        (
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
            "measured peaks may differ",
        ),
    ],
)
def test_settings_that_waste_memory_are_named(environment, said):
    advice = [one.advice for one in checkup.allocator_findings(environment)]

    assert any(said in sentence for sentence in advice)


def test_good_settings_need_no_advice():
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    assert [one.advice for one in checkup.allocator_findings(environment)] == [""]
