"""Measuring pairs: in virtual time (`simulate`)."""
