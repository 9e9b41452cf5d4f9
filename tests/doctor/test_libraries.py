import struct

from steelyard.doctor import elf, sonames
from steelyard.doctor.checks import libraries
from steelyard.doctor.python_info import PythonInfo
from tests.doctor.conftest import named

NOTHING = PythonInfo()


def found(bench, name, seen=NOTHING, **environment):
    return named(libraries.check(bench.machine(**environment), seen), name)


def test_a_library_says_its_name_what_it_needs_and_where_it_looks(bench):
    stub = bench.library(bench.path / "libnccl.so.2", "libnccl.so.2")
    path = bench.library(bench.path / "a" / "libx.so", "libx.so.1", needed=[stub], search="$ORIGIN/../b")
    read = elf.read(path)
    assert read is not None
    assert (read.soname, read.needed) == ("libx.so.1", ("libnccl.so.2",))
    assert read.search == (bench.path / "b",)


def test_what_is_no_library_is_not_read_as_one(bench):
    head = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64) + bytes(14) + struct.pack("<HH", 56, 1)
    no_names = head.ljust(64, b"\0") + struct.pack("<IIQQQQ", elf.DYNAMIC, 0, 120, 0, 0, 32) + bytes(200)
    for content in (b"", b"\x7fELF", b"hello" * 100, b"\x7fELF\x02\x01" + bytes(200), no_names):
        (bench.path / "x.so").write_bytes(content)
        assert elf.read(bench.path / "x.so") is None


def test_without_torch_nothing_is_asked_for(bench):
    assert {finding.verdict for finding in libraries.check(bench.machine(), NOTHING)} == {"absent"}


def test_libraries_beside_torch_are_found_loaded_and_asked_for_their_version(bench):
    packages = bench.torch(
        "libnccl.so.2", "libcudnn.so.9", search="$ORIGIN/../../nvidia/nccl/lib:$ORIGIN/../../nvidia/cudnn/lib"
    )
    bench.versioned(packages / "nvidia/nccl/lib/libnccl.so.2", "libnccl.so.2", 22703)
    bench.versioned(packages / "nvidia/cudnn/lib/libcudnn.so.9", "libcudnn.so.9", 91002)
    assert found(bench, "NCCL").verdict == "ok"
    assert "libnccl.so.2 2.27.3 loads" in found(bench, "NCCL").words
    assert "libcudnn.so.9 9.10.2 loads" in found(bench, "cuDNN").words
    assert found(bench, "CUPTI").verdict == "absent"


def test_a_library_under_another_name_is_found_and_would_be_linked(bench):
    """As in a conda environment that an NGC image's torch is run beside."""
    bench.torch("libcudnn.so.8")
    conda = bench.path / "conda"
    main = bench.versioned(conda / "lib/libcudnn.so.8.9.7", "libcudnn.so.8", 8907)
    part = bench.library(conda / "lib/libcudnn_cnn_infer.so.8.9.7", "libcudnn_cnn_infer.so.8")
    finding = found(bench, "cuDNN", CONDA_PREFIX=str(conda))
    assert finding.verdict == "fail"
    assert "torch needs libcudnn.so.8" in finding.words
    assert finding.links == {"libcudnn.so.8": str(main), "libcudnn_cnn_infer.so.8": str(part)}


def test_cupti_is_found_in_nsights_folder_and_in_cudas_extras(bench):
    bench.torch("libcupti.so.12")
    place = bench.root / "usr/local/cuda-12.3/NsightSystems-cli-2023.4.1/target-linux-x64"
    path = bench.versioned(place / "libcupti.so.12.4", "libcupti.so.12", 22)
    assert found(bench, "CUPTI").links == {"libcupti.so.12": str(path)}
    newer = bench.versioned(bench.path / "cuda/extras/CUPTI/lib64/libcupti.so.2024.1", "libcupti.so.12", 22)
    assert found(bench, "CUPTI", CUDA_HOME=str(bench.path / "cuda")).links == {"libcupti.so.12": str(newer)}


def test_a_library_that_is_nowhere_names_the_package(bench):
    bench.torch("libnccl.so.2")
    finding = found(bench, "NCCL")
    assert (finding.verdict, finding.is_fixable) == ("fail", False)
    assert "nvidia-nccl-cu12" in finding.hint


