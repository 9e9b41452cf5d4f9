import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import check_pins
import pin

OLD, NEW = check_pins.Target((3, 11), "x86_64"), check_pins.Target((3, 14), "aarch64")


def offered(target, *links: str, text: str = "thing==1.0") -> str:
    pinned = Requirement(text)
    files = [check_pins.read_link(*link.split("|"), pinned) for link in links]
    return check_pins.offer([file for file in files if file], pinned, target)


@pytest.mark.parametrize(
    ("link", "old", "new"),
    [
        ("|thing-1.0-py3-none-any.whl", "wheel", "wheel"),
        ("|thing-1.0-cp310-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", "none", "wheel"),
        ("|thing-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "wheel", "none"),
        ("|thing-1.0-cp314-cp314-manylinux_2_34_aarch64.whl", "none", "none"),  # a newer glibc than torch needs
        ("|thing-1.0.tar.gz", "sdist", "sdist"),
        ("|thing-1.1-py3-none-any.whl", "none", "none"),
        ('data-requires-python="&lt;3.13"|thing-1.0-py3-none-any.whl', "wheel", "none"),
        ('data-yanked=""|thing-1.0-py3-none-any.whl', "none", "none"),
    ],
)
def test_a_pin_is_offered_where_a_file_of_the_index_fits(link, old, new):
    assert (offered(OLD, link), offered(NEW, link)) == (old, new)


def test_a_pin_is_not_needed_where_its_marker_says_so():
    assert offered(NEW, text="thing==1.0; python_version < '3.13'") == "not needed"


def test_dependencies_of_a_dependency_s_extras_are_pinned():
    assert "aiohttp" in pin.closure(["fsspec[http]"])
    assert "aiohttp" not in pin.closure(["fsspec"])


def test_every_pinned_package_has_its_dependencies_pinned_for_every_python_and_processor():
    assert check_pins.unpinned(check_pins.read_pins()) == []
