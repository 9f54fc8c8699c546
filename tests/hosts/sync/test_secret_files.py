"""Files that look like secrets stay on the launching machine, and the user is told."""

from pathlib import Path

import paramiko
import pydantic
import pytest
import rich
import typer
import yaml

from ttlaunch.hosts.sync.read_files import CHUNK
from ttlaunch.hosts.sync.secret_files import KeySearch, has_private_key, holds_private_key, looks_secret

BEGIN = "-----BEGIN PRIVATE KEY-----"
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("name", "text", "secret"),
    [
        (".env", "A=1", True),
        (".env.production", "A=1", True),
        (".env.example", "A=", False),
        ("environment.yml", "A=1", False),
        ("id_rsa", "", True),
        ("kubeconfig.yaml", "", True),
        ("lab.kubeconfig", "", True),
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
        ("prod.env", "", True),
        (".envrc", "", True),
        (".env.local", "", True),
        ("sample.env", "", False),
        ("env", "", False),
        ("deploy_key", "", True),
        ("deploy_key.py", "", False),
        ("deploy_key.pub", "", False),
        ("id_rsa.bak", "", True),
        ("id_rsa_github", "", True),
        ("ID_RSA", "", True),
        ("id_rsa.py", "", False),
        ("ssh_host_ed25519_key", "", True),
        ("secrets.yaml", "", True),
        ("prod.secrets.toml", "", True),
        ("secrets.example.yaml", "", False),
        ("secrets.py", "", False),
        ("client_secret.json", "", True),
        ("client_secret_123.apps.googleusercontent.com.json", "", True),
        ("application_default_credentials.json", "", True),
        (".pgpass", "", True),
        ("kaggle.json", "", True),
        (".ssh/mykey", "", True),
        (".ssh/keys/mykey", "", True),
        (".ssh/config", "", True),
        (".ssh/known_hosts", "", False),
        (".ssh/mykey.pub", "", False),
        (".huggingface/token", "", True),
        (".cache/huggingface/token", "", True),
        ("tokenizers/huggingface.py", "", False),
        (".docker/config.json", "", True),
        (".kube/config", "", True),
        (".aws/credentials", "", True),
        (".aws/config", "", True),
        (".config/gcloud/legacy/adc.json", "", True),
        (".gnupg/secring.gpg", "", True),
        ("docker/config.json", "", False),
        ("pip.conf", "index-url = https://me:pw@host/simple", True),
        ("pip.conf", "index-url = https://host/simple", False),
        (".yarnrc.yml", "npmAuthToken: x", True),
    ],
)
def test_a_file_looks_secret_by_its_name_and_where_that_says_little_by_what_is_in_it(tmp_path, name, text, secret):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert secret is looks_secret(bytes(path))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (KEY, True),
        ("x" * 70_000 + "\n" + KEY, True),
        ("-----BEGIN PRIVATE KEY-----\r\nMIIE\r\n", True),
        ("key: |\n  -----BEGIN RSA PRIVATE KEY-----\n  MIIE\n", True),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ\n", True),
        (f'{{"private_key": "{BEGIN}\\nMIIEvQIBADANBgkqhkiG9w0B\\n"}}', True),
        (f"KEY='{BEGIN}\\nMHcCAQEEIIIIIIIIIIII'", True),
        (f'KEY = """{BEGIN}\n{BODY}\n', True),
        (f"KEY=r'''{BEGIN}\r\n{BODY}", True),
        (f'export KEY="{BEGIN}\n{BODY}\n"\n', True),
        (f"<key>{BEGIN}\n{BODY}</key>", True),
        (f"key={BEGIN}\\n{BODY}\\n", True),
        (f"key: '{BEGIN}\n\n  {BODY}\n'\n", True),
        (f'("{BEGIN}\\n"\n     "{BODY}\\n")\n', True),
        (f'const k = "{BEGIN}\\r\\n" +\n "{BODY}\\r\\n";\n', True),
        (f"\ufeff{BEGIN}\n{BODY}\n", True),
        (f'K = """{BEGIN}\nProc-Type: 4,ENCRYPTED\n', True),
        (f'K = """{BEGIN.replace(" PRIV", " OPENSSH PRIV")}\nb3BlbnNzaC1rZXktdjEAAAAA\n', True),
        ("---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nComment: x\n", True),
        (f'starts_with(text, "{BEGIN}")\n    informationElements()\n', False),
        (f'marks = ("{BEGIN}", "{BEGIN}")\n', False),
        ('BEGIN = b"-----BEGIN OPENSSH PRIVATE KEY-----"\n', False),
        ('if "-----BEGIN PRIVATE KEY-----\\n" in text:\n', False),
        ("# begins with -----BEGIN PRIVATE KEY-----\n", False),
        ("-----BEGIN PUBLIC KEY-----\nMIIE\n", False),
        ("-----BEGIN CERTIFICATE-----\nMIIE\n", False),
    ],
)
def test_a_private_key_is_found_at_any_place_whatever_the_pieces_that_a_file_is_read_in(text, secret):
    content = text.encode()
    for piece in (1, 7, 1000, 65536, 1 << 20):
        search = KeySearch()
        for start in range(0, len(content), piece):
            search.add(content[start : start + piece])
        assert secret is search.found, piece


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (f"{BEGIN}\r\n{BODY}\r\n".encode("utf-16"), True),
        (b"\xfe\xff" + f"{BEGIN}\r\n{BODY}\r\n".encode("utf-16-be"), True),
        (b"PuTTY-User-Key-File-3: ssh-ed25519\r\nEncryption: none\r\n", True),
        (b"# public key: age1xyz\nAGE-SECRET-KEY-1" + b"Q" * 58 + b"\n", True),
        (b"match `PuTTY-User-Key-File-3: `, then the type\n", False),
        (b"begins with AGE-SECRET-KEY-1 and 58 letters\n", False),
    ],
)
def test_keys_of_other_tools_and_in_the_texts_of_windows_are_found(content, secret):
    assert secret == has_private_key(content)


