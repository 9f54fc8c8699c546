"""What is said about mistakes in a hostfile."""


def test_an_unknown_word_is_marked(check):
    files = {"hosts.txt": "a slots=1 foo=3\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `foo=3` after host `a`
 --> hosts.txt:1:11
  |
1 | a slots=1 foo=3
  |           ^^^^^ expected `slots=` or `max_slots=`

hint: write one host a line; a comment begins with `#`
"""
    check(files, expected)


def test_a_misspelled_slots_is_recognised(check):
    files = {"hosts.txt": "a lots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `lots=1` after host `a`
 --> hosts.txt:1:3
  |
1 | a lots=1
  |   ^^^^^^ expected `slots=` or `max_slots=`

hint: did you mean `slots`?
"""
    check(files, expected)


def test_a_number_with_a_letter_is_marked(check):
    files = {"hosts.txt": "a slots=1x\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` is `1x`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=1x
  |         ^^ expected a whole number from 1 to 65536
"""
    check(files, expected)


def test_slots_without_a_number_are_marked(check):
    files = {"hosts.txt": "a slots\nb slots=\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` has no value; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:3
  |
1 | a slots
  |   ^^^^^ expected a whole number from 1 to 65536
  = note: the same again in line 2
"""
    check(files, expected)


def test_no_slots_are_not_enough(check):
    files = {"hosts.txt": "a slots=0\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` is `0`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=0
  |         ^ expected a whole number from 1 to 65536

hint: to leave the host out, put `#` before its line
"""
    check(files, expected)


def test_a_negative_number_of_slots_is_marked(check):
    files = {"hosts.txt": "a slots=-1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` is `-1`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=-1
  |         ^^ expected a whole number from 1 to 65536
"""
    check(files, expected)


def test_a_huge_number_of_slots_is_refused(check):
    files = {"hosts.txt": "a slots=99999999999\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` is `99999999999`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=99999999999
  |         ^^^^^^^^^^^ expected a whole number from 1 to 65536
"""
    check(files, expected)


def test_too_many_slots_in_all_are_refused(check):
    files = {"hosts.txt": "node[01-20] slots=65536\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: the hosts offer 1310720 slots in all; at most 1000000 were expected
 --> hosts.txt:1:13
  |
1 | node[01-20] slots=65536
  |             ^^^^^^^^^^^ 65536 of them
"""
    check(files, expected)


def test_max_slots_below_slots_are_marked(check):
    files = {"hosts.txt": "a slots=4 max_slots=2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `max_slots=2` is less than `slots=4`
 --> hosts.txt:1:11
  |
1 | a slots=4 max_slots=2
  |           ^^^^^^^^^^^ expected 4 or more
 --> hosts.txt:1:3
  |
1 | a slots=4 max_slots=2
  |   -------
"""
    check(files, expected)


def test_slots_twice_on_a_line_are_marked(check):
    files = {"hosts.txt": "a slots=1 slots=2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: host `a` gets `slots` twice on one line
 --> hosts.txt:1:11
  |
1 | a slots=1 slots=2
  |           ^^^^^^^
 --> hosts.txt:1:3
  |
1 | a slots=1 slots=2
  |   ------- first here
"""
    check(files, expected)


def test_a_bare_number_is_taken_for_slots(check):
    files = {"hosts.txt": "a 4\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `4` after host `a`
 --> hosts.txt:1:3
  |
1 | a 4
  |   ^ expected `slots=` or `max_slots=`

hint: did you mean `slots=4`?
"""
    check(files, expected)


def test_two_hosts_on_a_line_are_marked(check):
    files = {"hosts.txt": "a slots=1 b slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `b` after host `a`
 --> hosts.txt:1:11
  |
1 | a slots=1 b slots=1
  |           ^ expected `slots=` or `max_slots=`

hint: write one host a line; a comment begins with `#`
"""
    check(files, expected)


def test_a_colon_is_taken_for_slots(check):
    files = {"hosts.txt": "a:2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `a:2` cannot be a host name
 --> hosts.txt:1:1
  |
1 | a:2
  | ^^^ neither a name nor an IPv6 address

hint: write `a slots=2`
"""
    check(files, expected)


def test_a_comma_is_no_part_of_a_name(check):
    files = {"hosts.txt": "a,b slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `a,b` cannot be a host name
 --> hosts.txt:1:1
  |
1 | a,b slots=1
  | ^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

hint: write one host a line
"""
    check(files, expected)


def test_a_line_without_a_host_is_marked(check):
    files = {"hosts.txt": "slots=2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `slots=2` cannot be a host name
 --> hosts.txt:1:1
  |
1 | slots=2
  | ^^^^^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

hint: name the host first: `HOST slots=2`
"""
    check(files, expected)


def test_a_port_belongs_into_the_cluster_file(check):
    files = {"hosts.txt": "a slots=1 port=2222\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `port=2222` after host `a`
 --> hosts.txt:1:11
  |
1 | a slots=1 port=2222
  |           ^^^^^^^^^ expected `slots=` or `max_slots=`

hint: write `port: N` in cluster.yaml, which lies beside the hostfile
"""
    check(files, expected)


def test_a_user_stands_before_the_host(check):
    files = {"hosts.txt": "a slots=1 user=joe\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T012]: unknown word `user=joe` after host `a`
 --> hosts.txt:1:11
  |
1 | a slots=1 user=joe
  |           ^^^^^^^^ expected `slots=` or `max_slots=`

hint: write the login name before the host: `joe@a`
"""
    check(files, expected)


def test_an_odd_login_name_is_marked(check):
    files = {"hosts.txt": "jo;e@a slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `jo;e` cannot be a login name
 --> hosts.txt:1:1
  |
1 | jo;e@a slots=1
  | ^^^^ a login name has letters, digits, `-`, `_` and `.`
"""
    check(files, expected)


def test_names_that_a_shell_would_take_apart_are_marked(check):
    files = {
        "hosts.txt": """\
$(reboot) slots=1
a;b slots=1
"a" slots=1
-oProxyCommand=x slots=1
^a slots=1
+n0 slots=1
""",
        "rank_bindings.yaml": None,
        "mgd.yaml": None,
    }
    expected = """\
error[T014]: `$(reboot)` cannot be a host name
 --> hosts.txt:1:1
  |
1 | $(reboot) slots=1
  | ^^^^^^^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

error[T014]: `a;b` cannot be a host name
 --> hosts.txt:2:1
  |
2 | a;b slots=1
  | ^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

error[T014]: `"a"` cannot be a host name
 --> hosts.txt:3:1
  |
3 | "a" slots=1
  | ^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

error[T014]: `-oProxyCommand=x` cannot be a host name
 --> hosts.txt:4:1
  |
4 | -oProxyCommand=x slots=1
  | ^^^^^^^^^^^^^^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

error[T014]: `^a` cannot be a host name
 --> hosts.txt:5:1
  |
5 | ^a slots=1
  | ^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends

error[T014]: `+n0` cannot be a host name
 --> hosts.txt:6:1
  |
6 | +n0 slots=1
  | ^^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends
"""
    check(files, expected)


def test_an_address_with_a_part_above_255_is_marked(check):
    files = {"hosts.txt": "10.0.0.256 slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `10.0.0.256` cannot be a host name
 --> hosts.txt:1:1
  |
1 | 10.0.0.256 slots=1
  | ^^^^^^^^^^ an IPv4 address has four numbers from 0 to 255
"""
    check(files, expected)


def test_a_range_that_counts_down_is_marked(check):
    files = {"hosts.txt": "node[3-1] slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `node[3-1]` cannot be a host name
 --> hosts.txt:1:1
  |
1 | node[3-1] slots=1
  | ^^^^^^^^^ a range counts upwards
"""
    check(files, expected)


def test_a_bracket_without_a_partner_is_marked(check):
    files = {"hosts.txt": "node[1-3 slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `node[1-3` cannot be a host name
 --> hosts.txt:1:1
  |
1 | node[1-3 slots=1
  | ^^^^^^^^ a bracket has no partner
"""
    check(files, expected)


def test_a_host_with_slots_twice_is_marked(check):
    files = {"hosts.txt": "a slots=1\nb slots=1\na slots=2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: host `a` is listed again with a number of slots
 --> hosts.txt:3:3
  |
3 | a slots=2
  |   ^^^^^^^ and again here
 --> hosts.txt:1:1
  |
1 | a slots=1
  | - first listed here
  = note: mpirun adds up lines of a host only if they have no `slots=`

hint: write one line: `a slots=3`
"""
    check(files, expected)


def test_slots_after_a_bare_line_are_marked(check):
    files = {"hosts.txt": "a\na slots=2\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: host `a` is listed again with a number of slots
 --> hosts.txt:2:3
  |
2 | a slots=2
  |   ^^^^^^^ and again here
 --> hosts.txt:1:1
  |
1 | a
  | - first listed here
  = note: mpirun adds up lines of a host only if they have no `slots=`

hint: write one line: `a slots=3`
"""
    check(files, expected)


def test_names_equal_up_to_the_first_dot_are_one_host_to_mpirun(check):
    files = {"hosts.txt": "a.lab1 slots=1\na.lab2 slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: hosts `a.lab1` and `a.lab2` are both `a` to mpirun
 --> hosts.txt:2:1
  |
2 | a.lab2 slots=1
  | ^^^^^^
 --> hosts.txt:1:1
  |
1 | a.lab1 slots=1
  | ------ first listed here
  = note: mpirun knows a host by the part of its name before the first dot
"""
    check(files, expected)


def test_names_that_differ_in_letter_case_are_one_host(check):
    files = {"hosts.txt": "Loudbox slots=1\nloudbox slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: hosts `Loudbox` and `loudbox` differ only in letter case
 --> hosts.txt:2:1
  |
2 | loudbox slots=1
  | ^^^^^^^ the same machine
 --> hosts.txt:1:1
  |
1 | Loudbox slots=1
  | ------- first listed here
"""
    check(files, expected)


def test_a_host_with_two_login_names_is_marked(check):
    files = {"hosts.txt": "joe@a\nann@a\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T016]: host `a` is listed with two login names
 --> hosts.txt:2:5
  |
2 | ann@a
  |     ^
 --> hosts.txt:1:5
  |
1 | joe@a
  |     - first listed here
"""
    check(files, expected)


def test_an_empty_file_is_refused(check):
    files = {"hosts.txt": "", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T002]: hosts.txt is empty; a hostfile was expected
"""
    check(files, expected)


def test_a_file_of_comments_is_refused(check):
    files = {"hosts.txt": "# nothing here\n\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T002]: hosts.txt lists no host; mpirun would run everything on this machine

hint: for this machine alone: `localhost slots=4`
"""
    check(files, expected)


def test_a_rankfile_is_recognised_and_translated(check):
    files = {
        "hosts.txt": """\
# pins
rank 0=a slot=0
rank 1=b slot=0
rank 2=a slot=1
""",
        "rank_bindings.yaml": None,
        "mgd.yaml": None,
    }
    expected = """\
error[T015]: hosts.txt is a rankfile, not a hostfile: `rank 0=a slot=0`
 --> hosts.txt:2:1
  |
2 | rank 0=a slot=0
  | ^^^^^^^^^^^^^^^ as a line of a hostfile: `a slots=2`
  = note: ranks take the slots in the order of the hostfile, so it needs no rank numbers

hint: as a hostfile, one line each: `a slots=2`, `b slots=1`; there the ranks of one host follow each other, so renumber those of `a`
"""
    check(files, expected)


def test_all_lines_are_checked(check):
    files = {"hosts.txt": "a slots=1x\nb foo\nc! slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T013]: `slots` is `1x`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=1x
  |         ^^ expected a whole number from 1 to 65536

error[T012]: unknown word `foo` after host `b`
 --> hosts.txt:2:3
  |
2 | b foo
  |   ^^^ expected `slots=` or `max_slots=`

hint: write one host a line; a comment begins with `#`

error[T014]: `c!` cannot be a host name
 --> hosts.txt:3:1
  |
3 | c! slots=1
  | ^^ a name has letters, digits, `-`, `_` and `.`, with a letter or digit at both ends
"""
    check(files, expected)


def test_windows_line_ends_are_noted(check):
    files = {"hosts.txt": "a slots=1\r\nb slots=1\r\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
note[T010]: hosts.txt has Windows line ends in 2 lines; they were read as plain ones
 --> hosts.txt:1:1
  |
1 | a slots=1
  | ^^^^^^^^^
"""
    check(files, expected)


def test_a_byte_order_mark_is_noted(check):
    files = {"hosts.txt": b"\xef\xbb\xbfa slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
note[T009]: hosts.txt begins with a byte-order mark, which was skipped
 --> hosts.txt:1:1
  |
1 | a slots=1
  | ^^^^^^^^^
"""
    check(files, expected)


def test_utf_16_is_refused(check):
    files = {
        "hosts.txt": b"\xff\xfea\x00 \x00s\x00l\x00o\x00t\x00s\x00=\x001\x00\n\x00",
        "rank_bindings.yaml": None,
        "mgd.yaml": None,
    }
    expected = """\
error[T003]: hosts.txt is UTF-16 text; UTF-8 was expected

hint: a hostfile is a text file; save it as UTF-8
"""
    check(files, expected)


def test_bytes_that_are_no_text_are_refused(check):
    files = {"hosts.txt": b"a slots=1\nb\xff slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T003]: hosts.txt is not UTF-8 text: byte 0xff in line 2

hint: a hostfile is a text file; save it as UTF-8
"""
    check(files, expected)


def test_a_zero_byte_is_refused(check):
    files = {"hosts.txt": b"a slots=1\x00\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T003]: hosts.txt is not text: line 1 holds a zero byte
"""
    check(files, expected)


def test_control_characters_stay_on_one_line(check):
    files = {"hosts.txt": "a\x1b[31m slots=1\n", "rank_bindings.yaml": None, "mgd.yaml": None}
    expected = """\
error[T014]: `a\\x1b[31m` cannot be a host name
 --> hosts.txt:1:1
  |
1 | a\\x1b[31m slots=1
  | ^^^^^^^^^ a bracket has no partner
"""
    check(files, expected)


def test_a_very_long_word_is_cut(check):
    files = {
        "hosts.txt": "a slots=999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999\n",
        "rank_bindings.yaml": None,
        "mgd.yaml": None,
    }
    expected = """\
error[T013]: `slots` is `99999999999999999999999999999999999999999999999999999999999…`; a whole number from 1 to 65536 was expected
 --> hosts.txt:1:9
  |
1 | a slots=99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999…
  |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ expected a whole number from 1 to 65536
"""
    check(files, expected)


def test_ranges_of_hostile_sizes_are_refused_at_once(check):
    files = {"hosts.txt": "n[1-65536]\n" * 5, "mgd.yaml": None, "rank_bindings.yaml": None}
    expected = """\
error[T013]: hosts.txt lists more than 262144 hosts
 --> hosts.txt:5:1
  |
5 | n[1-65536]
  | ^^^^^^^^^^ up to here
"""
    check(files, expected)


def test_a_list_of_ranges_of_hostile_size_is_refused(check):
    files = {"hosts.txt": f"n[{'1-65536,' * 9}1]\n", "mgd.yaml": None, "rank_bindings.yaml": None}
    expected = """\
error[T014]: `n[1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1…` cannot be a host name
 --> hosts.txt:1:1
  |
1 | n[1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1-65536,1]
  | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the range stands for more than 65536 hosts
"""
    check(files, expected)
