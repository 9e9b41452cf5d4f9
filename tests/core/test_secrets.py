import pytest

from steelyard.core import secrets
from steelyard.core.console import console

TOKEN = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {TOKEN}",
        f"https://{TOKEN}@hub.example/x",
        f"https://cdn.example/file?X-Amz-Signature={TOKEN}&a=1",
        f"it was {TOKEN}.",
        f"hf_oauth_{TOKEN}.x-y",
    ],
)
def test_what_looks_like_a_token_is_hidden(text):
    assert TOKEN not in secrets.scrub(text)
    assert secrets.HIDDEN in secrets.scrub(text)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+psycopg://me:Sesame@db.example/studies",
        "postgresql://me:a/b@Sesame@db.example/studies",
        "https://Sesame@hub.example/x",
        "https://api.example/v1?a=1&api_key=Sesame&b=2",
        "https://store.example/x?sv=1&sig=Sesame",
        "MY_SERVICE_SECRET=Sesame python train.py",
        "--env=WANDB_API_KEY=Sesame",
        "curl --password Sesame https://hub.example",
        "db_password='Sesame'",
        "--set hub.token=Sesame",
    ],
)
def test_a_secret_is_known_by_its_name_or_its_place_in_a_url(text):
    assert "Sesame" not in secrets.scrub(text)
    assert secrets.scrub(secrets.scrub(text)) == secrets.scrub(text)


@pytest.mark.parametrize(
    "text",
    [
        "basic training of hf_checkpoint_00001",
        "https://hub.example/a/b?recursive=true",
        "a bearer of news",
        "user@host",
        "docker://alpine:3.18@sha256:0123456789abcdef",
        "git+ssh://git@hub.example/x",
        "http://hub.example:8080/a@b",
        "model.eos_token=</s> train.tokens=1000 --max-tokens 50 MAX_TOKENS=512",
        "set HF_TOKEN=<token> in the shell",
        "TOKENIZERS_PARALLELISM=false HF_TOKEN_PATH=/home/me/token",
        "--tokenizer gpt2 --key text",
    ],
)
def test_ordinary_words_stay(text):
    assert secrets.scrub(text) == text


def test_words_of_a_command_are_redacted_each_as_a_whole():
    words = ["tune", "my.toml", "--password", "two words", "DB_PASSWORD=with space", "--token=a b", "train.steps=5"]
    hidden = ["tune", "my.toml", "--password", "[hidden]", "DB_PASSWORD=[hidden]", "--token=[hidden]", "train.steps=5"]
    assert secrets.redact(words) == hidden
    assert secrets.redact(hidden) == hidden
    assert secrets.redact({"a": [f"x {TOKEN}", 3, None]}) == {"a": ["x [hidden]", 3, None]}


def test_secrets_of_the_environment_and_hidden_values_are_never_printed(monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    secrets.hide("a secret of another shape")
    console.say("0123456789abcdef")
    console.error("a secret of another shape")
    try:
        raise ValueError("a secret of another shape")
    except ValueError as error:
        console.trace(error)
    said = capsys.readouterr().err
    assert "0123456789abcdef" not in said
    assert "another shape" not in said
    assert "Traceback" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_SECRET_ACCESS_KEY", "awssecretvalue"), ("HF_TOKEN_READ", "reading-is-free"), ("MY_TOKENS", "one,two,three"),
     ("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=abc=="), ("SLACK_WEBHOOK_URL", "hooks/T000/B000"),
     ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE0"), ("GOOGLE_CREDENTIALS", '{"a": "\\n"}'), ("ODD_PASSWORD", 'with\\ and "'),
     ("DB_PASS", "hunter2hunter2"), ("my_token", "lowercase123"),
     ("GITHUB_PAT", "github-pat-of-mine"), ("SHORT_TOKEN", "abc12"), ("DB_PWD", "x9$"),
     ("PRIVATE_KEY", "-----BEGIN-----\nc2VjcmV0IGxpbmU\nb25lIG1vcmU=")],
)  # fmt: skip
def test_secrets_are_known_by_many_names_and_hidden_in_a_list_of_the_environment(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for listed in (f"{name}={value}", f"environ({{'{name}': {value!r}}})"):
        for line in listed.splitlines():
            assert not any(
                form in secrets.scrub(line) for part in value.splitlines() for form in (part, repr(part)[1:-1])
            )


def test_short_secrets_and_folders_leave_words_alone(monkeypatch):
    monkeypatch.setenv("SHORT_TOKEN", "loss")
    monkeypatch.setenv("PWD", "/home/somebody")
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/somebody")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "/home/somebody")
    assert secrets.scrub("loss 1.5 in /home/somebody") == "loss 1.5 in /home/somebody"
