"""`--format github`: one workflow command for each mistake, escaped as the runner wants it."""

from ttlaunch.diagnostics import Diagnostic, Format, Label, Severity, Source, render

SOURCE = Source("my,files/100%: a.yaml", "one: 1\ntwo: 2\n")


def test_a_mistake_is_an_annotation_at_its_place():
    mistake = Diagnostic("T011", "rank 1 has no mesh", Label(SOURCE.span(2, 6), "no such mesh"))
    expected = "::error file=my%2Cfiles/100%25%3A a.yaml,line=2,col=6,title=T011::rank 1 has no mesh%0Ano such mesh"
    assert expected == render([mistake], form=Format.GITHUB)


def test_notes_hints_and_other_places_follow_in_the_text():
    label, other = Label(Source("a.yaml", "x").span(1, 1)), Label(Source("b.yaml", "y").span(1, 1), "see: here")
    mistake = Diagnostic("P002", "50 % off", label, (other,), ("a fact",), ("do\r\nthis",), Severity.WARNING)
    body = "50 %25 off%0Ab.yaml:1:1: see: here%0Anote: a fact%0Ahint: do%0D%0Athis"
    assert f"::warning file=a.yaml,line=1,col=1,title=P002::{body}" == render([mistake], form=Format.GITHUB)


def test_what_stands_in_no_file_has_no_place():
    typed = Diagnostic("C013", "unknown key", Label(Source("--set", "a=1").span(1, 1)))
    missing = Diagnostic("H001", "no mpirun", severity=Severity.NOTE)
    text = "::error title=C013::unknown key\n::notice title=H001::no mpirun"
    assert text == render([typed, missing], form=Format.GITHUB)


def test_validate_writes_annotations(ttlaunch, here, write_cluster):
    write_cluster(here / "lab", [(0, 1)], meshes=[0, 7])
    bindings = here / "lab/rank_bindings.yaml"
    bindings.write_text(bindings.read_text().replace("mesh_id: 7", "mesh_idd: 7"))
    answer = ttlaunch("validate lab --format github")
    assert answer.stderr.startswith("::error file=lab/rank_bindings.yaml,line=3,col=15,title=T004::unknown key")
    assert all(line.startswith("::") for line in answer.stderr.splitlines())
    assert 3 == answer.status