def test_a_library_that_only_has_the_right_name_is_caught(bench):
    bench.torch("libcudnn.so.9")
    folder = bench.path / "lib"
    bench.versioned(folder / "libcudnn.so.9", "libcudnn.so.8", 8907)
    finding = found(bench, "cuDNN", LD_LIBRARY_PATH=str(folder))
    assert finding.verdict == "fail"
    assert "but is libcudnn.so.8" in finding.words


def test_a_file_that_is_no_library_is_caught(bench):
    bench.torch("libnccl.so.2")
    folder = bench.path / "lib"
    folder.mkdir()
    (folder / "libnccl.so.2").write_text("version https://git-lfs.github.com/spec/v1")
    finding = found(bench, "NCCL", LD_LIBRARY_PATH=str(folder))
    assert finding.verdict == "fail"
    assert "is not a library" in finding.words


def test_a_library_that_needs_another_that_is_missing_is_told(bench):
    bench.torch("libnccl.so.2")
    stub = bench.library(bench.path / "gone" / "libmissing.so.1", "libmissing.so.1")
    bench.library(bench.path / "lib" / "libnccl.so.2", "libnccl.so.2", needed=[stub])
    stub.unlink()
    finding = found(bench, "NCCL", LD_LIBRARY_PATH=str(bench.path / "lib"))
    assert finding.verdict == "fail"
    assert "libmissing.so.1" in finding.words
    assert "it depends on libmissing.so.1" in finding.hint


def test_a_library_that_crashes_is_told_and_does_not_crash_doctor(bench):
    bench.torch("libnccl.so.2")
    crash = "__attribute__((constructor)) static void go(void) { *(volatile int *)0 = 1; }"
    bench.library(bench.path / "lib" / "libnccl.so.2", "libnccl.so.2", source=crash)
    finding = found(bench, "NCCL", LD_LIBRARY_PATH=str(bench.path / "lib"))
    assert finding.verdict == "fail"
    assert "crashed the process" in finding.words


def test_an_older_nccl_that_comes_first_is_named(bench):
    bench.torch("libnccl.so.2")
    folder = bench.path / "lib"
    bench.versioned(folder / "libnccl.so.2", "libnccl.so.2", 21904)
    finding = found(bench, "NCCL", PythonInfo({"nccl": [2, 27, 3]}), LD_LIBRARY_PATH=str(folder))
    assert finding.verdict == "warn"
    assert "2.19.4" in finding.words
    assert str(folder) in finding.hint


def test_what_torch_has_loaded_is_not_called_missing(bench):
    """torch may find a library by ways of its own, and load it beside others that it needs."""
    bench.torch("libnccl.so.2", "libcudnn.so.9")
    stub = bench.library(bench.path / "gone" / "libmissing.so.1", "libmissing.so.1")
    bench.library(bench.path / "lib" / "libnccl.so.2", "libnccl.so.2", needed=[stub])
    stub.unlink()
    works = PythonInfo({"torch": "2.13.0+cu126", "torch_cuda": "12.6"})
    assert found(bench, "NCCL", works, LD_LIBRARY_PATH=str(bench.path / "lib")).verdict == "ok"
    assert found(bench, "cuDNN", works).verdict == "ok"


def test_the_rest_of_cuda_is_one_line(bench):
    bench.torch("libcudart.so.12", "libcublas.so.12", "libnvrtc.so.12")
    folder = bench.path / "lib"
    bench.library(folder / "libcudart.so.12", "libcudart.so.12")
    finding = found(bench, "CUDA", LD_LIBRARY_PATH=str(folder))
    assert finding.verdict == "fail"
    assert "libcublas.so.12" in finding.words
    assert "libnvrtc.so.12" in finding.words


def test_names_that_torch_asks_for_come_from_its_own_files(bench):
    packages = bench.torch("libnccl.so.2", "libcudnn.so.9")
    asked = sonames.wanted(packages / "torch")
    assert {want.soname for want in asked} == {"libnccl.so.2", "libcudnn.so.9"}
    assert {want.by for want in asked} == {"libtorch_cuda.so"}
