"""Messages between ranks: the transports, and what several ranks do together with them."""
