"""Everything done on other machines before a run: reaching them, checking them, bringing code and an environment there."""
