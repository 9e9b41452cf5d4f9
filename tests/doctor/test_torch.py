import pytest

from steelyard.doctor.checks import fast_kernels, torch
from steelyard.doctor.python_info import PythonInfo, read_python_info
from tests.doctor.conftest import named

A100 = {
    "python": [3, 12, 1], "torch": "2.13.0+cu126", "torch_cuda": "12.6", "available": True,
    "gpus": ["NVIDIA A100-SXM4-80GB"], "capabilities": [[8, 0]],
    "built_for": ["sm_80", "sm_90"], "sum_on_gpu": 8.0, "flash": True,
    "memory_efficient": True, "cudnn_attention": True, "packages": {"triton": "3.9.0"},
}  # fmt: skip


def test_torch_on_a_good_machine_is_good(bench):
    bench.gpus()
    found = list(torch.check(bench.machine(), PythonInfo(A100)))
    assert [(finding.name, finding.verdict) for finding in found] == [
        ("torch", "ok"), ("driver", "ok"), ("torch on this driver", "warn"), ("GPUs in torch", "ok"),
    ]  # fmt: skip
    bench.gpus(driver="560.28.03", cuda="12.6")
    assert named(torch.check(bench.machine(), PythonInfo(A100)), "torch on this driver").verdict == "ok"


@pytest.mark.parametrize(
    ("driver", "served", "cuda", "hint"),
    [
        ("470.57.02", "11.4", "12.6", "update the driver to 525.60.13 or newer"),
        ("550.54.14", "12.4", "13.0", "make setup TORCH=cu126"),
        ("570.86.10", "12.8", "13.0", "make setup TORCH=cu128"),
    ],
)
def test_a_driver_that_is_too_old_is_named_with_the_build_that_fits(bench, driver, served, cuda, hint):
    bench.gpus(driver=driver, cuda=served)
    seen = PythonInfo(A100 | {"torch": f"2.13.0+cu{cuda.replace('.', '')}", "torch_cuda": cuda})
    finding = named(torch.check(bench.machine(), seen), "torch on this driver")
    assert finding.verdict == "fail"
    assert driver in finding.words
    assert hint in finding.hint


def test_the_driver_is_found_in_the_kernels_files_where_there_is_no_nvidia_smi(bench):
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  450.51.06  Sun Jul 19 20:02:54 UTC 2020\n"
    bench.file("/proc/driver/nvidia/version", line)
    bench.file("/proc/driver/nvidia/gpus/0000:00:04.0/information", "Model: \t\t Tesla V100-SXM2-16GB\nIRQ: 10\n")
    found = list(torch.check(bench.machine(), PythonInfo(A100)))
    assert "Tesla V100-SXM2-16GB" in named(found, "driver").words
    assert named(found, "torch on this driver").verdict == "fail"


def test_an_nvidia_smi_that_fails_is_told_in_its_own_words(bench):
    bench.says("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch\n", code=18)
    finding = named(torch.check(bench.machine(), PythonInfo(A100)), "driver")
    assert finding.verdict == "fail"
    assert "Driver/library version mismatch" in finding.words


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"torch": "2.2.0+cu118"}, "torch", "versions 2.11 to 2.13"),
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, "torch on this driver", "CPU-only build"),
        ({"available": False}, "GPUs in torch", "torch sees none"),
        ({"capabilities": [[7, 0]]}, "GPUs in torch", "compute capability 7.0"),
        ({"errors": {"sum_on_gpu": "AcceleratorError: CUDA error: initialization error"}}, "GPUs in torch", "a sum on"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_named(bench, change, name, words):
    bench.gpus()
    finding = named(torch.check(bench.machine(), PythonInfo(A100 | change)), name)
    assert finding.verdict == "fail"
    assert words in finding.words
    assert finding.hint


def test_code_for_an_older_minor_version_and_ptx_both_run(bench):
    bench.gpus(name="NVIDIA A10", driver="570.86.10", cuda="12.8")
    for built in (["sm_80"], ["compute_70"], ["sm_86"]):
        seen = PythonInfo(A100 | {"gpus": ["NVIDIA A10"], "capabilities": [[8, 6]], "built_for": built})
        assert named(torch.check(bench.machine(), seen), "GPUs in torch").verdict == "ok", built


def test_a_torch_that_cannot_be_imported_is_explained(bench):
    python = bench.says(
        "python",
        '{"python": [3, 12, 1], "errors": {"import_torch": "ImportError: libcudnn.so.8: cannot open shared object '
        'file: No such file or directory"}}',
    )
    machine = bench.machine()
    finding = named(torch.check(machine, read_python_info(type(machine)({}, python=str(python)))), "torch")
    assert finding.verdict == "fail"
    assert "libcudnn.so.8" in finding.words
    assert "--fix" in finding.hint


def test_kernels_that_are_missing_or_broken_are_named(bench):
    def found(name, **change):
        return named(fast_kernels.check(bench.machine(), PythonInfo(A100 | change)), name)

    assert found("attention").verdict == "ok"
    assert "without flash" in found("attention", flash=False).words
    assert "7.5" in found("attention", capabilities=[[7, 5]]).words
    assert "no C compiler" in found("Triton").words
    bench.says("gcc", "")
    assert found("Triton").verdict == "ok"
    assert found("Triton", packages={}).verdict == "fail"
    broken = {"import_transformer_engine": "ImportError: te.so: undefined symbol: _ZN3c10"}
    engine = found("Transformer Engine", packages={"transformer_engine": "1.2"}, errors=broken)
    assert engine.verdict == "warn"
    assert "another version of torch" not in engine.words
    assert "rebuild it for this torch" in engine.hint
    assert found("flash-attn").verdict == "absent"
