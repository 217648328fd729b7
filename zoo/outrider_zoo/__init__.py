"""Trained drafters, as data: <target>/<method>/ beside this file, which Outrider finds and never runs."""
