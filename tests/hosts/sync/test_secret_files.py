"""Files that look like secrets stay on the launching machine, and the user is told."""

import pytest

from ttlaunch.hosts.sync.secret_files import looks_secret

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("name", "text", "secret"),
    [
        (".env", "A=1", True),
        (".env.production", "A=1", True),
        (".env.example", "A=", False),
        ("environment.yml", "A=1", False),
        ("id_rsa", "", True),
        ("id_ed25519", "", True),
        ("id_ed25519.pub", "", False),
        ("server.pem", KEY, True),
        ("server.key", KEY, True),
        ("certificate.pem", "-----BEGIN CERTIFICATE-----\n", False),
        ("piano.key", "C major\n", False),
        (".netrc", "", True),
        (".git-credentials", "", True),
        ("credentials", "[default]", True),
        ("credentials.py", "pass", False),
        (".npmrc", "//registry/:_authToken=abc", True),
        (".npmrc", "fund=false", False),
        (".pypirc", "password = x", True),
        ("store.p12", "", True),
        ("google-credentials.json", '{"private_key": "x"}', True),
        ("model.json", '{"private_key": "x"}', False),
        ("train.py", "token = 1", False),
    ],
)
def test_a_file_looks_secret_by_its_name_and_where_that_says_little_by_what_is_in_it(tmp_path, name, text, secret):
    (tmp_path / name).write_text(text)
    assert secret is looks_secret(bytes(tmp_path / name))


def test_secrets_stay_here_and_are_named(repository, problems_of):
    (repository / "train.py").write_text("")
    (repository / ".env").write_text("TOKEN=1")
    (repository / "sub").mkdir()
    (repository / "sub/id_rsa").write_text(KEY)
    message = "2 files that may hold secrets stay here: `.env` and `sub/id_rsa`"
    assert [("warning", "S001", message)] == problems_of(repository)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_secret_that_is_named_by_an_exception_is_copied_without_a_word(repository, copied, ignored):
    (repository / ".env").write_text("NOT_SO_SECRET=1")
    (repository / ".ttlaunchignore").write_text("!.env\n")
    if ignored:
        (repository / ".gitignore").write_text(".env\n")
    assert ".env" in copied(repository)


def test_a_secret_that_a_rule_leaves_out_anyway_is_not_mentioned(repository, copied):
    (repository / ".env").write_text("TOKEN=1")
    (repository / ".gitignore").write_text(".env\n")
    assert [".gitignore"] == copied(repository)