@pytest.mark.parametrize("before", [CHUNK - 10, CHUNK - 1, CHUNK, 2 * CHUNK - 20])
def test_a_file_with_a_private_key_stays_here_whatever_its_name_and_wherever_the_key_begins(
    repository, problems_of, copied, before
):
    (repository / "notes.txt").write_bytes(b"x" * before + b"\n" + KEY.encode())
    (repository / "train.py").write_text("")
    assert [("warning", "S001", "1 file that may hold secrets stays here: `notes.txt`")] == problems_of(repository)
    assert [("warning", "S001", "1 file that may hold secrets stays here: `notes.txt`")] == problems_of(repository)
    (repository / ".ttlaunchignore").write_text("!notes.txt\n")
    assert [".ttlaunchignore", "notes.txt", "train.py"] == copied(repository)


def test_secrets_of_a_recipe_outside_the_project_stay_here_and_are_named(project, tmp_path, problems_of):
    recipe = tmp_path / "mine"
    recipe.mkdir()
    for name in ("recipe.py", "trainer.py"):
        (recipe / name).write_text("")
    (recipe / "prod.env").write_text("TOKEN=1")
    (recipe / "notes.txt").write_text(KEY)
    message = f"2 files in {recipe} that may hold secrets stay here: `notes.txt` and `prod.env`"
    assert [("warning", "S001", message)] == problems_of(project, recipe=recipe)


def test_no_file_of_the_installed_packages_looks_like_a_secret():
    """Hundreds of programs and their data: what is held back wrongly would be missing on hosts."""
    packages = (Path(module.__file__).parent for module in (paramiko, pydantic, rich, typer, yaml))
    files = [path for package in packages for path in package.rglob("*") if path.is_file()]
    assert len(files) > 300
    assert [] == [path for path in files if looks_secret(bytes(path)) or holds_private_key(bytes(path))]


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
