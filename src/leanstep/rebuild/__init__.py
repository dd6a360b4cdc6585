"""Which ops run again for what is dropped, of one call of a block."""
