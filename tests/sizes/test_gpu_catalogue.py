import re

import pytest

from steelyard.sizes.gpu_catalogue import ALIASES, CATALOGUE, by_device_name, by_name

REPORTED = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100-80",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "Tesla V100-SXM2-32GB": "v100-32",
    "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla T4": "t4",
    "NVIDIA A10": "a10",
    "NVIDIA A40": "a40",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GH200 480GB": "gh200-96",
    "NVIDIA B200": "b200",
    "cpu": "cpu",
}


@pytest.mark.parametrize("reported", REPORTED)
def test_a_gpu_is_known_by_the_name_torch_reports(reported):
    found = by_device_name(reported)
    assert found is not None
    assert found.name == REPORTED[reported]


@pytest.mark.parametrize(
    "reported", ["NVIDIA A100X", "NVIDIA A10G", "NVIDIA L40S", "NVIDIA H200 NVL", "NVIDIA H20", ""]
)
def test_a_neighbour_is_not_taken_for_another(reported):
    assert by_device_name(reported) is None


def test_names_and_aliases_lead_to_one_gpu_each():
    assert len({gpu.name for gpu in CATALOGUE}) == len(CATALOGUE)
    assert all(by_name(alias).name == name for alias, name in ALIASES.items())
    assert by_name("H200").peak("bf16") == 989e12
    assert by_name("t4").peak("bf16") is None
    assert by_name("NVIDIA A10").name == "a10"


def test_every_line_has_a_source_and_plausible_numbers():
    for gpu in CATALOGUE:
        assert gpu.source
        if gpu.name != "cpu":
            assert 8 <= gpu.memory_gib <= 200
            assert gpu.fp32 < gpu.fp16
            assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.01)


def test_a_share_is_that_of_its_source():
    checked = 0
    for gpu in CATALOGUE:
        _, details = gpu.evidence
        found = re.match(r"([\d.]+) of ([\d.]+) TFLOP/s", details)
        if found:
            assert gpu.sustained == pytest.approx(min(1.0, float(found[1]) / float(found[2])), abs=0.007), gpu.name
            checked += 1
        else:
            assert gpu.evidence[0] != "published", gpu.name
    assert checked >= 17
