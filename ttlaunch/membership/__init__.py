"""Which workers take part in an elastic run, and what each of them computes: a protocol as pure functions, without clock or socket."""
