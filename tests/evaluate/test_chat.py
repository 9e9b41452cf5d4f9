"""Conversations: the tokens of transformers' templates, a cache that is kept, and a real terminal."""

import contextlib
import json
import os
import pty
import re
import select
import sys
import time

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.evaluate.chat import Chat, end_of_answer, open_chat, until
from steelyard.evaluate.generation import Sampling, Writer, writer
from steelyard.finetuning import templates
from tests import preloaded
from tests.evaluate.conftest import steelyard

GREEDY = Sampling(max_tokens=12, temperature=0)
CHATML = templates.NAMED["chatml"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
SECONDS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer):
    """A Llama with a tokenizer that has the marks of its chat template as special tokens."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("chat")
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", chat_template=CHATML, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=None,
        eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def opened(model, **options) -> Chat:
    return open_chat(writer(model), str(model), options.get("template"), options.get("system"))


def test_two_turns_are_answered_as_by_transformers(model):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    chat, messages = opened(model, system="Be brief."), [{"role": "system", "content": "Be brief."}]
    for question in ("def main", "日本語 argument?"):
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = theirs.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answer = "".join(chat.answer(question, GREEDY))
        assert answer == tokenizer.decode(out, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


class Says(torch.nn.Module):
    """A model that generates the given ids, and remembers how many tokens it read each time."""

    def __init__(self, ids, vocab):
        super().__init__()
        self.left, self.read, self.vocab = list(ids), [], vocab
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch, cache):
        self.read.append(batch.tokens_BL.shape[1])
        return torch.nn.functional.one_hot(torch.tensor([[self.left.pop(0)]]), self.vocab).float()


def test_a_turn_reads_only_its_own_tokens(model):
    chat = opened(model)
    encoded = chat.writer.tokenizer.located
    chat.writer.network = says = Says(encoded("import sys<|im_end|>os<|im_end|>")[0], 500)
    assert "".join(chat.answer("def main", GREEDY)) == "import sys"
    says.read.clear()
    assert "".join(chat.answer("and?", GREEDY)) == "os"
    new = encoded("<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")[0]
    assert says.read == [len(new), *([1] * len(encoded("os")[0]))]


def test_an_answer_that_is_cut_short_stays_and_the_next_is_as_without_a_cache(model):
    chat, fresh = opened(model), opened(model)
    pieces = chat.answer("def main", GREEDY)
    first = next(pieces)
    pieces.close()
    assert [(turn.role, turn.content) for turn in chat.turns] == [("user", "def main"), ("assistant", first)]
    fresh.turns = list(chat.turns)
    assert "".join(chat.answer("more", GREEDY)) == "".join(fresh.answer("more", GREEDY))


def test_a_long_conversation_loses_its_oldest_turns_but_not_the_system_prompt(model, capsys):
    chat = opened(model, system="Be brief.")
    for number in range(6):
        assert list(chat.answer(f"question {number} " + "argument " * 10, GREEDY))
    assert "question 0" not in chat.turns[0].content
    assert "question 5" in chat.turns[-2].content
    assert chat.turns[0].role == "user"
    assert "the oldest turn is left out: the context is 256 tokens" in capsys.readouterr().err
    decoded = chat.writer.tokenizer.inner.decode(chat.memory.ids, skip_special_tokens=False)
    assert decoded.startswith("<|im_start|>system\nBe brief.")


def test_the_end_of_an_answer_is_that_of_the_template(model, tokenizer):
    ends = {name: end_of_answer(templates.load(name, tokenizer)) for name in templates.NAMED}
    eos = tokenizer.special("eos_token")
    assert ends["chatml"] == "<|im_end|>"
    assert ends["llama3"] == "<|eot_id|>"
    assert ends["llama2"] == ends["alpaca"] == ends["japanese"] == ends["plain"] == eos
    assert end_of_answer(templates.load(None, writer(model).tokenizer)) == "<|im_end|>"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_text_ends_before_the_end_text_however_it_is_cut_into_pieces(size):
    def cut(text):
        return [text[place : place + size] for place in range(0, len(text), size)]

    assert "".join(until("<|end|>", cut("a <|e b <|<|end|> not shown"))) == "a <|e b <|"
    assert "".join(until("<|end|>", cut("a <|e b <|end"))) == "a <|e b <|end"
    assert "".join(until("", cut("all of it"))) == "all of it"


def test_marks_that_are_several_tokens_also_end_an_answer(models, tokenizer):
    ids = tokenizer.encode("yes<|im_end|>\n<|im_start|>user")
    chat = Chat(Writer(Says(ids, tokenizer.vocab_size), tokenizer, 64, ()), templates.load("chatml", tokenizer))
    assert "".join(chat.answer("?", Sampling(max_tokens=len(ids), temperature=0))) == "yes"


def test_a_model_without_a_template_and_a_template_without_a_system_prompt_are_clear(models, model, tmp_path):
    with pytest.raises(UserError, match="no chat template") as refused:
        opened(models / "llama")
    assert "--template" in str(refused.value)
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no system prompt here') }}")
    with pytest.raises(UserError, match="no system prompt here"):
        list(opened(model, template=str(tmp_path / "strict.jinja"), system="x").answer("hello", GREEDY))


def test_generate_with_chat_prints_the_answer_alone(model):
    words = ("generate", model, "--chat", "--prompt", "def main", "--max-tokens", 12, "--temperature", 0)
    expected = "".join(opened(model).answer("def main", GREEDY))
    assert steelyard(*words, "--stream").stdout == expected + "\n"
    assert json.loads(steelyard(*words, "--json").stdout)["text"] == expected
    refused = steelyard("generate", model, "--prompt", "x", "--system", "y")
    assert refused.returncode == 2
    assert "need --chat" in refused.stderr


class Terminal:
    """`steelyard chat` on a pseudo-terminal that is its controlling terminal."""

    def __init__(self, *words) -> None:
        self.ours, theirs = pty.openpty()
        code = (
            "import fcntl, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            f"from steelyard.cli import main\nmain({[str(word) for word in words]!r})"
        )
        self.process = preloaded.Popen(
            [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def until(self, pattern: str, seconds: float = SECONDS) -> str:
        """What is shown up to a match of the pattern, which is then consumed."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            assert select.select([self.ours], [], [], max(0, end - time.monotonic()))[0], self.shown
            self.shown += os.read(self.ours, 4096).decode(errors="replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C until the prompt is back: Python can miss one that comes just before readline waits."""
        for _ in range(SECONDS // 5):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.until(r"\n> ", seconds=5)
                return
        raise AssertionError(self.shown)


@pytest.fixture
def terminal():
    made = []

    def start(*words) -> Terminal:
        made.append(Terminal(*words))
        return made[-1]

    yield start
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            each.process.kill()
        each.process.wait(SECONDS)
        os.close(each.ours)


def test_a_conversation_on_a_terminal_streams_stops_at_ctrl_c_and_ends_at_ctrl_d(model, terminal):
    chat = terminal("chat", model, "--max-tokens", 1_000_000, "--temperature", 0, "--template", "plain")
    chat.until("Ctrl-D the conversation")
    chat.until("> ")
    chat.type("def main\n")
    chat.until("def main\r\n")
    chat.until(r"[^\r\n]{20}")  # It streams: this answer has no end.
    chat.interrupt()
    chat.interrupt()  # Without an answer, Ctrl-C drops the line.
    chat.type("import sys\n")
    chat.until("import sys\r\n")
    chat.until(r"[^\r\n]{20}")
    chat.interrupt()
    chat.type("\x04")
    assert chat.process.wait(SECONDS) == 0


def test_chat_without_a_terminal_names_the_command_for_scripts(model):
    done = steelyard("chat", model, input="hello\n")
    assert done.returncode == 2
    assert "generate CKPT --chat" in done.stderr


@pytest.mark.slow
def test_the_real_model_answers_a_question_about_the_turn_before(smollm2):
    chat = open_chat(writer(smollm2), str(smollm2), None, "You are a helpful assistant.")
    assert "Paris" in "".join(chat.answer("What is the capital of France?", Sampling(20, 0)))
    assert "Eiffel" in "".join(chat.answer("Name a famous tower in that city.", Sampling(20, 0)))
